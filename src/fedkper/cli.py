"""The command line: run, compare, summary, data."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from fedkper import data, metrics, record, run, tables
from fedkper.data import medmnist
from fedkper.data import partition as partitions
from fedkper.errors import InputError, RunError
from fedkper.experiment import Experiment, from_file, from_json, preset
from fedkper.run import Execution
from fedkper.simulate import OnRound


@dataclass(frozen=True)
class Options(Experiment):
    """What every command that trains takes: the experiment, and how and where to run it."""

    data: Path | None = None
    """folder of the data files; else $FEDKPER_DATA, else the user's cache"""
    workers: int | None = None
    """processes that train; one a core if not given; results do not depend on it"""
    device: str = "cpu"
    """cpu, cuda or cuda:N"""
    partition_file: Path | None = None
    """a stored partition (fedkper data split) instead of drawing one; must fit the options"""
    out: Path | None = None
    """folder of the results; a new one below runs/ if not given"""
    preset: str = ""
    """paper-blood, paper-organc or paper-organs: the paper's setting; options beside it win"""
    config: Path | None = None
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
    """Several methods or seeds on the same partition, one after another, and a table at the end.

    Started again with the same --out, it skips what is finished and goes on with what is not.
    """

    methods: tuple[str, ...] = ("fedavg", "fedkper")
    """methods to compare, each as --method takes it"""
    seeds: tuple[int, ...] = ()
    """seeds; --seed alone if not given"""


@dataclass(frozen=True)
class Summary:
    """The table of results again, from the folders of runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs, or folders that hold some"""


@dataclass(frozen=True)
class List:
    """The published sets: counts, classes, channels, licence, and whether the file is there."""

    data: Path | None = None
    """folder of the data files"""


@dataclass(frozen=True)
class Get:
    """Downloads a published set, with its checksum, into the data folder."""

    name: tyro.conf.Positional[str]
    size: int = 28
    """edge of the images: 28, 64, 128 or 224"""
    data: Path | None = None
    """folder of the data files"""


@dataclass(frozen=True)
class Show:
    """What is in a set: counts per class, shape, licence, citation, notices."""

    name: tyro.conf.Positional[str]
    size: int = 28
    """edge of the images: 28, 64, 128 or 224"""
    data: Path | None = None
    """folder of the data files"""


@dataclass(frozen=True)
class Split(Options):
    """Draws a partition and stores it in --out with a picture of who holds what."""


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
        tables.err.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        tables.err.print("stopped", style="yellow")
        return 130
    except BrokenPipeError:
        return 1


def dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if words else 2
    if words[0] == "--version":
        from fedkper import __version__

        print(f"fedkper {__version__}")
        return 0
    known, at = (DATA_COMMANDS, 1) if words[0] == "data" else (COMMANDS, 0)
    name = words[at] if len(words) > at else ""
    if name not in known:
        from fedkper.methods import near

        listing = ", ".join([*COMMANDS, *(f"data {c}" for c in DATA_COMMANDS)])
        raise InputError(
            f"'{' '.join(words[: at + 1])}': no such command{near(name, known)}; there are: {listing}"
        )
    command = known[name]
    rest, default = words[at + 1 :], None
    if issubclass(command, Options):
        rest = _resume_folder(rest)
        default = _defaults(command, rest)
    parsed = tyro.cli(
        command,
        args=rest,
        default=default,
        prog=f"fedkper {' '.join(words[: at + 1])}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return int(ACTIONS[command](parsed))


def _resume_folder(words: list[str]) -> list[str]:
    """`--resume FOLDER` is `--resume --out FOLDER`."""
    if "--resume" in words:
        at = words.index("--resume")
        if at + 1 < len(words) and not words[at + 1].startswith("-"):
            return [*words[: at + 1], "--out", *words[at + 1 :]]
    return words


def _defaults(command: type[Options], words: list[str]) -> Any:
    """What options have where the command line names none: the preset's, the file's, the resumed run's."""
    given: dict[str, str] = {}
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--preset", "--config", "--out"):
            given[name] = value if equals else words[at + 1] if at + 1 < len(words) else ""
    if "--preset" in given and "--config" in given:
        raise InputError("--preset and --config: each names all options of a run; use one of them")
    base, extra = Experiment(), {}
    if "--resume" in words:
        if not given.get("--out"):
            raise InputError("--resume: name the run's folder: --resume FOLDER")
        folder = Path(given["--out"])
        if not (folder / "run.json").is_file():
            raise InputError(f"--resume {folder}: holds no run (no run.json); check the path")
        stored = record.read_json(folder, "run.json")
        base = from_json(stored.get("experiment", {}), str(folder / "run.json"))
        where = stored.get("execution", {}).get("data")
        extra = {"data": Path(where)} if where else {}
    elif "--preset" in given:
        base = preset(given["--preset"])
    elif "--config" in given:
        base = from_file(Path(given["--config"]))
    return command(**{**dataclasses.asdict(base), **extra})


def _run(options: Run) -> int:
    experiment, execution = options.experiment().checked(), options.execution()
    if options.resume:
        folder = options.out or Path()
    else:
        run.check_device(execution)
        folder = options.out or record.unique(
            Path("runs"), f"{Path(experiment.dataset).stem}-{_short(experiment.method)}"
        )
    summary = _rounds(
        experiment, execution, folder, options.resume, options.partition_file, experiment.method
    )
    tables.results([(experiment.method, summary)], "method")
    tables.out.print(f"run folder: {folder}", markup=False, soft_wrap=True)
    return 0


def _rounds(
    experiment: Experiment, execution: Execution, folder: Path, resume: bool, stored: Path | None, title: str
) -> dict[str, Any]:
    """Runs or resumes with live progress; Ctrl-C ends cleanly and says how to go on."""
    done = len(record.read_curves(folder).global_acc) if resume else 0
    if resume and done >= experiment.rounds:
        tables.notice(f"{folder}: finished already, {done} rounds")
    try:
        with tables.progress() as bar:
            task = bar.add_task(title, total=experiment.rounds, completed=done, state="")

            def on_round(round: int, line: dict[str, Any]) -> None:
                bar.update(task, completed=round, state=tables.state(line))
                if not tables.err.is_terminal and (round == experiment.rounds or round % 10 == 0):
                    tables.err.print(
                        f"{title}: round {round} of {experiment.rounds}  {tables.state(line)}", markup=False
                    )

            say: OnRound = on_round
            if resume:
                return run.resume(folder, experiment, execution, say)
            return run.start(experiment, folder, execution, stored, say)
    except KeyboardInterrupt:
        tables.err.print(
            f"stopped; nothing of the finished rounds is lost. Go on with:\n  fedkper run --resume {shlex.quote(str(folder))}",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
        raise


def _compare(options: Compare) -> int:
    execution = options.execution()
    seeds = options.seeds or (options.seed,)
    cells = [(m, s) for m in dict.fromkeys(options.methods) for s in dict.fromkeys(seeds)]
    base = options.experiment()
    experiments = [dataclasses.replace(base, method=m, seed=s).checked() for m, s in cells]
    if not experiments:
        raise InputError("--methods: name at least one")
    run.check_device(execution)
    parent = options.out or record.unique(Path("runs"), f"{Path(base.dataset).stem}-compare")
    rows, curves = [], {}
    for experiment in experiments:
        name = experiment.method + (f" seed {experiment.seed}" if len(seeds) > 1 else "")
        folder = parent / f"{_short(experiment.method)}-seed{experiment.seed}"
        resume = (folder / "run.json").is_file()
        summary = _rounds(experiment, execution, folder, resume, options.partition_file, name)
        rows.append((name, summary))
        curves[name] = record.read_curves(folder)
    from fedkper import plots

    plots.curves(
        curves, parent / "curves.png", f"{base.dataset}: {base.clients} clients, {base.rounds} rounds"
    )
    tables.results(rows, "method")
    if len(seeds) > 1:
        grouped = {m: [curves[f"{m} seed {s}"] for s in dict.fromkeys(seeds)] for m in options.methods}
        merged = [(m, metrics.over_runs(runs)) for m, runs in grouped.items()]
        tables.results(merged, f"over {len(seeds)} seeds", "std_seeds")
    tables.out.print(f"run folders: {parent}", markup=False, soft_wrap=True)
    tables.out.print(f"curves: {parent / 'curves.png'}", markup=False, soft_wrap=True)
    return 0


def _short(method: str) -> str:
    """A method as part of a folder's name."""
    import re

    return re.sub(r"[^A-Za-z0-9.]+", "-", Path(method.partition(".py:")[2] or method).name).strip("-.")[:60]


def _summary(options: Summary) -> int:
    folders = []
    for path in options.runs:
        inside = sorted(p.parent for p in path.glob("*/run.json"))
        folders += [path] if (path / "run.json").is_file() or not inside else inside
    if not folders:
        raise InputError("name at least one run's folder")
    rows = []
    for folder in folders:
        experiment = record.read_json(folder, "run.json").get("experiment", {})
        curves = record.read_curves(folder)
        title = f"{folder}: {experiment.get('method')} ({len(curves.global_acc)} of {experiment.get('rounds')} rounds)"
        rows.append((title, metrics.summarise(curves)))
    tables.results(rows, "run")
    return 0


def _list(options: List) -> int:
    folder = data.folder(options.data)
    tables.rows(medmnist.rows(folder))
    tables.out.print(f"data folder: {folder}", markup=False, soft_wrap=True)
    tables.out.print("embedded, always there: synthetic (8 classes, 28 x 28 RGB, 4,000 + 1,000 images)")
    return 0


def _get(options: Get) -> int:
    dataset = data.load(options.name, options.size, options.data)
    for text in dataset.notices:
        tables.notice(text)
    place = medmnist.find(options.name, data.folder(options.data), options.size)
    tables.out.print(
        f"{dataset.name}: {place or 'embedded, nothing to download'}", markup=False, soft_wrap=True
    )
    return 0


def _show(options: Show) -> int:
    dataset = data.load(options.name, options.size, options.data)
    for text in dataset.notices:
        tables.notice(text)
    tables.dataset(dataset)
    return 0


def _split(options: Split) -> int:
    from fedkper import plots

    experiment = options.experiment().checked()
    dataset = data.load(experiment.dataset, experiment.size, options.data)
    partition = partitions.make(run.partitioning(experiment), dataset.train_y, dataset.hash, dataset.columns)
    folder = options.out or record.unique(Path("runs"), f"{dataset.name}-split")
    record.make_folder(folder)
    partitions.save(partition, folder / "partition.json")
    train, test = partition.counts(dataset.train_y, len(dataset.classes))
    how = f"alpha {experiment.alpha:g}" if experiment.partition == "dirichlet" else experiment.partition
    title = f"{dataset.name}: {len(train)} clients, {how}, partition seed {experiment.partition_seed}"
    plots.holdings(train, test, dataset.classes, folder / "partition.png", title)
    tables.holdings(train, test, dataset.classes)
    tables.out.print(f"hash: {partition.hash}", soft_wrap=True)
    tables.out.print(f"partition: {folder / 'partition.json'}", markup=False, soft_wrap=True)
    tables.out.print(f"picture: {folder / 'partition.png'}", markup=False, soft_wrap=True)
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
