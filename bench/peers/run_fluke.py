"""fluke: one process, clients one after another (its parallel algorithms need several GPUs)."""

from __future__ import annotations

import copy
from typing import Any

import torch

# The torchvision that fluke imports may be a CUDA build, which cannot load its operators beside a CPU build
# of torch and then fails on the first of them. None is used here.
_torchvision = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _torchvision.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.client import Client  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402
from fluke.evaluation import ClassificationEval  # noqa: E402
from fluke.server import Server  # noqa: E402
from fluke.utils import ServerObserver  # noqa: E402
from task import (  # noqa: E402
    BATCH,
    CHUNK,
    CORES,
    EPOCHS,
    LR,
    METHOD,
    ROUNDS,
    SGD,
    Given,
    distilling,
    report,
    settle,
)
from torchmetrics import Accuracy  # noqa: E402


class Scheduled(Server):
    """Takes the clients of the given schedule instead of drawing them."""

    schedule: list[list[int]]

    def get_eligible_clients(self, eligible_perc: float) -> Any:
        return [self.clients[k] for k in self.schedule.pop(0)]


class Distilling(Client):
    """A client with FedKPer's loss: the received model teaches."""

    def fit(self, override_local_epochs: int = 0) -> float:
        teacher = copy.deepcopy(self.model).eval()
        self.model.train()
        self.optimizer, self.scheduler = self._optimizer_cfg(self.model)
        for _ in range(self.hyper_params.local_epochs):
            for x, y in self.train_set:
                with torch.no_grad():
                    known = teacher(x)
                self.optimizer.zero_grad()
                distilling(self.model(x), known, y).backward()
                self.optimizer.step()
        return 0.0


class Federation(FedAVG):
    def get_server_class(self) -> type[Server]:
        return Scheduled

    def get_client_class(self) -> type[Client]:
        return Client if METHOD == "fedavg" else Distilling


def loader(images: Any, batch: int, shuffle: bool = False) -> FastDataLoader:
    return FastDataLoader(*images, num_labels=8, batch_size=batch, shuffle=shuffle)


class Report(ServerObserver):
    """Scores the local test parts too, and reports the round."""

    def __init__(self, given: Given, server: Server, evaluator: ClassificationEval) -> None:
        self.given, self.server, self.evaluator = given, server, evaluator
        self.local_tests = loader(given.local_tests(), CHUNK)
        self.done = 0

    def server_evaluation(self, round: int, eval_type: str, evals: dict[str, float], **_: Any) -> None:
        if round <= self.done:  # fluke scores once more at the end
            return
        self.done = round
        self.evaluator.evaluate(round, self.server.model, self.local_tests)
        moved = self.given.moved(self.server.model.state_dict())
        report(round=round, accuracy=evals["accuracy"], moved=moved)


def main() -> None:
    settle(threads=CORES)
    given = Given()
    clients = [loader(given.train(k), BATCH, shuffle=True) for k in range(given.clients)]
    container = DummyDataContainer(clients, [None] * given.clients, loader(given.test, CHUNK), 8)
    evaluator = ClassificationEval(1, 8, accuracy=Accuracy(task="multiclass", num_classes=8))
    FlukeENV().set_evaluator(evaluator)
    FlukeENV().set_eval_cfg(server=True, locals=False, pre_fit=False, post_fit=False)
    FlukeENV().set_inmemory(True)
    optimiser = DDict(name="SGD", lr=LR, **SGD)
    settings = DDict(
        model=given.model(),
        server=DDict(weighted=True),
        client=DDict(
            batch_size=BATCH,
            local_epochs=EPOCHS,
            loss="CrossEntropyLoss",
            optimizer=optimiser,
            scheduler=DDict(name="StepLR", step_size=1, gamma=1.0),
            persistency=False,  # momentum starts anew every round
        ),
    )
    federation = Federation(given.clients, DataSplitter(container, "iid"), settings)
    federation.server.schedule = list(given.schedule)
    federation.attach(Report(given, federation.server, evaluator))
    federation.run(ROUNDS, 0.1, finalize=False)


if __name__ == "__main__":
    main()
