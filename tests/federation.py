"""Small federations for the tests: a Task by hand, a Site in memory, a whole run in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkper import rng
from fedkper.data.dataset import Dataset
from fedkper.data.partition import Partition, Partitioning
from fedkper.experiment import Experiment
from fedkper.lanes import Lanes
from fedkper.method import Update
from fedkper.record import Record
from fedkper.simulate import simulate
from fedkper.site import Site, site_of
from fedkper.task import SGD, Task
from fedkper.tree import Tree, stack


class InOrder:
    """Randomness without any: samples come in the order in which they lie."""

    def seed(self, purpose: str) -> int:
        return 0

    def orders(self, purpose: str, n: int, epochs: int) -> list[Tensor]:
        return [torch.arange(n) for _ in range(epochs)]


class Small(nn.Module):
    """Two linear layers for 4 x 4 RGB images: a body and a head."""

    def __init__(self, classes: int = 3, features: int = 5) -> None:
        super().__init__()
        self.body = nn.Linear(48, features)
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)).relu())


class Normed(Small):
    """The same with BatchNorm behind the body."""

    def __init__(self, classes: int = 3, features: int = 5) -> None:
        super().__init__(classes, features)
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x.flatten(1))).relu())


def lanes_of(module: type[nn.Module] = Small, seed: int = 0, **arguments: Any) -> Lanes:
    with rng.drawing(seed):
        return Lanes(module(**arguments))


def images(n: int, classes: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """n learnable 4 x 4 RGB images: a class is a brightness pattern under noise."""
    draw = np.random.default_rng(seed)
    patterns = np.random.default_rng(99).integers(40, 215, (classes, 4, 4, 3))
    y = np.arange(n) % classes
    x = np.clip(patterns[y] + draw.normal(0, 25, (n, 4, 4, 3)), 0, 255).astype(np.uint8)
    return x, y.astype(np.int64)


def task_of(
    model: Lanes,
    sizes: Sequence[int],
    *,
    classes: int = 3,
    epochs: int = 2,
    batch: int = 4,
    sgd: SGD | None = None,
    round: int = 0,
    seed: int = 1,
    clients: Sequence[int] | None = None,
    labels: Sequence[Sequence[int]] | None = None,
) -> Task:
    """A Task with one lane a size; client k's data and order depend on k alone."""
    clients = list(range(len(sizes))) if clients is None else list(clients)
    widest = max(sizes)
    x, y = torch.zeros(len(sizes), widest, 4, 4, 3, dtype=torch.uint8), torch.zeros(len(sizes), widest).long()
    for lane, (k, n) in enumerate(zip(clients, sizes, strict=True)):
        pixels, label = images(n, classes, seed=1000 + k)
        x[lane, :n], y[lane, :n] = torch.from_numpy(pixels), torch.from_numpy(label)
        if labels is not None:
            y[lane, :n] = torch.tensor(labels[lane])
    return Task(
        model=model,
        x=x,
        y=y,
        n=torch.tensor(list(sizes)),
        classes=classes,
        streams=[rng.Stream(seed, round, k) for k in clients],
        sgd=sgd or SGD(0.1, 0.9, 0.01),
        epochs=epochs,
        batch=batch,
        round=round,
        rounds=4,
    )


def repeated(tree: Tree, lanes: int) -> Tree:
    return stack([tree] * lanes)


def lane(update: Update, at: int) -> Update:
    """One lane of an update, as a client of its own would have sent it."""
    cut = {f: {k: v[at : at + 1] for k, v in getattr(update, f).items()} for f in ("shared", "own", "sums")}
    return Update(
        cut["shared"], update.weight[at : at + 1], cut["own"], update.samples[at : at + 1], cut["sums"]
    )


def dataset_of(n: int = 120, classes: int = 3) -> Dataset:
    x, y = images(n, classes, seed=1)
    test_x, test_y = images(30, classes, seed=2)
    return Dataset("small", tuple("abcdefgh"[:classes]), x, y, test_x, test_y)


def partition_of(dataset: Dataset, sizes: Sequence[int], test: int = 3) -> Partition:
    """Clients with the given numbers of train samples, and `test` more for the local test."""
    order = np.random.default_rng(0).permutation(len(dataset.train_y))
    train, local, at = [], [], 0
    for n in sizes:
        train.append(order[at : at + n])
        local.append(order[at + n : at + n + test])
        at += n + test
    assert at <= len(order)
    return Partition(
        Partitioning(kind="iid", clients=len(sizes), min_size=1), dataset.hash, tuple(train), tuple(local)
    )


SIZES = (12, 7, 20, 9, 5)


def site(
    method: str = "fedavg",
    module: type[nn.Module] = Small,
    sizes: Sequence[int] = SIZES,
    test: int = 3,
    **fields: Any,
) -> Site:
    """A Site of a few small clients, in memory."""
    defaults = Experiment(clients=len(sizes), fraction=0.5, rounds=4, epochs=2, batch=4, lr=0.05)
    experiment = replace(defaults, method=method, **fields)
    dataset = dataset_of(max(120, sum(sizes) + test * len(sizes)))
    return site_of(experiment, dataset, partition_of(dataset, sizes, test), lanes_of(module, experiment.seed))


def run_site(site: Site, folder: Path, workers: int = 1, **arguments: Any) -> dict[str, Any]:
    """A whole run of a Site in a new folder, or the rest of one that is there."""
    new = not (folder / "run.json").exists()
    record = Record.create(folder) if new else Record.open(folder)
    try:
        if new:
            record.write_json("run.json", {"experiment": site.experiment.to_json()})
        return simulate(site, record, workers, **arguments)
    finally:
        record.close()
