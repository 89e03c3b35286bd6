"""How far two methods lie apart on the same seeds and clients, with a bootstrap confidence interval.

Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13 (percentile interval). Paired, since
two methods share partition, clients and initial model: what varies between seeds or clients cancels out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedkper.sample import stream

RESAMPLES, LEVEL = 2_000, 0.95


class Difference(NamedTuple):
    """The first method minus the second."""

    mean: float
    low: float | None
    """lower end of the 95 % interval; None where there is only one pair"""
    high: float | None
    seeds: int
    clients: int
    """clients with a value of both methods in at least one seed"""


def difference(
    first: Sequence[Mapping[int, float]], second: Sequence[Mapping[int, float]]
) -> Difference | None:
    """Compares two methods by one value per seed and client; None if they share no pair.

    `first`, `second`: a mapping {client: value} a seed, in the same order of seeds. For a value of the whole
    federation take one client, 0. Seeds and clients are resampled independently of each other, with
    replacement, as they are crossed: every seed has the same clients. Raises ValueError for unequal lengths.
    """
    shared = [sorted(a.keys() & b.keys()) for a, b in zip(first, second, strict=True)]
    clients = sorted({k for keys in shared for k in keys})
    if not clients:
        return None
    gaps = np.full((len(first), len(clients)), np.nan)
    for seed, keys in enumerate(shared):
        for k in keys:
            gaps[seed, clients.index(k)] = first[seed][k] - second[seed][k]
    mean = float(np.nanmean(gaps))
    if np.isfinite(gaps).sum() == 1:
        return Difference(mean, None, None, len(first), len(clients))
    draw = stream("bootstrap", 0)
    means = []
    for _ in range(RESAMPLES):
        rows = draw.randint(len(gaps), size=len(gaps))
        columns = draw.randint(len(clients), size=len(clients))
        found = gaps[np.ix_(rows, columns)]
        if np.isfinite(found).any():
            means.append(float(np.nanmean(found)))
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(mean, float(low), float(high), len(first), len(clients))
