"""The numbers of the paper's Table 1 from runs, beside the published ones (specification 2.7 and 5)."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

from fedkper import metrics
from fedkper.averages import OverSeeds, over_seeds
from fedkper.experiment import Experiment
from fedkper.paper.runs import STRATEGIES, Found, Partition, Setting, deviations, machines, notices

COLUMNS = (
    "global_acc",
    "global_bwt",
    "global_consistency",
    "local_acc",
    "worst_client_acc",
    "local_consistency",
    "balance",
)
# The published deviations of these are over rounds, of the others over seeds (inferred from their size).
OVER_ROUNDS = ("global_acc", "global_bwt", "local_acc")
# A rule stands after these rows: federated learning, personal federated learning, FedKPer.
LAST_OF_GROUP = ("FedNTD", "FedBABU", "FedKPer")


class Value(NamedTuple):
    """A cell: a mean with up to two deviations, or None and the reason."""

    mean: float | None
    std_rounds: float | None = None
    std_seeds: float | None = None
    reason: str = ""
    runs: int = 0
    rank: int = 0
    """1: best of its column, 2: second best, 0: neither; equal printed numbers share a rank"""


NOT_RUN = Value(None, reason="not run")


@dataclass(frozen=True)
class Row:
    """A method in one setting."""

    method: str
    seeds: tuple[int, ...]
    here: Mapping[str, Value]
    published: Mapping[str, Value]
    """Empty where the paper has no number that could be compared"""

    def difference(self, column: str) -> float | None:
        """Ours minus the published mean."""
        here, there = self.here[column].mean, self.published.get(column, NOT_RUN).mean
        return None if here is None or there is None else here - there


@dataclass(frozen=True)
class Spread:
    """How far a method's numbers move with the partition: means of the same seeds on each."""

    method: str
    seeds: tuple[int, ...]
    each: Mapping[Partition, Mapping[str, Value]]

    def over(self, column: str) -> OverSeeds:
        """Mean and deviation (sample) over the partitions."""
        return over_seeds(values[column].mean for values in self.each.values())


@dataclass(frozen=True)
class Block:
    """One setting's part of the table."""

    setting: Setting
    partition: Partition
    rows: tuple[Row, ...]
    spreads: tuple[Spread, ...]
    notes: tuple[str, ...]


@lru_cache
def published() -> dict[str, dict[str, dict[str, Value]]]:
    """Table 1 as printed: data set in small letters -> strategy -> column -> value."""
    lines = (files("fedkper.paper") / "table1.csv").read_text(encoding="utf-8").splitlines()
    table: dict[str, dict[str, dict[str, Value]]] = {}
    for line in csv.DictReader(text for text in lines if not text.startswith("#")):
        std = float(line["std"]) if line["std"] else None
        over_rounds = line["metric"] in OVER_ROUNDS
        value = Value(float(line["mean"]), std if over_rounds else None, None if over_rounds else std)
        table.setdefault(line["dataset"].lower(), {}).setdefault(line["strategy"], {})[line["metric"]] = value
    return {name: _ranked(rows, rows) for name, rows in table.items()}


def block(setting: Setting, methods: Sequence[str] = ()) -> Block:
    """The table of one setting on its partition with the most runs.

    `methods`: the rows to show; all of the paper's, if it has the data set, and all that were run if empty.
    """
    partition = setting.partitions()[0]
    finished = setting.finished(partition)
    here = {name: _values(runs) for name, runs in finished.items()}
    theirs = _comparable(setting)
    names = list(methods) or [*(s for s in STRATEGIES if s in here or s in theirs)]
    begun = [r.method for r in setting.runs if r.partition == partition]
    names += [] if methods else [name for name in dict.fromkeys([*here, *begun]) if name not in names]
    here |= {name: _missing(setting, name) for name in names if name not in here}
    here = {name: here[name] for name in names}
    ranked = _ranked(here, [n for n in names if _has_rank(n)])
    seeds = {name: tuple(r.experiment.seed for r in finished.get(name, ())) for name in names}
    rows = tuple(Row(n, seeds[n], ranked[n], theirs.get(n, {})) for n in names)
    spreads = tuple(s for n in names if (s := _spread(setting, n)))
    return Block(setting, partition, rows, spreads, tuple(_notes(setting, partition, rows, finished)))


def _has_rank(method: str) -> bool:
    """Not for a variant of one of the paper's methods: an arm of an ablation is no competitor."""
    return method in STRATEGIES or method.partition(":")[0] not in STRATEGIES


def _values(runs: Sequence[Found]) -> dict[str, Value]:
    summary = metrics.over_runs([r.curves for r in runs])
    return {
        key: Value(
            summary[key]["mean"],
            summary[key]["std_rounds"],
            summary[key]["std_seeds"],
            summary[key].get("reason", ""),
            summary[key]["runs"],
        )
        for key in COLUMNS
    }


def _comparable(setting: Setting) -> dict[str, dict[str, Value]]:
    """The published rows, unless the runs have another number of rounds: every column averages over them."""
    same = setting.experiment.rounds == Experiment.rounds
    return published().get(setting.dataset, {}) if same else {}


def _missing(setting: Setting, method: str) -> dict[str, Value]:
    """A row without a finished run, and why."""
    runs = [r for r in setting.runs if r.method == method]
    there = sorted({r.experiment.partition_seed for r in runs if r.done})
    if there:
        reason = f"only on partition seed {', '.join(map(str, there))}"
    elif runs:
        most = max(runs, key=lambda r: r.rounds)
        reason = f"unfinished, {most.rounds} of {most.experiment.rounds} rounds"
    else:
        reason = "not run"
    return dict.fromkeys(COLUMNS, Value(None, reason=reason))


def _ranked(rows: Mapping[str, Mapping[str, Value]], competing: Iterable[str]) -> dict[str, dict[str, Value]]:
    """The same with the best of each column marked, where two or more compete, and the second of three.

    Higher is better in every column; what is printed alike (three digits) is alike.
    """
    names = set(competing)
    marked = {name: dict(row) for name, row in rows.items()}
    for column in COLUMNS:
        means = {n: round(m, 3) for n in names if (m := rows[n][column].mean) is not None}
        best = sorted(set(means.values()), reverse=True)[: min(2, len(means) - 1)]
        for name, value in means.items():
            if value in best:
                marked[name][column] = marked[name][column]._replace(rank=1 + best.index(value))
    return marked


def _spread(setting: Setting, method: str) -> Spread | None:
    """Mean and deviation over partitions, if there are two or more that share seeds."""
    on = {p: setting.finished(p).get(method, []) for p in sorted(setting.partitions())}
    on = {p: runs for p, runs in on.items() if runs}
    common = set.intersection(*({r.experiment.seed for r in runs} for runs in on.values())) if on else set()
    if len(on) < 2 or not common:
        return None
    each = {p: _values([r for r in runs if r.experiment.seed in common]) for p, runs in on.items()}
    return Spread(method, tuple(sorted(common)), each)


def _notes(
    setting: Setting, partition: Partition, rows: Sequence[Row], finished: Mapping[str, Sequence[Found]]
) -> list[str]:
    """What a reader of the block must know, most important first."""
    notes = []
    other = deviations(setting.experiment)
    if other:
        notes.append(f"not the paper's protocol: {'; '.join(other)}")
    if setting.dataset in published() and setting.experiment.rounds != Experiment.rounds:
        notes.append("the published numbers average over other rounds and are not beside these")
    elif setting.dataset not in published():
        notes.append(f"the paper has no numbers for {setting.dataset}")
    notes += _gaps(rows)
    for r in setting.runs:
        if r.partition == partition and not r.done and r.method in finished:
            done = f"{r.rounds} of {r.experiment.rounds} rounds"
            notes.append(f"unfinished, and in no mean: {r.method}, seed {r.experiment.seed} ({done})")
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for row in rows:
        if row.seeds:
            by_seeds.setdefault(row.seeds, []).append(row.method)
    if len(by_seeds) > 1:
        parts = (f"{listing(seeds)} of {', '.join(names)}" for seeds, names in by_seeds.items())
        notes.append(f"rows average different seeds: {'; '.join(parts)}")
    elif by_seeds:
        seeds = next(iter(by_seeds))
        alone = ", so there is no deviation over seeds" if len(seeds) == 1 else ""
        notes.append(f"seed{'s' if len(seeds) > 1 else ''} {listing(seeds)}{alone}")
    if variants := [row.method for row in rows if row.seeds and not _has_rank(row.method)]:
        notes.append(f"not marked, since no methods of their own: {', '.join(variants)}")
    if len(setting.partitions()) > 1:
        notes.append(f"the rows are of partition seed {partition[0]}; other partitions stand apart")
    runs = [r for found in finished.values() for r in found]
    if differing := machines(runs):
        notes.append(f"made under different conditions, which moves last digits: {'; '.join(differing)}")
    return notes + notices(runs)


def _gaps(rows: Sequence[Row]) -> list[str]:
    """Why there are dashes: a line for each reason."""
    whole: dict[str, list[str]] = {}
    single: dict[str, list[str]] = {}
    for row in rows:
        missing = {c: v for c, v in row.here.items() if v.mean is None}
        if len(missing) == len(COLUMNS) and not row.seeds:
            whole.setdefault(row.here[COLUMNS[0]].reason, []).append(row.method)
        else:
            for column, value in missing.items():
                single.setdefault(f"{column.replace('_', ' ')}: {value.reason}", []).append(row.method)
            part = {v.runs for v in row.here.values() if v.mean is not None and v.runs < len(row.seeds)}
            if part:
                text = f"undefined for some seeds, the mean is over {min(part)} of {len(row.seeds)}"
                single.setdefault(text, []).append(row.method)
    return [f"– {reason}: {', '.join(names)}" for reason, names in whole.items()] + [
        f"– {reason} ({', '.join(names)})" for reason, names in single.items()
    ]


def listing(seeds: Sequence[int]) -> str:
    """1-3 for 1, 2, 3."""
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds))


def number(value: float | None, signed: bool = False) -> str:
    """.638, -.133, 1.000, +.064; a dash for None."""
    if value is None:
        return "–"
    text = f"{round(value, 3) + 0.0:{'+' if signed else ''}.3f}"  # + 0.0: no -0.000
    return re.sub(r"^([+-]?)0\.", r"\1.", text)
