"""The commands on runs: run, compare, summary."""

from __future__ import annotations

import dataclasses
import shlex
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from rich.progress import Progress

from fedkper import folders, metrics, run, runfiles, tables
from fedkper.data.dataset import Dataset
from fedkper.errors import InputError, RunError
from fedkper.experiment import Experiment, from_file, read_file
from fedkper.options import Command, Options
from fedkper.run import Execution
from fedkper.sweep.cells import short


@dataclass(frozen=True)
class Run(Options):
    """One experiment: a federation, simulated from the first round to the last."""

    resume: bool = False
    """go on with the run in --out, which is also taken as --resume FOLDER"""

    @classmethod
    def heard(cls, words: list[str]) -> list[str]:
        """`--resume FOLDER` and `--resume=FOLDER` are `--resume --out FOLDER`."""
        for at, word in enumerate(words):
            if word.startswith("--resume="):
                return [*words[:at], "--resume", "--out", word.partition("=")[2], *words[at + 1 :]]
            if word == "--resume" and at + 1 < len(words) and not words[at + 1].startswith("-"):
                return [*words[: at + 1], "--out", *words[at + 1 :]]
        return words

    def act(self) -> None:
        experiment, execution = self.experiment().checked(), self.execution()
        run.check_device(execution)
        name = f"{Path(experiment.dataset).stem}-{short(experiment.method)[:60]}"
        with folders.out(self.out, name) as folder:
            again = f"fedkper run --resume {shlex.quote(str(folder))}"
            part = _Part(experiment, folder, experiment.method)
            summaries = _rounds([part], execution, again, partial(self._carry_out, execution))
            tables.results([(experiment.method, summaries[0])], "method")
        tables.line(f"run folder: {folder}")

    def _carry_out(self, execution: Execution, requests: Sequence[run.Request]) -> list[dict[str, Any]]:
        experiment, folder, watch = requests[0].experiment, requests[0].folder, requests[0].watch
        if self.resume:
            return [run.resume(folder, experiment, execution, watch)]
        return [run.start(experiment, folder, execution, self.partition_file, watch)]


@dataclass(frozen=True)
class Compare(Options):
    """Several methods or seeds on the same partition, and a table. The seeds of a method run together.

    Started again with the same --out, it skips what is finished and goes on with what is not.
    """

    methods: tuple[str, ...] = ("fedavg", "fedkper")
    """methods to compare, each as --method takes it"""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """seeds; --seed alone if not given"""

    @classmethod
    def meant(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A file's method is the one to compare, if --methods names none."""
        if "method" in values:
            raise InputError("--method: compare takes --methods")
        if "methods" not in values and "config" in values:
            found = read_file(values["config"])
            inner = found.get("experiment")
            if "method" in (inner if isinstance(inner, dict) else found):
                values = values | {"methods": (from_file(values["config"]).method,)}
        return super().meant(values)

    def act(self) -> None:
        execution, base = self.execution(), self.experiment()
        seeds = tuple(dict.fromkeys(self.seeds or (self.seed,)))
        cells = [(m, s) for m in dict.fromkeys(self.methods) for s in seeds]
        experiments = [dataclasses.replace(base, method=m, seed=s).checked() for m, s in cells]
        run.check_device(execution)
        dataset = run.load(experiments[0], execution)
        rows: list[tuple[str, dict[str, Any]]] = []
        curves: dict[str, metrics.Curves] = {}
        with folders.out(self.out, f"{Path(base.dataset).stem}-compare") as parent:
            for experiment, place in zip(experiments, _places(cells), strict=True):
                run.check(experiment, parent / place, dataset, self.partition_file)
            again = f"the same command with --out {shlex.quote(str(parent))}"
            parts = [
                _Part(e, parent / place, e.method + (f" seed {e.seed}" if len(seeds) > 1 else ""))
                for e, place in zip(experiments, _places(cells), strict=True)
            ]
            carry_out = partial(run.together, execution, self.partition_file, dataset)
            for at in range(0, len(parts), len(seeds)):  # the seeds of a method stand together
                mine = parts[at : at + len(seeds)]
                summaries = _rounds(mine, execution, again, carry_out)
                rows += [(part.title, summary) for part, summary in zip(mine, summaries, strict=True)]
                curves |= {part.title: runfiles.read_curves(part.folder) for part in mine}
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
class Summary(Command):
    """The table of results again, from the folders of runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs, or folders that hold some"""

    def act(self) -> None:
        found = folders.runs(self.runs, lambda path: tables.notice(f"{path}: holds no run, left out"))
        rows = []
        for folder in found:
            experiment, curves = run.stored_experiment(folder), runfiles.read_curves(folder)
            title = f"{folder}: {experiment.method} ({len(curves.global_acc)} of {experiment.rounds} rounds)"
            rows.append((title, metrics.summarise(curves)))
        tables.results(rows, "run")


COMMANDS: dict[str, type[Command]] = {"run": Run, "compare": Compare, "summary": Summary}


class _Part(NamedTuple):
    """One run of those that go through their rounds together."""

    experiment: Experiment
    folder: Path
    title: str


def _rounds(
    parts: Sequence[_Part],
    execution: Execution,
    again: str,
    carry_out: Callable[[Sequence[run.Request]], list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Carries runs out with live progress; if that is stopped, says that `again` goes on."""
    begun: list[int] = []
    with tables.progress() as bar:
        requests = [
            run.Request(part.experiment, part.folder, _watch(parts, part, execution, bar, begun))
            for part in parts
        ]
        try:
            done = carry_out(requests)
        except (KeyboardInterrupt, RunError) as error:
            if len(begun) == len(parts) and getattr(error, "exit_code", 1) == 1:
                bar.stop()
                tables.go_on(again)
            raise
    for part in parts:
        tables.rejected(part.folder)
    return done


def _watch(
    parts: Sequence[_Part], part: _Part, execution: Execution, bar: Progress, begun: list[int]
) -> run.Watch:
    """Shows a run in `bar`, in a log file as a line every 10 rounds; `begun` gets the rounds done before.

    What runs together have in common is said once.
    """
    rounds = part.experiment.rounds
    task = bar.add_task(tables.short(part.title), total=rounds, state="", visible=False)

    def begin(e: Experiment, dataset: Dataset, done: int) -> None:
        for text in dataset.notices if not begun else ():
            tables.notice(text)
        if done >= rounds:
            tables.notice(f"{part.folder}: finished already, {done} rounds")
        else:
            bar.update(task, completed=done, visible=True)
        begun.append(done)
        if len(begun) == len(parts) and min(begun) < rounds:
            seeds = [one.experiment.seed for one in parts]
            count = run.workers(execution, e, len(parts))
            tables.settings(e, seeds, execution.device, count, min(begun))

    def on_round(round: int, line: dict[str, Any]) -> None:
        bar.update(task, completed=round, state=tables.state(line))
        if not tables.err.is_terminal and (round == rounds or round % 10 == 0):
            where = f"{part.title}: round {round} of {rounds}"
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
    shorts = Counter(short(m)[:60].lower() for m, _ in dict.fromkeys((m, 0) for m, _ in cells))
    names = []
    for method, seed in cells:
        name = short(method)[:60]
        if shorts[name.lower()] > 1:
            name += f"-{zlib.crc32(method.encode()):08x}"
        names.append(f"{name}-seed{seed}")
    return names
