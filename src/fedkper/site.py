"""What every worker holds: data, partition, model, method and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fedkper import rng
from fedkper.data.dataset import Dataset
from fedkper.data.partition import Partition
from fedkper.experiment import Experiment
from fedkper.lanes import Lanes
from fedkper.method import Method
from fedkper.methods import parse
from fedkper.sample import stream
from fedkper.task import SGD, Task
from fedkper.tree import to


@dataclass(frozen=True)
class Site:
    """A federation's data, who has which part of it, its model, method and settings."""

    experiment: Experiment
    method: Method
    model: Lanes
    classes: int
    train_x: Tensor
    """[N, H, W, channels] uint8, in shared memory"""
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    train_index: Sequence[Tensor]
    """per client, D_k"""
    test_index: Sequence[Tensor]
    """per client, L_k"""
    scored: Sequence[int]
    """clients on whose L_k the global model is scored every round"""

    def to(self, device: str) -> Site:
        """The same with its tensors on a device."""
        if device == "cpu":
            return self
        moved = {f.name: to(getattr(self, f.name), device) for f in fields(self) if f.name != "scored"}
        return replace(self, **moved)

    def task(self, clients: Sequence[int], round: int) -> Task:
        """The clients' train data beside each other, a lane each, padded to the largest."""
        e = self.experiment
        parts = [self.train_index[client] for client in clients]
        sizes = [len(part) for part in parts]
        if len(parts) == 1:
            x, y = self.train_x[parts[0]][None], self.train_y[parts[0]][None]
        else:
            x = self.train_x.new_zeros(len(parts), max(sizes), *self.train_x.shape[1:])
            y = self.train_y.new_zeros(len(parts), max(sizes))
            for lane, part in enumerate(parts):
                x[lane, : len(part)], y[lane, : len(part)] = self.train_x[part], self.train_y[part]
        return Task(
            model=self.model,
            x=x,
            y=y,
            n=torch.tensor(sizes, device=y.device),
            classes=self.classes,
            streams=[rng.Stream(e.seed, round, client) for client in clients],
            sgd=SGD(e.lr * e.lr_decay**round, e.momentum, e.weight_decay, e.grad_clip),
            epochs=e.epochs,
            batch=e.batch,
            round=round,
            rounds=e.rounds,
        )


def site_of(experiment: Experiment, dataset: Dataset, partition: Partition, model: Lanes) -> Site:
    """The Site of an experiment on a data set."""
    return Site(
        experiment=experiment,
        method=parse(experiment.method),
        model=model,
        classes=len(dataset.classes),
        train_x=torch.from_numpy(dataset.train_x),
        train_y=torch.from_numpy(dataset.train_y),
        test_x=torch.from_numpy(dataset.test_x),
        test_y=torch.from_numpy(dataset.test_y),
        train_index=[torch.from_numpy(part) for part in partition.train],
        test_index=[torch.from_numpy(part) for part in partition.test],
        scored=_scored(experiment, len(partition.test)),
    )


def _scored(experiment: Experiment, clients: int) -> list[int]:
    """All clients, or --score-clients of them, by chance."""
    if not 0 < experiment.score_clients < clients:
        return list(range(clients))
    drawn = stream("scored clients", experiment.seed).choice(clients, experiment.score_clients, replace=False)
    return sorted(int(k) for k in drawn)
