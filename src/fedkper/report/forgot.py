"""What was forgotten: the stretches in which global accuracy fell, and the classes that were lost in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedkper.averages import mean
from fedkper.forgetting import consistency
from fedkper.report.arms import Arm
from fedkper.scores import recalls

# The deepest falls of a method, the classes named in each, and the columns of a table over rounds.
FALLS, LOST, COLUMNS = 3, 3, 10


@dataclass(frozen=True)
class Fall:
    """A stretch from a record high to the next one, or to the last round; rounds count from 1."""

    method: str
    seed: int
    first: int
    last: int
    lowest: int
    high: float
    low: float
    ended: bool
    """whether the high was reached again"""
    lost: tuple[tuple[str, float, float], ...] | None
    """(class, recall at the high, recall at the low), the largest loss first; None where not recorded"""


@dataclass(frozen=True)
class Recalls:
    """Recall of each class on the global test set, averaged over stretches of rounds."""

    method: str
    stretches: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]


def falls(arm: Arm, classes: Sequence[str]) -> list[Fall]:
    """The deepest falls of the method's first seed."""
    acc = arm.runs[0].curves.global_acc
    found = consistency(acc)
    windows = [*found.windows]
    if found.peaks and found.peaks[-1] < len(acc) - 1:
        windows.append((found.peaks[-1], len(acc) - 1))
    recall = recall_by_round(arm)
    made = []
    for first, last in windows:
        inside = [(v, t) for t, v in enumerate(acc[first : last + 1], first) if v is not None]
        low, lowest = min(inside)
        high = acc[first]
        if high is None or low >= high:
            continue
        ended = acc[last] is not None and (acc[last] or 0) >= high
        lost = _lost(recall, first + 1, lowest + 1, classes)
        seed = arm.seeds[0]
        made.append(Fall(arm.name, seed, first + 1, last + 1, lowest + 1, high, low, ended, lost))
    deepest = sorted(made, key=lambda f: f.low - f.high)[:FALLS]
    return sorted(deepest, key=lambda f: f.first)


def recall_by_round(arm: Arm) -> dict[int, list[float | None]]:
    """Recall of each class of the first seed's global model; empty where not recorded."""
    return {t: recalls(c) for (t, model, _), c in arm.confusions[0].items() if model == "global"}


def _lost(
    recall: Mapping[int, list[float | None]], high: int, low: int, classes: Sequence[str]
) -> tuple[tuple[str, float, float], ...] | None:
    if high not in recall or low not in recall:
        return None
    pairs = [
        (name, a, b)
        for name, a, b in zip(classes, recall[high], recall[low], strict=True)
        if a is not None and b is not None and b < a
    ]
    return tuple(sorted(pairs, key=lambda p: p[2] - p[1])[:LOST])


def over_rounds(arm: Arm, classes: Sequence[str]) -> Recalls | None:
    """Recall by class in at most COLUMNS stretches of rounds; None where not recorded."""
    recall = recall_by_round(arm)
    if not recall:
        return None
    count = min(COLUMNS, arm.rounds)
    ends = [round(arm.rounds * i / count) for i in range(count + 1)]
    stretches = [range(a + 1, b + 1) for a, b in pairwise(ends)]
    rows = tuple(
        (name, tuple(mean(recall[t][c] for t in s if t in recall).value for s in stretches))
        for c, name in enumerate(classes)
    )
    titles = tuple(str(s[0]) if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in stretches)
    return Recalls(arm.name, titles, rows)
