"""Which runs the paper's table and figures lack, what they would take, and running them."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkper import tables
from fedkper.errors import InputError, RunError
from fedkper.experiment import Experiment
from fedkper.paper.runs import Found, method_name, same_setting, seconds
from fedkper.run import Execution
from fedkper.sweep import sweep
from fedkper.sweep.sweep import Cell, Outcome
from fedkper.sweep.view import View, duration, tell_rejected


@dataclass(frozen=True)
class Missing:
    """What is asked for, and the part of it that no finished run holds."""

    asked: int
    experiments: tuple[Experiment, ...]
    begun: int
    """how many of them go on instead of starting"""
    seconds: float | None
    """one after another, as fast as the runs at hand; None where none of this setting is at hand"""

    def __str__(self) -> str:
        first = self.experiments[0]
        seeds = sorted({e.seed for e in self.experiments})
        text = (
            f"{len(self.experiments)} of {self.asked} runs of {Path(first.dataset).stem}, "
            f"{first.clients:,} clients, {first.rounds:,} rounds, "
            f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        )
        text += f", {self.begun} of them begun" if self.begun else ""
        if self.seconds is None:
            return f"{text}; how long they take is not known before the first rounds"
        return f"{text}; about {duration(self.seconds)} if one after another, as fast as those at hand"


def missing(
    base: Experiment, methods: Sequence[str], seeds: Sequence[int], found: Sequence[Found]
) -> Missing:
    """What of methods x seeds no finished run in `found` holds, all else being as in `base`."""
    asked = [dataclasses.replace(base, method=m, seed=s) for m in methods for s in seeds]
    beside = [r for r in found if same_setting(r.experiment, base)]
    runs = {_key(r.experiment, r.method): r for r in sorted(beside, key=lambda r: r.done)}
    left, begun, cost = [], 0, 0.0
    for e in dict.fromkeys(asked):
        one = runs.get(_key(e, method_name(e, {})))
        if one is None or not one.done:
            left.append(e)
            begun += one is not None
            cost += _pace(e, beside) * (e.rounds - (one.rounds if one else 0))
    return Missing(len(asked), tuple(left), begun, cost if beside and cost else None)


def _key(e: Experiment, method: str) -> tuple[str, int, int]:
    return method, e.seed, e.partition_seed


def _pace(e: Experiment, beside: Sequence[Found]) -> float:
    """Seconds a round of the same method, else of any."""
    name = method_name(e, {})
    rates = []
    for runs in ([r for r in beside if r.method == name], beside):
        for r in runs:
            try:
                rates += [sum(row) for row in seconds(r)]
            except InputError:  # damaged times spoil an estimate only
                continue
        if rates:
            break
    return float(np.mean(rates)) if rates else 0.0


def train(
    what: Missing, folder: Path, found: Sequence[Found], execution: Execution, jobs: int | None
) -> list[Outcome]:
    """Runs what is missing below `folder`; half-done runs go on where they are. Returns those that failed.

    Where the folder is that of a sweep, its cells that are not finished are part of it. Raises InputError
    before anything is trained for what is wrong with any run, RunError and KeyboardInterrupt meanwhile.
    """
    if os.path.isfile(folder / "run.json"):
        raise InputError(f"{folder}: is the folder of one run; name the one above it, or a new one")
    before = sweep.remembered(folder)
    known = before.cells
    there = {c.experiment for c in known}
    others = [c for c in known if c.experiment not in what.experiments]
    if count := sum(not sweep.finished(folder / c.place) for c in others):
        tables.notice(f"and {count} unfinished run{'s' if count > 1 else ''} of the sweep in {folder}")
    places = {r.experiment: _below(folder, r.folder) for r in found if not r.done}
    extra = [e for e in what.experiments if e not in there]
    named = {c.experiment: c.place for c in sweep.cells([*(c.experiment for c in known), *extra])}
    cells = [*known, *(Cell(e, places.get(e) or named[e]) for e in extra)]
    execution = dataclasses.replace(execution, data=execution.data or before.data)
    with View(cells, f"the same command with --run ({shlex.quote(str(folder))})") as view:
        outcomes = sweep.run(cells, folder, execution, jobs, view.on_event, before.partition_file)
    tell_rejected(outcomes, folder)
    return [o for o in outcomes if o.state == "failed"]


def _below(folder: Path, run: Path) -> str:
    """Where a run lies below the folder; nothing if it lies elsewhere."""
    place = os.path.relpath(os.path.realpath(run), os.path.realpath(folder))
    return "" if place.startswith(os.pardir) else place


def failures(failed: Sequence[Outcome]) -> RunError:
    """One sentence for each reason."""
    told = "; ".join(f"{reason} ({', '.join(places)})" for reason, places in sweep.by_reason(failed).items())
    count = f"{len(failed)} run{'s' if len(failed) > 1 else ''} failed"
    return RunError(f"{count}: {told}. When the cause is mended, the same command with --run goes on")
