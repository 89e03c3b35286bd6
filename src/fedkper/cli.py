"""The command line: run, compare, summary, data."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from fedkper import __version__, data, metrics, options, record, run, tables
from fedkper.data import medmnist
from fedkper.data import partition as partitions
from fedkper.data.dataset import Dataset
from fedkper.errors import InputError, RunError
from fedkper.experiment import Experiment, from_file, preset, read_file
from fedkper.ranges import Range
from fedkper.run import Execution
from fedkper.userfile import near

# How --help shows an option that need not be given.
OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
OptionalInt = Annotated[
    int | None, Range(1, 1024), tyro.conf.arg(metavar="INT", help_behavior_hint="(default: one a core)")
]


@dataclass(frozen=True)
class Options(Experiment):
    """What every command that trains takes: the experiment, and how and where to run it."""

    data: OptionalPath = None
    """folder of the data files; else $FEDKPER_DATA, else the user's cache"""
    workers: OptionalInt = None
    """processes that train; results do not depend on it"""
    device: str = "cpu"
    """cpu, cuda or cuda:N"""
    partition_file: OptionalPath = None
    """a stored partition (fedkper data split) instead of drawing one; must fit the options"""
    out: OptionalPath = None
    """folder of the results; a new one below runs/ if not given"""
    preset: Annotated[str, tyro.conf.arg(help_behavior_hint="")] = ""
    """paper-blood, paper-organc or paper-organs: the paper's setting; options beside it win"""
    config: OptionalPath = None
    """a run.json, to repeat that run, or a JSON file with some options; options beside it win"""

    def experiment(self) -> Experiment:
        return Experiment(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Experiment)})

    def execution(self) -> Execution:
        return Execution(self.data, self.workers, self.device)


@dataclass(frozen=True)
class Run(Options):
    """One experiment: a federation, simulated from the first round to the last."""

    resume: bool = False
    """go on with the run in --out, which is also taken as --resume FOLDER"""


@dataclass(frozen=True)
class Compare(Options):
    """Several methods or seeds on the same partition, one after another, and a table.

    Started again with the same --out, it skips what is finished and goes on with what is not.
    """

    methods: tuple[str, ...] = ("fedavg", "fedkper")
    """methods to compare, each as --method takes it"""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """seeds; --seed alone if not given"""


@dataclass(frozen=True)
class Summary:
    """The table of results again, from the folders of runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs, or folders that hold some"""


@dataclass(frozen=True)
class List:
    """The published sets: counts, classes, channels, licence, and whether the file is there."""

    data: OptionalPath = None
    """folder of the data files"""


@dataclass(frozen=True)
class Get:
    """Downloads a published set, with its checksum, into the data folder."""

    name: tyro.conf.Positional[str]
    size: int = 28
    """edge of the images: 28, 64, 128 or 224"""
    data: OptionalPath = None
    """folder of the data files"""


@dataclass(frozen=True)
class Show:
    """What is in a set: counts per class, shape, licence, citation, notices."""

    name: tyro.conf.Positional[str]
    size: int = 28
    """edge of the images: 28, 64, 128 or 224"""
    data: OptionalPath = None
    """folder of the data files"""


@dataclass(frozen=True)
class Split(Options):
    """Draws a partition and stores it in --out with a picture of who holds what.

    It takes all options of a run, so that one line serves both; those of the training change nothing.
    """


COMMANDS: dict[str, Any] = {"run": Run, "compare": Compare, "summary": Summary}
DATA_COMMANDS: dict[str, Any] = {"list": List, "get": Get, "show": Show, "split": Split}
HELP = """usage: fedkper COMMAND [options]

Federated learning for medicine: generalization, personalization, forgetting.

  run         one experiment                       fedkper run --method fedkper --preset paper-blood
  compare     several methods or seeds, a table    fedkper compare --methods fedavg fedkper
  summary     the table again, from the folders    fedkper summary runs/*
  data list   the published data sets              data get NAME, data show NAME, data split

Each has --help. The embedded data set needs no download: --dataset synthetic (the default).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 for a failure while running; 2 for wrong input; 130 if interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return dispatch(words)
    except RunError as error:
        tables.line(f"error: {error}", "bold red", tables.err)
        return error.exit_code
    except KeyboardInterrupt:
        tables.line("stopped", "yellow", tables.err)
        return 130
    except BrokenPipeError:  # `fedkper summary runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"fedkper {__version__}")
        return 0
    known, at = (DATA_COMMANDS, 1) if words[0] == "data" else (COMMANDS, 0)
    name = words[at] if len(words) > at else ""
    if at and name in ("", "-h", "--help"):
        print(HELP, end="")
        return 0 if name else 2
    if name not in known:
        listing = ", ".join([*COMMANDS, *(f"data {c}" for c in DATA_COMMANDS)])
        raise InputError(
            f"'{' '.join(words[: at + 1])}': no such command{near(name, known)}; there are: {listing}"
        )
    command, rest = known[name], words[at + 1 :]
    prog = f"fedkper {' '.join(words[: at + 1])}"
    if "-h" in rest or "--help" in rest:
        return _help(command, prog)
    if command is Run:
        rest = _resume_folder(rest)
    values = options.read(command, rest, prog)
    if command is Compare and "method" in values:
        raise InputError("--method: compare takes --methods")
    if "seed" in values and "seeds" in values:
        raise InputError("--seed and --seeds: use one of them")
    if issubclass(command, Options):
        values = _defaults(values) | values
    return int(ACTIONS[command](command(**values)))


def _help(command: type, prog: str) -> int:
    try:
        tyro.cli(command, args=["--help"], prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def _resume_folder(words: list[str]) -> list[str]:
    """`--resume FOLDER` and `--resume=FOLDER` are `--resume --out FOLDER`."""
    for at, word in enumerate(words):
        if word.startswith("--resume="):
            return [*words[:at], "--resume", "--out", word.partition("=")[2], *words[at + 1 :]]
        if word == "--resume" and at + 1 < len(words) and not words[at + 1].startswith("-"):
            return [*words[: at + 1], "--out", *words[at + 1 :]]
    return words


def _defaults(given: dict[str, Any]) -> dict[str, Any]:
    """What options have where the command line names none: the preset's, the file's, the resumed run's."""
    stored: dict[str, Any] = {}
    if given.get("resume"):
        for name in {"preset", "config", "partition_file"} & given.keys():
            raise InputError(f"--resume: the run keeps its own options; leave out --{name.replace('_', '-')}")
        folder = given.get("out")
        if folder is None:
            raise InputError("--resume: name the run's folder: --resume FOLDER")
        if not os.path.isfile(folder / "run.json"):
            raise InputError(f"--resume {folder}: holds no run (no run.json); check the path")
        base, stored = run.stored_experiment(folder), record.read_json(folder, "run.json")
    elif "preset" in given and "config" in given:
        raise InputError("--preset and --config: each names all options of a run; use one of them")
    elif "preset" in given:
        base = preset(given["preset"])
    elif "config" in given:
        base, stored = from_file(given["config"]), read_file(given["config"])
    else:
        base = Experiment()
    execution = stored.get("execution")
    where = execution.get("data") if isinstance(execution, dict) else None
    return base.to_json() | ({"data": Path(where)} if isinstance(where, str) else {})


@contextmanager
def _folder(given: Path | None, name: str) -> Iterator[Path]:
    """The folder of the results: --out, or a new one, which goes away again if nothing came to be in it."""
    folder = given or record.unique(Path("runs"), name)
    try:
        yield folder
    finally:
        if given is None:
            with suppress(OSError):  # not empty
                folder.rmdir()
                folder.parent.rmdir()


def _run(given: Run) -> int:
    experiment, execution = given.experiment().checked(), given.execution()
    run.check_device(execution)
    with _folder(given.out, f"{Path(experiment.dataset).stem}-{_short(experiment.method)}") as folder:
        again = f"fedkper run --resume {shlex.quote(str(folder))}"
        stored, title = given.partition_file, experiment.method
        summary = _rounds(experiment, execution, folder, given.resume, stored, title, again)
        tables.results([(experiment.method, summary)], "method")
    tables.line(f"run folder: {folder}")
    return 0


def _rounds(
    experiment: Experiment,
    execution: Execution,
    folder: Path,
    resume: bool,
    stored: Path | None,
    title: str,
    again: str,
) -> dict[str, Any]:
    """Runs or resumes with live progress; if that is stopped, says that `again` goes on."""
    begun: list[int] = []
    with tables.progress() as bar:
        task = bar.add_task(tables.short(title), total=experiment.rounds, state="", visible=False)

        def begin(e: Experiment, dataset: Dataset, done: int) -> None:
            begun.append(done)
            for text in dataset.notices:
                tables.notice(text)
            if resume and done >= e.rounds:
                tables.notice(f"{folder}: finished already, {done} rounds")
            else:
                tables.settings(e, execution.device, run.workers(execution), done)
                bar.update(task, completed=done, visible=True)

        def on_round(round: int, line: dict[str, Any]) -> None:
            bar.update(task, completed=round, state=tables.state(line))
            if not tables.err.is_terminal and (round == experiment.rounds or round % 10 == 0):
                where = f"{title}: round {round} of {experiment.rounds}"
                tables.line(f"{where}  {tables.state(line)}", file=tables.err)

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "checkpoint":
                tables.notice(event["reason"])

        watch = run.Watch(begin, on_round, on_event)
        try:
            if resume:
                summary = run.resume(folder, experiment, execution, watch)
            else:
                summary = run.start(experiment, folder, execution, stored, watch)
        except (KeyboardInterrupt, RunError) as error:
            if begun and getattr(error, "exit_code", 1) == 1:
                bar.stop()
                tables.go_on(again)
            raise
    tables.rejected([e for e in record.read_events(folder) if e["event"] == "rejected"], folder)
    return summary


def _compare(given: Compare) -> int:
    execution, base = given.execution(), given.experiment()
    seeds = tuple(dict.fromkeys(given.seeds or (given.seed,)))
    cells = [(m, s) for m in dict.fromkeys(given.methods) for s in seeds]
    experiments = [dataclasses.replace(base, method=m, seed=s).checked() for m, s in cells]
    run.check_device(execution)
    rows, curves = [], {}
    with _folder(given.out, f"{Path(base.dataset).stem}-compare") as parent:
        again = f"the same command with --out {shlex.quote(str(parent))}"
        for experiment, place in zip(experiments, _places(cells), strict=True):
            name = experiment.method + (f" seed {experiment.seed}" if len(seeds) > 1 else "")
            folder = parent / place
            resume = os.path.isfile(folder / "run.json")
            stored = given.partition_file
            rows.append((name, _rounds(experiment, execution, folder, resume, stored, name, again)))
            curves[name] = record.read_curves(folder)
    _draw(curves, parent / "curves.png", f"{base.dataset}: {base.clients} clients, {base.rounds} rounds")
    tables.results(rows, "method")
    if len(seeds) > 1:
        grouped = {m: [curves[f"{m} seed {s}"] for s in seeds] for m in dict.fromkeys(given.methods)}
        merged = [(m, metrics.over_runs(runs)) for m, runs in grouped.items()]
        tables.results(merged, f"{len(seeds)} seeds", "std_seeds")
    tables.line(f"run folders: {parent}")
    tables.line(f"curves: {parent / 'curves.png'}")
    return 0


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


def _summary(given: Summary) -> int:
    folders = []
    for path in given.runs:
        inside = sorted(p.parent for p in path.glob("*/run.json"))
        folders += [path] if os.path.isfile(path / "run.json") or not inside else inside
    rows = []
    for folder in folders:
        experiment, curves = run.stored_experiment(folder), record.read_curves(folder)
        title = f"{folder}: {experiment.method} ({len(curves.global_acc)} of {experiment.rounds} rounds)"
        rows.append((title, metrics.summarise(curves)))
    tables.results(rows, "run")
    return 0


def _list(given: List) -> int:
    folder = data.folder(given.data)
    tables.sets(medmnist.rows(folder))
    tables.line(f"data folder: {folder}")
    tables.line("embedded, always there: synthetic (8 classes, 28 x 28 RGB, 4,000 + 1,000 images)")
    return 0


def _get(given: Get) -> int:
    dataset = data.load(given.name, given.size, given.data)
    for text in dataset.notices:
        tables.notice(text)
    place = medmnist.find(given.name, data.folder(given.data), given.size)
    tables.line(f"{dataset.name}: {place or 'embedded, nothing to download'}")
    return 0


def _show(given: Show) -> int:
    dataset = data.load(given.name, given.size, given.data)
    for text in dataset.notices:
        tables.notice(text)
    tables.dataset(dataset)
    return 0


def _split(given: Split) -> int:
    from fedkper import plots

    experiment = given.experiment().checked()
    if given.partition_file is not None:
        raise InputError("--partition-file: data split draws a partition; leave it out")
    dataset = data.load(experiment.dataset, experiment.size, given.data)
    partition = partitions.make(run.partitioning(experiment), dataset.train_y, dataset.hash, dataset.columns)
    train, test = partition.counts(dataset.train_y, len(dataset.classes))
    how = f"alpha {experiment.alpha:g}" if experiment.partition == "dirichlet" else experiment.partition
    title = f"{dataset.name}: {len(train)} clients, {how}, partition seed {experiment.partition_seed}"
    with _folder(given.out, f"{dataset.name}-split") as folder:
        if os.path.exists(folder / "run.json"):
            raise InputError(f"--out {folder}: holds a run, whose partition must stay; name another folder")
        record.make_folder(folder)
        try:
            partitions.save(partition, folder / "partition.json")
            plots.holdings(train, test, dataset.classes, folder / "partition.png", title)
        except OSError as error:
            raise InputError(f"--out {folder}: cannot be written ({error.strerror})") from error
    tables.holdings(train, test, dataset.classes)
    tables.line(f"hash: {partition.hash}")
    tables.line(f"partition: {folder / 'partition.json'}")
    tables.line(f"picture: {folder / 'partition.png'}")
    return 0


ACTIONS: dict[Any, Any] = {
    Run: _run,
    Compare: _compare,
    Summary: _summary,
    List: _list,
    Get: _get,
    Show: _show,
    Split: _split,
}

if __name__ == "__main__":
    sys.exit(main())
