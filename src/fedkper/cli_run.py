"""The commands on runs: run, compare, summary."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.progress import Progress

from fedkper import folders, metrics, record, run, tables
from fedkper.data.dataset import Dataset
from fedkper.errors import InputError, RunError
from fedkper.experiment import Experiment
from fedkper.options import Options
from fedkper.run import Execution


@dataclass(frozen=True)
class Run(Options):
    """One experiment: a federation, simulated from the first round to the last."""

    resume: bool = False
    """go on with the run in --out, which is also taken as --resume FOLDER"""

    def act(self) -> None:
        experiment, execution = self.experiment().checked(), self.execution()
        run.check_device(execution)
        with folders.out(self.out, f"{Path(experiment.dataset).stem}-{_short(experiment.method)}") as folder:
            again = f"fedkper run --resume {shlex.quote(str(folder))}"
            stored, title = self.partition_file, experiment.method
            summary = _rounds(experiment, execution, folder, self.resume, stored, title, again)
            tables.results([(experiment.method, summary)], "method")
        tables.line(f"run folder: {folder}")


@dataclass(frozen=True)
class Compare(Options):
    """Several methods or seeds on the same partition, one after another, and a table.

    Started again with the same --out, it skips what is finished and goes on with what is not.
    """

    methods: tuple[str, ...] = ("fedavg", "fedkper")
    """methods to compare, each as --method takes it"""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """seeds; --seed alone if not given"""

    def act(self) -> None:
        execution, base = self.execution(), self.experiment()
        seeds = tuple(dict.fromkeys(self.seeds or (self.seed,)))
        cells = [(m, s) for m in dict.fromkeys(self.methods) for s in seeds]
        experiments = [dataclasses.replace(base, method=m, seed=s).checked() for m, s in cells]
        run.check_device(execution)
        dataset = run.load(experiments[0], execution)
        rows, curves = [], {}
        with folders.out(self.out, f"{Path(base.dataset).stem}-compare") as parent:
            for experiment, place in zip(experiments, _places(cells), strict=True):
                run.check(experiment, parent / place, dataset, self.partition_file)
            again = f"the same command with --out {shlex.quote(str(parent))}"
            for experiment, place in zip(experiments, _places(cells), strict=True):
                name = experiment.method + (f" seed {experiment.seed}" if len(seeds) > 1 else "")
                folder = parent / place
                resume = os.path.isfile(folder / "run.json")
                stored = self.partition_file
                summary = _rounds(experiment, execution, folder, resume, stored, name, again, dataset)
                rows.append((name, summary))
                curves[name] = record.read_curves(folder)
        title = tables.plain(base.dataset)
        _draw(curves, parent / "curves.png", f"{title}: {base.clients} clients, {base.rounds} rounds")
        tables.results(rows, "method")
        if len(seeds) > 1:
            grouped = {m: [curves[f"{m} seed {s}"] for s in seeds] for m in dict.fromkeys(self.methods)}
            merged = [(m, metrics.over_runs(runs)) for m, runs in grouped.items()]
            tables.results(merged, f"{len(seeds)} seeds", "std_seeds")
        tables.line(f"run folders: {parent}")
        tables.line(f"curves: {parent / 'curves.png'}")


@dataclass(frozen=True)
class Summary:
    """The table of results again, from the folders of runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs, or folders that hold some"""

    def act(self) -> None:
        found: list[Path] = []
        skipped: list[Path] = []
        for path in self.runs:
            inside = sorted(p.parent for p in path.glob("*/run.json"))
            if not os.path.isfile(path / "run.json") and os.path.isdir(path):
                if not inside:
                    skipped.append(path)
                found += inside
            else:
                found.append(path)
        if not found:
            raise InputError(f"{skipped[0]}: holds no run (no run.json); is this the folder of a run?")
        for path in skipped:
            tables.notice(f"{path}: holds no run, left out")
        rows = []
        for folder in found:
            experiment, curves = run.stored_experiment(folder), record.read_curves(folder)
            title = f"{folder}: {experiment.method} ({len(curves.global_acc)} of {experiment.rounds} rounds)"
            rows.append((title, metrics.summarise(curves)))
        tables.results(rows, "run")


COMMANDS: dict[str, Any] = {"run": Run, "compare": Compare, "summary": Summary}


def _rounds(
    experiment: Experiment,
    execution: Execution,
    folder: Path,
    resume: bool,
    stored: Path | None,
    title: str,
    again: str,
    dataset: Dataset | None = None,
) -> dict[str, Any]:
    """Runs or resumes with live progress; if that is stopped, says that `again` goes on."""
    begun: list[int] = []
    with tables.progress() as bar:
        watch = _watch(experiment, execution, folder, resume, title, bar, begun)
        try:
            if resume:
                summary = run.resume(folder, experiment, execution, watch, dataset)
            else:
                summary = run.start(experiment, folder, execution, stored, watch, dataset)
        except (KeyboardInterrupt, RunError) as error:
            if begun and getattr(error, "exit_code", 1) == 1:
                bar.stop()
                tables.go_on(again)
            raise
    tables.rejected([e for e in record.read_events(folder) if e["event"] == "rejected"], folder)
    return summary


def _watch(
    experiment: Experiment,
    execution: Execution,
    folder: Path,
    resume: bool,
    title: str,
    bar: Progress,
    begun: list[int],
) -> run.Watch:
    """Shows a run in `bar`, in a log file as a line every 10 rounds; `begun` gets the rounds done before."""
    task = bar.add_task(tables.short(title), total=experiment.rounds, state="", visible=False)

    def begin(e: Experiment, dataset: Dataset, done: int) -> None:
        begun.append(done)
        for text in dataset.notices:
            tables.notice(text)
        if resume and done >= e.rounds:
            tables.notice(f"{folder}: finished already, {done} rounds")
        else:
            tables.settings(e, execution.device, run.workers(execution, e), done)
            bar.update(task, completed=done, visible=True)

    def on_round(round: int, line: dict[str, Any]) -> None:
        bar.update(task, completed=round, state=tables.state(line))
        if not tables.err.is_terminal and (round == experiment.rounds or round % 10 == 0):
            where = f"{title}: round {round} of {experiment.rounds}"
            tables.line(f"{where}  {tables.state(line)}", file=tables.err)

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            tables.notice(event["reason"])

    return run.Watch(begin, on_round, on_event)


def _draw(curves: dict[str, metrics.Curves], path: Path, title: str) -> None:
    from fedkper import plots

    try:
        plots.curves(curves, path, title)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


def _places(cells: Sequence[tuple[str, int]]) -> list[str]:
    """A folder's name for each (method, seed); methods that would share one get a checksum added."""
    shorts = Counter(_short(m).lower() for m, _ in dict.fromkeys((m, 0) for m, _ in cells))
    names = []
    for method, seed in cells:
        short = _short(method)
        if shorts[short.lower()] > 1:
            short += f"-{zlib.crc32(method.encode()):08x}"
        names.append(f"{short}-seed{seed}")
    return names


def _short(method: str) -> str:
    """A method as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", Path(method.partition(".py:")[2] or method).name).strip("-.")[:60]
