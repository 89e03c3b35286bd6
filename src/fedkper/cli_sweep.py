"""The command sweep: many experiments, a pool of processes or a Ray cluster, one table."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from fedkper import folders, metrics, runfiles, tables
from fedkper.errors import InputError, RunError
from fedkper.experiment import Experiment
from fedkper.options import Command, OptionalPath, Options, refuse_idle
from fedkper.ranges import Range, check
from fedkper.sweep import grid, sweep
from fedkper.sweep.cells import setting, short
from fedkper.sweep.grid import Grid
from fedkper.sweep.sweep import Cell, Outcome
from fedkper.sweep.view import View, tell_rejected

# Options of lists, and the field that each varies.
LISTS = {"methods": "method", "datasets": "dataset", "seeds": "seed"}


@dataclass(frozen=True)
class Sweep(Options):
    """Methods x data sets x seeds x any other options, several runs at a time, and a table.

    Started again with the same --out, it skips what is finished and goes on with what is not.
    """

    methods: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """methods, each as --method takes it; --method alone if not given"""
    datasets: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """data sets; --dataset alone if not given"""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """seeds, over which the table averages; --seed alone if not given"""
    vary: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE,...", help_behavior_hint="")] = ()
    """any other option with its values, such as lr=0.1,0.01 or preset=paper-blood,paper-organc; repeatable"""
    grid: OptionalPath = None
    """a TOML or JSON file with experiment, vary and cells; the sweep.json of a sweep goes on with it"""
    jobs: Annotated[
        int | None,
        Range(1, 1024),
        tyro.conf.arg(metavar="INT", help_behavior_hint="(default: one a core, one on a CUDA device)"),
    ] = None
    """runs at a time, each in one process; results do not depend on it"""
    ray: Annotated[str, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="")] = ""
    """run on a Ray cluster: its address, or local; the folders must be shared by all machines"""

    @classmethod
    def heard(cls, words: list[str]) -> list[str]:
        return merged(words)

    @classmethod
    def meant(cls, values: dict[str, Any]) -> dict[str, Any]:
        return super().meant(given(values))

    def act(self) -> None:
        check(self)
        asked = _asked(dataclasses.asdict(self))
        experiments = grid.experiments(self.experiment(), asked)
        for experiment in experiments:
            refuse_idle(experiment)
        stored = self.partition_file or asked.partition_file
        with folders.out(self.out, "sweep") as folder:
            cells = sweep.keeping(sweep.cells(experiments), folder)
            again = f"fedkper sweep --grid {shlex.quote(str(folder / sweep.REQUEST))}"
            with View(cells, again) as view:
                outcomes = sweep.run(
                    cells, folder, self.execution(), self.jobs, view.on_event, stored, self.ray
                )
            if not view.begun:
                tables.notice(f"all {len(cells)} cells were finished already")
            tell_rejected(outcomes, folder)
            _report(outcomes, folder)
        tables.line(f"run folders: {folder}")
        if failed := [outcome for outcome in outcomes if outcome.state == "failed"]:
            raise RunError(_failures(failed, len(cells), again))


COMMANDS: dict[str, type[Command]] = {"sweep": Sweep}


def merged(words: Sequence[str]) -> list[str]:
    """Words with one --vary in place of several, which then has all their values."""
    rest: list[str] = []
    vary: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word.startswith("--vary="):
            vary.append(word.partition("=")[2])
        elif word == "--vary":
            start = at
            while at < len(words) and not words[at].startswith("--"):
                at += 1
            vary += words[start:at] or [""]
        else:
            rest.append(word)
    return [*rest, "--vary", *vary] if vary else rest


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the words name, with those of a grid file where the words name none.

    Raises InputError for options that contradict each other.
    """
    if "workers" in values:
        raise InputError("--workers: a sweep runs each cell in one process; --jobs is how many run at a time")
    if not {*LISTS, "vary", "grid"} & values.keys():
        raise InputError("sweep: nothing is varied; name --methods, --datasets, --seeds, --vary or a --grid")
    asked = _asked(values)
    for name in sorted(asked.varied() & values.keys()):
        raise InputError(f"--{name.replace('_', '-')}: is varied too; leave out one of them")
    file = values.get("grid")
    if file is None:
        return dict(values)
    for name in sorted({"preset", "config"} & values.keys()):
        raise InputError(f"--{name} and --grid: write the options into the file, under [experiment]")
    found = dict(asked.base) | ({"data": asked.data} if asked.data else {})
    if file.name == sweep.REQUEST:
        found["out"] = file.parent
    return found | dict(values)


def _asked(values: Mapping[str, Any]) -> Grid:
    """The file's grid with the lists of the command line."""
    file = values.get("grid")
    asked = grid.read(file) if file else Grid()
    vary = grid.words(values.get("vary") or ())
    for option, name in LISTS.items():
        if values.get(option):
            if name in vary:
                raise InputError(f"--{option} and --vary {name}: use one of them")
            vary[name] = list(dict.fromkeys(values[option]))
    for name in sorted(vary.keys() & asked.varied()):
        raise InputError(f"{name}: is varied on the command line and in --grid {file}; leave out one of them")
    return dataclasses.replace(asked, vary={**asked.vary, **vary})


def _report(outcomes: Sequence[Outcome], folder: Path) -> None:
    """The table: a line a setting, over its seeds where there are several."""
    cells = [outcome.cell for outcome in outcomes]
    differing = [
        f.name
        for f in dataclasses.fields(Experiment)
        if f.name != "seed" and len({getattr(cell.experiment, f.name) for cell in cells}) > 1
    ]
    groups: dict[Experiment, list[Cell]] = {}
    for outcome in outcomes:
        cell = outcome.cell
        groups.setdefault(setting(cell.experiment), [])
        if outcome.state == "finished":
            groups[setting(cell.experiment)].append(cell)
    seeds = len({cell.experiment.seed for cell in cells})
    rows = []
    for common, group in groups.items():
        if group:
            curves = [runfiles.read_curves(folder / cell.place) for cell in group]
            name = _title(common, differing)
            if seeds > 1 and len(group) < seeds:
                name += f" ({len(group)} of {seeds} seeds)"
            rows.append((name, metrics.over_runs(curves) if seeds > 1 else metrics.summarise(curves[0])))
    if rows:
        first = f"{seeds} seeds" if seeds > 1 else "setting"
        tables.results(rows, first, "std_seeds" if seeds > 1 else "std_rounds")


def _title(e: Experiment, differing: Sequence[str]) -> str:
    """What sets a line of the table apart: data set and method as they are, other fields with their names."""
    parts = [short(e.dataset)] if "dataset" in differing else []
    parts += [e.method] if "method" in differing else []
    parts += [f"{n} {_shown(getattr(e, n))}" for n in differing if n not in ("dataset", "method")]
    return " ".join(parts) or e.method


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def _failures(failed: Sequence[Outcome], count: int, again: str) -> str:
    """Which cells failed, by reason, and how to go on."""
    lines = [f"{len(failed)} of {count} cells failed:"]
    for reason, places in sweep.by_reason(failed).items():
        lines += [f"  {reason}", *(f"    {place}" for place in places)]
    return "\n".join([*lines, "When the cause is mended, go on with:", f"  {again}"])
