"""Federations of the right shapes for an accelerator, runs of them, and how far two runs lie apart."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedkper import checkpoint, graphs, models
from fedkper.data import partition
from fedkper.data.dataset import Dataset
from fedkper.data.sets import SETS
from fedkper.experiment import PRESETS, Experiment
from fedkper.method import client_round
from fedkper.record import Record
from fedkper.sample import sampled_clients
from fedkper.simulate import Member, simulate_together
from fedkper.site import Site, site_of, together
from fedkper.tree import Tree, spread, stack, to

SEEDS = (1, 2, 3)
ROUNDS = 100


class Shape(NamedTuple):
    """What a federation's data look like."""

    size: int
    channels: int
    classes: int
    train: int
    test: int
    clients: int
    fraction: float = 0.1
    alpha: float = 0.1


def published(preset: str) -> Shape:
    """The shape of one of the paper's data sets."""
    info, clients = SETS[PRESETS[preset]["dataset"]], PRESETS[preset]["clients"]
    return Shape(28, info.channels, len(info.classes), info.counts[0], info.counts[2], clients)


@cache
def data(shape: Shape) -> tuple[Dataset, partition.Partition]:
    """A pattern a class under noise; dealt out by the paper's rule."""
    draw = np.random.default_rng(0)
    size = (shape.size, shape.size, shape.channels)
    patterns = draw.integers(0, 128, (shape.classes, *size), dtype=np.uint8)

    def split(n: int) -> tuple[Any, Any]:
        y = draw.integers(0, shape.classes, n)
        return patterns[y] + draw.integers(0, 128, (n, *size), dtype=np.uint8), y

    (train_x, train_y), (test_x, test_y) = split(shape.train), split(shape.test)
    names = tuple(f"class {c}" for c in range(shape.classes))
    asked = partition.Partitioning(clients=shape.clients, alpha=shape.alpha)
    return Dataset("bench", names, train_x, train_y, test_x, test_y), partition.make(asked, train_y, "bench")


def sites(shape: Shape, method: str, seeds: Sequence[int] = SEEDS, **settings: Any) -> list[Site]:
    """Runs of a method that differ in their seed."""
    dataset, dealt = data(shape)
    e = Experiment(method=method, clients=shape.clients, fraction=shape.fraction, **settings)
    made = [models.build(e.model, dataset.shape, shape.classes, s, "", e.precision) for s in seeds]
    first = site_of(e, dataset, dealt, made[0])
    return [replace(first, experiment=replace(e, seed=s), model=m) for s, m in zip(seeds, made, strict=True)]


class Ridden(NamedTuple):
    """What runs gave that went together."""

    seconds: list[float]
    """of each round, recording and checkpoints included"""
    lines: list[dict[str, Any]]
    """of rounds.csv, every run's"""
    shared: list[Tree]
    """what each server had at last"""


class Out(Exception):
    """Enough rounds were measured."""


def ride(
    runs: Sequence[Site],
    device: str,
    lanes: int | None = None,
    most: int = ROUNDS,
    until: float = float("inf"),
) -> Ridden:
    """Lets the runs go together for `most` rounds, or until that time by the clock."""
    at, lines = [time.perf_counter()], []

    def on_round(round: int, line: dict[str, Any]) -> None:
        lines.append(line)

    def on_last(round: int, line: dict[str, Any]) -> None:
        lines.append(line)
        at.append(time.perf_counter())
        if round >= most or at[-1] > until:
            raise Out

    with tempfile.TemporaryDirectory() as folder:
        records = [Record.create(Path(folder) / str(run.experiment.seed)) for run in runs]
        tellers = [on_round] * (len(runs) - 1) + [on_last]
        try:
            members = [Member(*parts) for parts in zip(runs, records, tellers, strict=True)]
            simulate_together(members, device=device, lanes=lanes)
        except Out:
            pass
        finally:
            for record in records:
                record.close()
        shared = [checkpoint.restore(record.checkpoints)[1] for record in records]
    return Ridden([b - a for a, b in pairwise(at)], lines, shared)


@contextmanager
def without_graphs() -> Iterator[None]:
    """Every fit counts as too short to be captured."""
    kept, graphs.WARM_UP = graphs.WARM_UP, sys.maxsize
    try:
        yield
    finally:
        graphs.WARM_UP = kept


def gap(found: Sequence[Tree], right: Sequence[Tree], initial: Sequence[Tree]) -> float:
    """Largest distance of a run's parameters from the right ones, as a share of how far those moved."""

    def distance(a: Tree, b: Tree) -> float:
        there = [a[k].double() - b[k].double() for k in a if k in b]
        return float(torch.stack([d.square().sum() for d in there]).sum().sqrt())

    return max(
        distance(a, b) / max(distance(b, c), 1e-12) for a, b, c in zip(found, right, initial, strict=True)
    )


def largest(found: Sequence[Tree], right: Sequence[Tree]) -> float:
    return max(float((a[k] - b[k]).abs().max()) for a, b in zip(found, right, strict=True) for k in a)


def accuracy_gap(found: Ridden, right: Ridden) -> float:
    names = ("global_acc", "local_acc")
    pairs = [(a[n], b[n]) for a, b in zip(found.lines, right.lines, strict=True) for n in names]
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)


class Group(NamedTuple):
    """Clients ready to train side by side on the device."""

    site: Site
    clients: list[int]
    shared: Tree
    own: Tree

    def train(self, epochs: int) -> None:
        task = replace(self.site.task(self.clients, 0), epochs=epochs)
        client_round(self.site.method, task, self.shared, self.own)


def group(runs: Sequence[Site], device: str, clients: Sequence[int] | None = None) -> Group:
    """Round 0's clients of all runs, or those named."""
    site, e, count = together(runs).to(device), runs[0].experiment, len(runs[0].train_index)
    if clients is None:
        drawn = sampled_clients(0, e.clients, e.fraction, e.sampling, e.seed)
        clients = [r * count + k for r in range(len(runs)) for k in sorted(drawn)]
    initials = [rider.initial for rider in site.riders]
    started = [[to(t, device) for t in site.method.init(site.model, to(i, device))] for i in initials]
    chosen = [started[site.rider(c)] for c in clients]
    if len(runs) == 1:
        return Group(site, list(clients), *(spread(t, len(clients)) for t in started[0]))
    return Group(site, list(clients), stack([s for s, _ in chosen]), stack([o for _, o in chosen]))


def steps(site: Site, round: int) -> int:
    """Steps of the largest client that is sampled in a round."""
    e = site.experiment
    drawn = sampled_clients(round, e.clients, e.fraction, e.sampling, e.seed)
    return e.epochs * max(-(-len(site.train_index[k]) // e.batch) for k in drawn)
