"""The clients of a setting: what each holds, how well each does, and why the worst do badly."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fedkper import data, run
from fedkper.data import medmnist, partition_file
from fedkper.data import partition as partitions
from fedkper.errors import InputError
from fedkper.paper.runs import Found
from fedkper.report.arms import LAST, Arm
from fedkper.sample import clients_per_round
from fedkper.scores import Counts, recalls

# A data file of more bytes is not opened for its labels.
LARGE = 300_000_000
# Shares and counts from which a reason is given for a client's low accuracy.
FEW, SELDOM, ONE_CLASS, BADLY, MUCH, COARSE = 0.5, 0.5, 0.9, 0.5, 0.3, 20


@dataclass(frozen=True)
class Holdings:
    """Who holds what: samples by client and class."""

    counts: Mapping[int, Sequence[int]]
    what: str
    """what was counted, in words"""


@dataclass(frozen=True)
class ClientRow:
    """A line of the table of clients; accuracies by method."""

    client: int
    samples: int
    test_samples: int
    classes: int | None
    """how many it has samples of"""
    visits: float
    local_acc: Mapping[str, float | None]
    global_acc: Mapping[str, float | None]
    why: tuple[str, ...]


def holdings(arm: Arm, given: Path | None) -> Holdings | None:
    """Samples by client and class; None where neither the data nor the record can tell.

    From the data set, if it is on this machine and is the one that was used; nothing is downloaded. Else
    from confusion.csv, which counts the classes of the local test parts.
    """
    found = arm.runs[0]
    counts = _from_data(found, given)
    if counts is not None:
        return Holdings(dict(enumerate(counts.tolist())), "samples of the training and local test parts")
    tables = arm.confusions[0]
    last = max((t for t, model, _ in tables if model == "global_on_local"), default=0)
    known = {k: c for (t, model, k), c in tables.items() if model == "global_on_local" and t == last}
    if not known:
        return None
    by_class = {k: c.sum(1).tolist() for k, c in known.items() if k is not None}
    return Holdings(by_class, "samples of the local test parts, a fifth of what each client holds")


def _from_data(found: Found, given: Path | None) -> np.ndarray[Any, Any] | None:
    """Counts [K, C] from the labels, or None: no data, other data, or another partition."""
    e = found.experiment
    parts = (found.stored.get(name) for name in ("data", "partition", "execution"))
    described, dealt, execution = (part if isinstance(part, dict) else {} for part in parts)
    if "hash" not in dealt:  # nobody dealt out the data of real sites
        return None
    name, where = e.dataset, execution.get("folder")
    if isinstance(where, str) and os.path.isfile(there := os.path.join(where, os.path.basename(name))):
        name = there
    try:
        if name != "synthetic":
            file = medmnist.find(name, data.folder(given), e.size)
            if file is None or os.path.getsize(file) > LARGE:
                return None
        dataset = data.load(name, e.size, given)
        if dataset.hash != described.get("hash"):
            return None
        if os.path.isfile(found.folder / "partition.json"):
            partition = partition_file.load(found.folder / "partition.json")
        else:
            partition = partitions.make(run.partitioning(e), dataset.train_y, dataset.hash, dataset.columns)
    except InputError:  # the report does without it and says so
        return None
    if partition.hash != dealt["hash"] or partition.dataset_hash != dataset.hash:
        return None
    counts = partition.counts(dataset.train_y, len(dataset.classes))
    return np.asarray(counts.train + counts.test)


def client_rows(
    shown: Sequence[Arm], leader: Arm, held: Holdings | None, classes: Sequence[str]
) -> list[ClientRow]:
    """All clients, the worst with the leading method first, those without a value last."""
    tables = leader.clients
    acc = tables.local_acc
    recall = _class_recall(leader)
    rows = []
    for k in sorted(tables.samples, key=lambda k: (acc.get(k, 2.0), k)):
        mine = list(held.counts.get(k, ())) if held else []
        rows.append(
            ClientRow(
                client=k,
                samples=tables.samples[k],
                test_samples=tables.test_samples[k],
                classes=sum(n > 0 for n in mine) if mine else None,
                visits=tables.visits_a_run(k),
                local_acc={arm.name: arm.clients.local_acc.get(k) for arm in shown},
                global_acc={arm.name: arm.clients.global_acc.get(k) for arm in shown},
                why=tuple(_why(leader, k, mine, classes, recall)),
            )
        )
    return rows


def _class_recall(arm: Arm) -> list[float | None]:
    """Recall of each class on the global test set, over the last rounds; empty where not recorded."""
    counts = arm.confusion("global", arm.rounds - LAST).get(None)
    return recalls(counts) if counts is not None else []


def _why(
    arm: Arm, client: int, held: Sequence[int], classes: Sequence[str], recall: Sequence[float | None]
) -> list[str]:
    """What is known to make a client's accuracy low or coarse; says nothing about causes beyond that."""
    tables, e = arm.clients, arm.runs[0].experiment
    reasons = []
    typical = median(tables.samples.values())
    if tables.samples[client] < FEW * typical:
        reasons.append(f"few training samples ({tables.samples[client]}, median {typical:g})")
    total = sum(held)
    if total and max(held) >= ONE_CLASS * total:
        share = max(held) / total
        reasons.append(f"nearly one class ({_name(classes, held.index(max(held)))}, {share:.0%})")
    visits = tables.visits_a_run(client)
    usual = arm.rounds * clients_per_round(e.clients, e.fraction) / e.clients
    if not visits:
        reasons.append("never drawn, so it has no model of its own")
    elif visits < SELDOM * usual:
        reasons.append(f"drawn seldom ({visits:g} times, {usual:.1f} expected)")
    weak = [c for c, r in enumerate(recall[: len(held)]) if r is not None and r < BADLY]
    weak = [c for c in weak if held[c] >= MUCH * total]
    if total and weak:
        reasons.append(
            "much of what the global model finds badly ("
            + ", ".join(f"{_name(classes, c)}, recall {recall[c]:.2f}" for c in weak)
            + ")"
        )
    weight, fair = tables.weight.get(client), 1 / clients_per_round(e.clients, e.fraction)
    if weight is not None and weight < FEW * fair:
        reasons.append(f"small weight ({weight:.2f}, equal share {fair:.2f})")
    if tables.test_samples[client] < COARSE:
        n = tables.test_samples[client]
        reasons.append(f"only {n} test samples" if n else "no local test samples")
    return reasons


def _name(classes: Sequence[str], number: int) -> str:
    return classes[number] if number < len(classes) else f"class {number}"


def by_class(arm: Arm, model: str, clients: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """By client and class (right, samples): "local" at all visits, "global_on_local" in the last round."""
    since = 0 if model == "local" else arm.rounds - 1
    found = arm.confusion(model, since)
    return {k: _right(found[k]) for k in clients if k in found}


def _right(counts: Counts) -> list[tuple[int, int]]:
    return [(int(a), int(n)) for a, n in zip(counts.diagonal(), counts.sum(1), strict=True)]
