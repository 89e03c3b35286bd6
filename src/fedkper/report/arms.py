"""What a report compares: in each setting its methods, each with the runs that may be averaged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from fedkper import metrics, runfiles
from fedkper.averages import Curve, Number, defined, mean, mean_curve, std
from fedkper.paper.runs import Found, Partition, Setting
from fedkper.scores import Counts

CURVES = ("global_acc", "local_acc", "global_bwt", "worst_client_acc")
# The end of a run in averages over its last rounds: one round alone is a matter of who took part in it.
LAST = 10


@dataclass(frozen=True, eq=False)
class Arm:
    """A method in a setting: its runs on one partition and of one number of rounds, by seed."""

    name: str
    runs: tuple[Found, ...]

    @property
    def rounds(self) -> int:
        return self.runs[0].rounds

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(r.experiment.seed for r in self.runs)

    def of(self, seeds: Sequence[int]) -> Arm:
        """The same with the runs of these seeds only."""
        runs = tuple(r for r in self.runs if r.experiment.seed in seeds)
        return Arm(self.name, runs) if len(runs) < len(self.runs) else self

    @cached_property
    def summaries(self) -> tuple[dict[str, Any], ...]:
        """summary.json of each run."""
        return tuple(metrics.summarise(r.curves) for r in self.runs)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json of the run; of several runs their means, with "std_seeds"."""
        return self.summaries[0] if len(self.runs) == 1 else metrics.over_runs([r.curves for r in self.runs])

    def by_seed(self, key: str) -> dict[int, float | None]:
        return {seed: s[key]["mean"] for seed, s in zip(self.seeds, self.summaries, strict=True)}

    def local_acc(self, seed: int) -> dict[int, float]:
        """Of one seed, each client's own model, mean over its visits."""
        visits: dict[int, list[float | None]] = {}
        for row in self.runs[self.seeds.index(seed)].curves.local_acc:
            for client, value in row.items():
                visits.setdefault(client, []).append(value)
        return _defined({client: mean(values).value for client, values in visits.items()})

    @cached_property
    def curves(self) -> dict[str, tuple[Curve, Curve]]:
        """For each of CURVES the mean over seeds and the deviation over seeds, round by round."""
        runs = [metrics.per_round(r.curves) for r in self.runs]
        found = {}
        for key in CURVES:
            rows = [[line[key] for line in run] for run in runs]
            found[key] = mean_curve(rows), tuple(std(values, 1).value for values in zip(*rows, strict=True))
        return found

    @cached_property
    def confusions(self) -> tuple[dict[tuple[int, str, int | None], Counts], ...]:
        """runfiles.read_confusion of each run."""
        return tuple(runfiles.read_confusion(r.folder) for r in self.runs)

    def confusion(self, model: str, since: int = 0) -> dict[int | None, Counts]:
        """By client, the counts of all runs added up over the rounds after `since`."""
        found: dict[int | None, Counts] = {}
        for tables in self.confusions:
            for (round, which, client), counts in tables.items():
                if which == model and round > since:
                    found[client] = found[client] + counts if client in found else counts
        return found

    @cached_property
    def clients(self) -> ClientTables:
        return ClientTables([runfiles.read_rows(r.folder / "clients.csv") for r in self.runs], self.rounds)

    @property
    def trained(self) -> bool:
        """Whether any update was ever merged; of runs that did not record weights it is taken for granted."""
        weights = self.clients.weight.values()
        return not weights or any(weights)

    @cached_property
    def price(self) -> dict[str, Number]:
        """Means a round: seconds of training, merging, scoring; bytes down and up; over rounds and seeds.

        Of seconds, those of the seed that was quickest in the round: whatever else a machine does only adds.
        """
        runs = [runfiles.read_rows(r.folder / "rounds.csv")[: self.rounds] for r in self.runs]
        found = {}
        for name in ("train_seconds", "merge_seconds", "eval_seconds", "down_bytes", "up_bytes"):
            rounds = [defined(number(row.get(name, "")) for row in rows) for rows in zip(*runs, strict=False)]
            one = min if name.endswith("seconds") else fmean
            found[name] = mean((one(values) if values else None for values in rounds), "not recorded")
        return found


class ClientTables:
    """clients.csv of an arm's runs: what each client holds, how often it trained and how well it did."""

    def __init__(self, tables: Iterable[Sequence[dict[str, str]]], rounds: int) -> None:
        self.samples: dict[int, int] = {}
        self.test_samples: dict[int, int] = {}
        self.visits: dict[int, list[int]] = {}
        """per client, the rounds in which it trained, of all runs"""
        values: dict[str, dict[int, list[float | None]]] = {}
        self.has_auc = False
        """whether there is a column for it"""
        self._runs = 0
        for rows in tables:
            self._runs += 1
            self.has_auc |= bool(rows) and "local_auc" in rows[0]
            for row in rows:
                if int(row["round"]) <= rounds:
                    self._take(row, values, int(row["round"]) > rounds - LAST)
        self.local_acc = _means(values, "local_acc")
        """of its own model, over its visits"""
        self.local_auc = _means(values, "local_auc")
        self.global_acc = _means(values, "global_on_local_acc")
        """of the global model on its test part, over the last rounds"""
        self.global_auc = _means(values, "global_on_local_auc")
        self.weight = _means(values, "weight")

    def _take(
        self, row: dict[str, str], values: dict[str, dict[int, list[float | None]]], late: bool
    ) -> None:
        client = int(row["client"])
        self.samples[client] = int(number(row.get("samples", "")) or 0)
        self.test_samples[client] = int(row["test_samples"])
        visits = self.visits.setdefault(client, [])
        names = ["global_on_local_acc", "global_on_local_auc"] if late else []
        if row["sampled"] == "1":
            visits.append(int(row["round"]))
            names += ["local_acc", "local_auc", "weight"]
        for name in names:
            values.setdefault(name, {}).setdefault(client, []).append(number(row.get(name, "")))

    def visits_a_run(self, client: int) -> float:
        return len(self.visits[client]) / self._runs


def _means(values: dict[str, dict[int, list[float | None]]], name: str) -> dict[int, float]:
    """Per client, the mean; a client without a defined value is not in it."""
    return _defined({client: mean(row).value for client, row in values.get(name, {}).items()})


def _defined(values: dict[int, float | None]) -> dict[int, float]:
    return {client: value for client, value in values.items() if value is not None}


def number(cell: str) -> float | None:
    """A cell of a table; None where it holds no finite number."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def arms_of(setting: Setting) -> tuple[Partition, list[Arm], list[str]]:
    """The partition with the most runs, the methods on it, and a sentence on every run that is left out.

    Means over rounds are comparable for equal numbers of rounds only, so unfinished runs are left out; if no
    run is finished, those that got furthest are taken.
    """
    partition = setting.partitions()[0]
    there = [r for r in setting.runs if r.partition == partition]
    taken = setting.finished(partition)
    rounds = setting.experiment.rounds
    if not taken:
        rounds = max(r.rounds for r in there)
        for r in sorted(there, key=lambda r: (r.method, r.experiment.seed)):
            if rounds and r.rounds == rounds:
                taken.setdefault(r.method, []).append(r)
    arms = [Arm(name, tuple(runs)) for name, runs in taken.items()]
    used = {r.folder for arm in arms for r in arm.runs}
    notes = [
        f"{r.folder} ({r.method}, seed {r.experiment.seed}) has done {r.rounds} of {r.experiment.rounds} "
        "rounds and is in no number here"
        for r in there
        if r.folder not in used
    ]
    if arms and not arms[0].runs[0].done:
        of = setting.experiment.rounds
        notes.insert(0, f"no run is finished: all numbers are of the first {rounds} of {of} rounds")
    return partition, arms, notes


def of_classes(runs: Sequence[Found]) -> tuple[str, ...]:
    """The class names in the order of their numbers; none if the record lacks them."""
    data = runs[0].stored.get("data")
    names = data.get("classes") if isinstance(data, dict) else None
    return tuple(str(name) for name in names) if isinstance(names, list) else ()
