"""What every peer's runner is given: data, model, loss, settings, and where it reports its rounds.

Needs torch and numpy only, since it runs in each peer's own environment.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

EPOCHS, BATCH, CHUNK = 5, 12, 64
# "tuned": what a user who knows PyTorch adds to a peer's own settings; "default" leaves it out.
TUNED = os.environ.get("PEERS_SETTINGS") == "tuned"
METHOD = os.environ.get("PEERS_METHOD", "fedavg")
ROUNDS = int(os.environ.get("PEERS_ROUNDS", "2"))
CORES = len(os.sched_getaffinity(0))
SGD = {"momentum": 0.9, "weight_decay": 1e-5} | ({"fused": True} if TUNED else {})
LR = 0.01


class CNN(nn.Module):
    """The paper's CNN, with the names of fedkper.models.CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc = nn.Linear(64 * 7 * 7, 512)
        self.head = nn.Linear(512, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits: Tensor = self.head(F.relu(self.fc(x.flatten(1))))
        return logits


class Given:
    """The arrays of the workload as tensors: float images [N, 3, 28, 28] in [-1, 1], scaled once."""

    def __init__(self) -> None:
        with np.load(os.environ["PEERS_DATA"]) as file:
            self.file = dict(file)
        self.x, self.y = self._images("train_x"), torch.from_numpy(self.file["train_y"])
        self.test = self._images("test_x"), torch.from_numpy(self.file["test_y"])
        self.clients = len(self.file["train_parts"])
        self.schedule: list[list[int]] = self.file["schedule"].tolist()

    def _images(self, name: str) -> Tensor:
        x = torch.from_numpy(self.file[name]).movedim(-1, 1).float().div_(127.5).sub_(1)
        return x.contiguous(memory_format=torch.channels_last if TUNED else torch.contiguous_format)

    def train(self, client: int) -> tuple[Tensor, Tensor]:
        part = torch.from_numpy(self.file["train_parts"][client])
        return self.x[part], self.y[part]

    def local_tests(self) -> tuple[Tensor, Tensor]:
        """The local test parts of all clients, one after another."""
        part = torch.from_numpy(self.file["test_parts"].ravel())
        return self.x[part], self.y[part]

    def model(self, cls: type[CNN] = CNN) -> Any:
        """A model with the initial weights that all systems start from."""
        model = cls()
        model.load_state_dict({k: torch.from_numpy(self.file[f"init/{k}"]) for k in model.state_dict()})
        return model.to(memory_format=torch.channels_last) if TUNED else model

    def moved(self, weights: Mapping[str, Tensor]) -> float:
        """How far training has moved the weights from where all systems start: the Euclidean norm."""
        given = {name: torch.from_numpy(self.file[f"init/{name}"]) for name in weights}
        return float(sum((w - given[name]).square().sum() for name, w in weights.items())) ** 0.5


def settle(threads: int) -> None:
    """The process' settings, and a line to the report for every 40 optimiser steps."""
    torch.set_num_threads(threads)
    if TUNED:
        torch.set_flush_denormal(True)
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps % 40 == 0:
            report(steps=40)

    register_optimizer_step_post_hook(count)


def distilling(logits: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    """FedKPer's loss: CE + lambda KL(teacher || student), lambda = min(1 / (the teacher's CE + 1e-8), 10)."""
    trust = (1 / (F.cross_entropy(teacher, y) + 1e-8)).clamp(max=10)
    kl = F.kl_div(logits.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)
    return F.cross_entropy(logits, y) + trust * kl


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    parts = zip(x.split(CHUNK), y.split(CHUNK), strict=True)
    return sum(int((model(a).argmax(1) == b).sum()) for a, b in parts) / len(y)


def report(**values: Any) -> None:
    """One line to the program that measures, with the time; short enough to arrive whole."""
    line = json.dumps({"at": time.perf_counter(), **values}) + "\n"
    pipe = os.open(os.environ["PEERS_REPORT"], os.O_WRONLY | os.O_APPEND)
    os.write(pipe, line.encode())
    os.close(pipe)
