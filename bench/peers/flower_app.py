"""The Flower app: clients in Ray actors with one thread each; the server scores in its own process."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import lru_cache

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import (
    BATCH,
    CORES,
    EPOCHS,
    LR,
    METHOD,
    ROUNDS,
    SGD,
    Given,
    accuracy,
    distilling,
    report,
    settle,
)

client_app, server_app = ClientApp(), ServerApp()


@lru_cache(maxsize=1)
def given(threads: int) -> Given:
    """The data, read once a process."""
    settle(threads)
    return Given()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    data = given(1)
    x, y = data.train(int(message.content["config"]["client"]))  # type: ignore[index, arg-type]
    model = data.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    teacher = copy.deepcopy(model).eval()
    optimiser = torch.optim.SGD(model.parameters(), LR, **SGD)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(y)).split(BATCH):
            images, labels = x[part], y[part]
            if METHOD == "fedavg":
                loss = F.cross_entropy(model(images), labels)
            else:
                with torch.no_grad():
                    known = teacher(images)
                loss = distilling(model(images), known, labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    up = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(up), reply_to=message)


class Scheduled(FedAvg):
    """FedAvg that tells its nodes which of the given clients they are."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message, client in zip(messages, given(CORES).schedule[server_round - 1], strict=True):
            chosen = ConfigRecord({"client": client})
            message.content = RecordDict({"arrays": arrays, "config": chosen})
        return messages


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    data = given(CORES)
    model, local_tests = data.model(), data.local_tests()

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        found = accuracy(model, *data.test)
        accuracy(model, *local_tests)
        if round:
            report(round=round, accuracy=found, moved=data.moved(model.state_dict()))
        return MetricRecord({"accuracy": found})

    strategy = Scheduled(
        fraction_train=0.1, fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=data.clients
    )
    first = ArrayRecord(model.state_dict())
    strategy.start(grid, first, num_rounds=ROUNDS, evaluate_fn=evaluate)
