"""pfl-research: one process a core under torchrun, each with one thread, users dealt out between them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.model.pytorch import PyTorchModel
from task import BATCH, CHUNK, CNN, EPOCHS, LR, METHOD, ROUNDS, SGD, Given, distilling, report, settle


class Net(CNN):
    """What pfl asks of a module: its loss and its metrics."""

    def loss(self, x: Any, y: Any) -> Any:
        self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Any, y: Any) -> dict[str, Any]:
        self.eval()
        return {"accuracy": Weighted(int((self(x).argmax(1) == y).sum()), len(y))}


class Shuffled(PyTorchTensorDataset):
    """A user's images in a new order in every epoch, as in the others; pfl's own order stays the same."""

    def iter(self, batch_size: int | None) -> Any:
        x, y = self.raw_data
        for part in torch.randperm(len(y)).split(batch_size or len(y)):
            yield [x[part], y[part]]


class Distilling(FederatedAveraging):
    """FedAvg with FedKPer's loss in the clients: the received model teaches."""

    def train_one_user(self, initial: Any, model: Any, user_dataset: Any, central_context: Any) -> Any:
        teacher = copy.deepcopy(model.pytorch_model).eval()

        def step(net: Any, optimiser: Any, batch: Any, kwargs: Any, args: Any) -> None:
            x, y = batch
            with torch.no_grad():
                known = teacher(x)
            optimiser.zero_grad()
            distilling(net(x), known, y).backward()
            optimiser.step()

        model.do_multiple_epochs_of(user_dataset, central_context.model_train_params, step)
        return model.get_model_difference(initial), Metrics()


class Report(TrainingProcessCallback):
    def __init__(self, given: Given) -> None:
        self.given = given

    def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> Any:
        if torch.distributed.get_rank() == 0:
            found = metrics.to_simple_dict().get("Central val | accuracy")
            moved = self.given.moved({k: w.detach() for k, w in model.variable_map.items()})
            report(round=central_iteration + 1, accuracy=found, moved=moved)
        return False, Metrics()


def main() -> None:
    settle(threads=1)
    given = Given()
    model = given.model(Net)
    order = itertools.chain.from_iterable(given.schedule)
    parts = [given.train(client) for client in range(given.clients)]
    data = FederatedDataset(lambda client: Shuffled(parts[client], user_id=str(client)), lambda: next(order))
    evaluation = NNEvalHyperParams(local_batch_size=CHUNK)

    def scored(name: str, images: Any) -> Any:
        return CentralEvaluationCallback(
            PyTorchTensorDataset(images), evaluation, format_fn=lambda n: StringMetricName(f"{name} | {n}")
        )

    algorithm = FederatedAveraging() if METHOD == "fedavg" else Distilling()
    algorithm.run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS,
            evaluation_frequency=10**9,  # not on the users' own train data, which nobody else scores
            train_cohort_size=2,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(
            model,
            lambda parameters, lr: torch.optim.SGD(parameters, lr, **SGD),
            torch.optim.SGD(model.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=BATCH),
        evaluation,
        [scored("Central val", given.test), scored("Local tests", given.local_tests()), Report(given)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
