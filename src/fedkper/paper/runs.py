"""The runs behind the paper's table and figures: found at any depth, named, put beside those like them.

Runs of one setting differ in method, seed and partition seed only, and hold the same data. Only these are
ever in one table, one figure or one mean.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkper import folders, run, runfiles, userfile
from fedkper.errors import InputError
from fedkper.experiment import PRESETS, Experiment
from fedkper.methods import METHODS
from fedkper.methods import parse as parse_method
from fedkper.metrics import Curves

# The paper's twelve in the order of its Table 1; METHODS may have more.
TWELVE = (
    *("fedavg", "fedcurv", "moon", "fedprox", "fedntd"),
    *("fedas", "fedala", "ditto", "fedper", "fedkd", "fedbabu"),
    "fedkper",
)
STRATEGIES = tuple(METHODS[name].__name__ for name in TWELVE)
DATASETS = ("bloodmnist", "organsmnist", "organcmnist")  # in its order too
FREE = ("method", "seed", "partition_seed")
SECONDS = ("train_seconds", "merge_seconds", "eval_seconds")
Partition = tuple[int, str]


@dataclass(frozen=True)
class Found:
    """A run that lies somewhere on the disk."""

    folder: Path
    experiment: Experiment
    curves: Curves
    method: str
    """Its row: FedKPer, "FedKPer: aggregation=false" with other fields than the defaults, or mine.py:Mine"""
    own: bool
    """Whether the method is a user's"""
    stored: dict[str, Any]
    """run.json"""

    @property
    def rounds(self) -> int:
        return len(self.curves.global_acc)

    @property
    def done(self) -> bool:
        return self.rounds >= self.experiment.rounds

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of a real federation's sites; none for a simulation."""
        names = _part(self.stored, "federation").get("sites")
        return tuple(map(str, names)) if isinstance(names, list) else ()

    @property
    def partition(self) -> Partition:
        """Partition seed and hash; equal seeds may deal out differently in two versions."""
        return self.experiment.partition_seed, str(_part(self.stored, "partition").get("hash", ""))


@dataclass(frozen=True)
class Setting:
    """Runs that may stand beside each other, one for each method, seed and partition."""

    experiment: Experiment
    """Of one of them; its method and seeds say nothing"""
    runs: tuple[Found, ...]
    prefer: int | None = None
    """Partition seed that goes before others"""
    apart: str = ""
    """What sets it apart from others that would have the same title"""

    @property
    def dataset(self) -> str:
        return Path(self.experiment.dataset).stem

    @property
    def title(self) -> str:
        e = self.experiment
        if sites := self.runs[0].sites:
            return f"federation of {', '.join(sites)}, {e.rounds:,} rounds"
        return f"{self.dataset}, {e.clients:,} clients, {e.rounds:,} rounds{self.apart}"

    def partitions(self) -> list[Partition]:
        """The preferred one, then those with more finished runs, of equal ones the smallest seed first."""
        count = Counter(r.partition for r in self.runs if r.done)
        return sorted({r.partition for r in self.runs}, key=lambda p: (p[0] != self.prefer, -count[p], p))

    def finished(self, partition: Partition) -> dict[str, list[Found]]:
        """By method, in the paper's order, the finished runs on one partition, by seed."""
        rows: dict[str, list[Found]] = {}
        for r in sorted(self.runs, key=lambda r: (*_place(r.method), r.experiment.seed)):
            if r.done and r.partition == partition:
                rows.setdefault(r.method, []).append(r)
        return rows


def find(paths: Sequence[Path]) -> tuple[list[Found], list[str]]:
    """The runs in folders, at any depth, and what was left out and why.

    Raises InputError for a path that is no folder; a folder without a run and a run that cannot be read
    are left out.
    """
    found: list[Found] = []
    notes: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            raise InputError(f"{path}: no such folder; name one that holds runs")
    for folder in folders.runs(paths, lambda path: notes.append(f"left out: {path}, it holds no run")):
        try:
            found.append(_read(folder))
        except InputError as error:
            notes.append(f"left out: {error}")
    return _apart(found), notes


def settings(found: Iterable[Found]) -> tuple[list[Setting], list[str]]:
    """Runs grouped by all that must be equal, the paper's protocol first; and notes on doubled runs."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        groups.setdefault(_key(one), []).append(one)
    notes: list[str] = []
    made = _titled([Setting(g[0].experiment, tuple(_without_doubles(g, notes))) for g in groups.values()])

    def place(s: Setting) -> tuple[Any, ...]:
        known = DATASETS.index(s.dataset) if s.dataset in DATASETS else len(DATASETS)
        return bool(deviations(s.experiment)), known, s.title, -len(s.runs)

    return sorted(made, key=place), notes


def _titled(made: Sequence[Setting]) -> list[Setting]:
    """The same, those of one title with the options in which they differ."""
    alike: dict[str, list[Setting]] = {}
    for setting in made:
        alike.setdefault(setting.title, []).append(setting)
    found = []
    for setting in made:
        options = [_options(other.experiment) for other in alike[setting.title]]
        differing = [name for name in options[0] if any(o[name] != options[0][name] for o in options)]
        values = _options(setting.experiment)
        apart = "".join(f", {name.replace('_', ' ')} {values[name]}" for name in differing)
        found.append(dataclasses.replace(setting, apart=apart))
    return found


def deviations(e: Experiment) -> list[str]:
    """Which options are not the paper's protocol: "rounds 20 (paper: 100)"; its data set apart."""
    paper = Experiment(dataset=e.dataset, clients=e.clients)
    for values in PRESETS.values():
        if values["dataset"] == e.dataset:
            paper = Experiment(**values)
    return [
        f"{f.name.replace('_', ' ')} {getattr(e, f.name)} (paper: {getattr(paper, f.name)})"
        for f in dataclasses.fields(Experiment)
        if f.name not in FREE and getattr(e, f.name) != getattr(paper, f.name)
    ]


def machines(runs: Iterable[Found]) -> list[str]:
    """On what the runs were made, where that is not the same for all: it moves last digits and seconds."""
    seen: dict[str, set[str]] = {}
    for r in runs:
        versions, execution = _part(r.stored, "versions"), _part(r.stored, "execution")
        facts = {k: versions.get(k) for k in ("fedkper", "torch")} | {
            "device": execution.get("device"),
            "workers": execution.get("workers"),
            "platform": r.stored.get("platform"),
        }
        for name, value in facts.items():
            seen.setdefault(name, set()).add(str(value))
    return [f"{name} {' / '.join(sorted(values))}" for name, values in seen.items() if len(values) > 1]


def notices(runs: Iterable[Found]) -> list[str]:
    """What the runs' records say about their data, each once."""
    said = (_part(r.stored, "data").get("notices") for r in runs)
    return list(dict.fromkeys(str(n) for texts in said if isinstance(texts, list) for n in texts))


def seconds(one: Found) -> list[tuple[float, float, float]]:
    """Wall-clock seconds of training, merging and scoring, a triple for each round of a run.

    Raises InputError where rounds.csv does not hold them.
    """
    path = one.folder / "rounds.csv"
    rows = runfiles.read_rows(path)[: one.rounds]
    try:
        times = [tuple(float(row[name]) for name in SECONDS) for row in rows]
    except (KeyError, ValueError) as error:
        raise InputError(f"{path}: does not hold the seconds of every round ({error})") from error
    if any(not 0 <= s < math.inf for row in times for s in row):
        raise InputError(f"{path}: damaged, its seconds must be at least 0 and finite")
    return [(train, merge, score) for train, merge, score in times]


def method_name(experiment: Experiment, stored: dict[str, Any]) -> str:
    """The row of a method: FedKPer, "FedKPer: cap=5", or FILE.py:CLASS. Loads no user's file."""
    text = experiment.method
    if userfile.is_one(text):
        path, name, fields = userfile.split(text)
        return f"{path.name}:{name}" + (f": {fields}" if fields else "")
    cls = METHODS.get(text.partition(":")[0].lower())
    if cls is None:  # of another version
        return text
    # From the record: defaults may have changed since.
    values = _part(stored, "method") or dataclasses.asdict(parse_method(text))
    defaults = json.loads(json.dumps(dataclasses.asdict(cls())))
    other = [f"{k}={_word(values[k])}" for k, v in defaults.items() if k in values and values[k] != v]
    return cls.__name__ + (f": {','.join(other)}" if other else "")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(folder: Path) -> Found:
    experiment, stored = run.stored_experiment(folder), runfiles.read_json(folder, "run.json")
    name, own = method_name(experiment, stored), userfile.is_one(experiment.method)
    return Found(folder, experiment, runfiles.read_curves(folder), name, own, stored)


def _apart(found: list[Found]) -> list[Found]:
    """Users' methods of one name but from files that differ get a part of the file's hash added."""
    hashes = [str(_files(one)[0]) for one in found]
    versions: dict[str, set[str]] = {}
    for one, digest in zip(found, hashes, strict=True):
        versions.setdefault(one.method, set()).add(digest)
    return [
        dataclasses.replace(one, method=f"{one.method} ({digest[:8]})")
        if one.own and len(versions[one.method]) > 1
        else one
        for one, digest in zip(found, hashes, strict=True)
    ]


def _files(one: Found) -> tuple[Any, dict[str, Any]]:
    """The hash of the method's own file, and those of the model's."""
    files = _part(one.stored, "files")
    name = userfile.split(one.experiment.method)[0].name if one.own else ""
    return files.get(name, ""), {k: v for k, v in files.items() if k != name}


def same_setting(a: Experiment, b: Experiment) -> bool:
    """Whether two experiments differ in method, seed and partition seed only, as far as options tell."""
    return _options(a) == _options(b)


def _options(e: Experiment) -> dict[str, Any]:
    return e.to_json() | dict.fromkeys(FREE) | {"dataset": Path(e.dataset).name}


def _key(one: Found) -> str:
    """Equal for runs that may stand in one table."""
    values = _options(one.experiment)
    data = _part(one.stored, "data").get("hash")
    return json.dumps([values, data, _files(one)[1]], sort_keys=True)


def _without_doubles(group: list[Found], notes: list[str]) -> list[Found]:
    """One run for each method, seed and partition: a finished one before others, then the first found."""
    kept: dict[tuple[str, int, Partition], Found] = {}
    for one in sorted(group, key=lambda r: not r.done):
        key = (one.method, one.experiment.seed, one.partition)
        first = kept.setdefault(key, one)
        if first is not one and one.done and _numbers(one) != _numbers(first):
            notes.append(f"left out: {one.folder}, the same experiment as {first.folder} with other numbers")
    return list(kept.values())


def _numbers(one: Found) -> tuple[Any, ...]:
    c = one.curves
    return c.global_acc, c.global_on_local, c.local_acc


def _place(method: str) -> tuple[int, str]:
    """Where a row stands: the paper's methods in its order, then variants of them, then others."""
    if method in STRATEGIES:
        return STRATEGIES.index(method), ""
    base = method.partition(":")[0]
    return len(STRATEGIES) + (STRATEGIES.index(base) if base in STRATEGIES else len(STRATEGIES)), method


def _part(stored: dict[str, Any], name: str) -> dict[str, Any]:
    part = stored.get(name)
    return part if isinstance(part, dict) else {}
