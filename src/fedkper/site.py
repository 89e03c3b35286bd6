"""What every worker holds: data, partition, model, method and settings.

Runs that differ in their seed only can ride together. Client k of the m-th of them is then called m K + k; of
a run that rides alone it is k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedkper import rng
from fedkper.data.dataset import Dataset
from fedkper.data.partition import Partition
from fedkper.descent import SGD
from fedkper.experiment import Experiment
from fedkper.lanes import Lanes
from fedkper.method import Method
from fedkper.methods import parse
from fedkper.sample import stream
from fedkper.task import Task
from fedkper.tree import Tree, stack, to


class Rider(NamedTuple):
    """What is of one run alone where several ride together."""

    seed: int
    initial: Tree
    """parameters of the initial model"""
    scored: Sequence[int]
    """clients on whose L_k its global model is scored every round"""


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
    together: Sequence[Rider] = ()
    """the runs that ride together; empty for one that rides alone"""

    @property
    def riders(self) -> Sequence[Rider]:
        """The runs that ride together, or the one that rides alone."""
        return self.together or (Rider(self.experiment.seed, self.model.init(), self.scored),)

    def rider(self, client: int) -> int:
        """Which of the runs a client belongs to."""
        return client // len(self.train_index)

    def train_part(self, client: int) -> Tensor:
        """Positions of D_k in the train split."""
        return self.train_index[client % len(self.train_index)]

    def test_part(self, client: int) -> Tensor:
        """Positions of L_k in the train split."""
        return self.test_index[client % len(self.test_index)]

    def to(self, device: str) -> Site:
        """The same with its tensors on a device."""
        if device == "cpu":
            return self
        kept = ("model", "scored", "together")
        moved = {f.name: to(getattr(self, f.name), device) for f in fields(self) if f.name not in kept}
        moved["model"] = self.model.starting(to(self.model.init(), device))
        moved["together"] = [r._replace(initial=to(r.initial, device)) for r in self.together]
        return replace(self, **moved)

    def task(self, clients: Sequence[int], round: int) -> Task:
        """The clients' train data beside each other, a lane each, padded to the largest."""
        e = self.experiment
        parts = [self.train_part(client) for client in clients]
        riders = [self.together[self.rider(client)] for client in clients] if self.together else []
        model = self.model.starting(stack([r.initial for r in riders])) if riders else self.model
        seeds = [r.seed for r in riders] or [e.seed] * len(clients)
        sizes = [len(part) for part in parts]
        if len(parts) == 1:
            x, y = self.train_x[parts[0]][None], self.train_y[parts[0]][None]
        else:
            x = self.train_x.new_zeros(len(parts), max(sizes), *self.train_x.shape[1:])
            y = self.train_y.new_zeros(len(parts), max(sizes))
            for lane, part in enumerate(parts):
                x[lane, : len(part)], y[lane, : len(part)] = self.train_x[part], self.train_y[part]
        return Task(
            model=model,
            x=x,
            y=y,
            n=torch.tensor(sizes, device=y.device),
            classes=self.classes,
            streams=[
                rng.Stream(seed, round, client % len(self.train_index))
                for seed, client in zip(seeds, clients, strict=True)
            ],
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


def together(sites: Sequence[Site]) -> Site:
    """One Site for runs that ride together: the first one's, with what is of each run alone.

    Raises ValueError if they differ in anything else.
    """
    first = sites[0]
    for site in sites[1:]:
        same = replace(site.experiment, seed=first.experiment.seed) == first.experiment
        pairs = zip(
            (*site.train_index, *site.test_index), (*first.train_index, *first.test_index), strict=True
        )
        if not same or not all(torch.equal(a, b) for a, b in pairs):
            raise ValueError("only runs that differ in their seed alone can ride together")
    if len(sites) == 1:
        return first
    return replace(first, together=[rider for site in sites for rider in site.riders])


def _scored(experiment: Experiment, clients: int) -> list[int]:
    """All clients, or --score-clients of them, by chance."""
    if not 0 < experiment.score_clients < clients:
        return list(range(clients))
    drawn = stream("scored clients", experiment.seed).choice(clients, experiment.score_clients, replace=False)
    return sorted(int(k) for k in drawn)
