"""What a person reads in the terminal: the table of the paper's seven columns, progress, notices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedkper.data.dataset import Dataset
from fedkper.experiment import Experiment
from fedkper.runfiles import read_events

COLUMNS = {
    "global_acc": "global\naccuracy",
    "global_bwt": "global\nBwT",
    "global_consistency": "global\nconsist.",
    "local_acc": "local\naccuracy",
    "worst_client_acc": "worst\nclient",
    "local_consistency": "local\nconsist.",
    "balance": "\nbalance",
}
# Width of the seven columns with their gaps.
NUMBERS = 66
# Names of users' files, classes and methods may hold what rich takes for markup or an emoji.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


def cell(entry: Mapping[str, Any], deviation: str = "std_rounds") -> str:
    """A mean, below it its deviation; a dash where it is undefined."""
    if entry["mean"] is None:
        return "–"
    return f"{entry['mean']:.3f}" + ("" if entry.get(deviation) is None else f"\n±{entry[deviation]:.3f}")


def results(rows: Sequence[tuple[str, Mapping[str, Any]]], first: str, deviation: str = "std_rounds") -> None:
    """The table of results: a line a run (name, summary), then why a number is missing.

    Names that do not fit beside seven columns get a number, and stand in full above the table.
    """
    if max(len(name) for name, _ in rows) > max(8, out.width - NUMBERS):
        for number, (name, _) in enumerate(rows, 1):
            out.print(f"{number:>3}  {name}", soft_wrap=True)
        rows = [(str(number), summary) for number, (_, summary) in enumerate(rows, 1)]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(f"\n{first}", overflow="fold")
    for title in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    missing: dict[str, None] = {}
    for name, summary in rows:
        table.add_row(name, *(cell(summary[key], deviation) for key in COLUMNS))
        for key, title in COLUMNS.items():
            if summary[key]["mean"] is None:
                missing[f"– {' '.join(title.split())}: {summary[key]['reason']}"] = None
    out.print(table)
    over = "rounds" if deviation == "std_rounds" else "seeds"
    out.print(f"means over rounds, ± deviation over {over}; higher is better in every column", style="dim")
    for line in missing:
        out.print(line, style="dim")


def progress() -> Progress:
    """A live line on a terminal, on standard error, so that standard output stays the result.

    It fits 80 columns; a wider terminal also gets a bar. Elsewhere, in a log file, nothing is drawn.
    """
    bar = [BarColumn(24)] if err.width >= 110 else []
    return Progress(
        TextColumn("{task.description}", markup=False),
        *bar,
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=err,
        disable=not err.is_terminal,
    )


def plain(text: str) -> str:
    """A text with a question mark for each byte of a path that is no character."""
    return text.encode("utf-8", "replace").decode()


def short(text: str, width: int = 16) -> str:
    """A name as it fits into the line of progress."""
    return text if len(text) <= width else text[: width - 1] + "…"


def notice(text: str) -> None:
    err.print(f"note: {text}", style="yellow", soft_wrap=True)


def line(text: str, style: str = "", file: Console = out) -> None:
    """One line as it is: paths must stay in one piece."""
    file.print(text, style=style, soft_wrap=True)


def settings(e: Experiment, seeds: Sequence[int], device: str, workers: int, done: int) -> None:
    """What is run: every knob that has a say, in a few lines; `seeds` of the runs that go together."""
    clip = f", gradients clipped at {e.grad_clip:g}" if e.grad_clip else ""
    dealt = {
        "dirichlet": f"dirichlet alpha {e.alpha:g}",
        "pathological": f"{e.classes_per_client} classes a client",
        "column": f"by column {e.column}",
    }.get(e.partition, e.partition)
    size = "" if e.dataset.endswith(".npz") else f"size {e.size}, "
    text = (
        f"{e.method} on {e.dataset} ({size}model {e.model}): {e.rounds} rounds, "
        f"{e.clients} clients, {e.fraction:g} a round, {e.epochs} epochs, batch {e.batch}, "
        f"lr {e.lr:g} x {e.lr_decay:g} a round, "
        f"momentum {e.momentum:g}, weight decay {e.weight_decay:g}{clip}; {dealt}, at least {e.min_size} "
        f"samples, split {e.split}, partition seed {e.partition_seed}; sampling {e.sampling}, "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}; "
        f"{device}, {workers} worker{'s' if workers > 1 else ''}"
    )
    err.print(f"{text}; from round {done + 1}" if done else text, style="dim")


def go_on(command: str) -> None:
    line("stopped; the finished rounds are safe. Go on with:", "yellow", err)
    line(f"  {command}", "yellow", err)


def rejected(folder: Path) -> None:
    """Tells which updates of a run were left out, and in how many rounds all of them, and why."""
    events = read_events(folder)
    if found := [e for e in events if e["event"] == "rejected"]:
        reasons = "; ".join(dict.fromkeys(str(e.get("reason", "no reason recorded")) for e in found))
        rounds = len({e.get("round") for e in found})
        notice(
            f"{len(found)} update{'s' if len(found) > 1 else ''} in {rounds} round"
            f"{'s' if rounds > 1 else ''} rejected ({reasons}); see {folder / 'events.jsonl'}"
        )
    if kept := [e for e in events if e["event"] == "kept"]:
        reasons = "; ".join(dict.fromkeys(str(e.get("reason", "no reason recorded")) for e in kept))
        notice(f"in {len(kept)} round{'s' if len(kept) > 1 else ''} nothing was merged ({reasons})")


def state(line: Mapping[str, Any]) -> str:
    """A round's line in short."""
    shown = {"global": line["global_acc"], "local": line["local_acc"], "BwT": line["global_bwt"]}
    return " ".join(f"{name} {'–' if v is None else f'{v:.3f}'}" for name, v in shown.items())


def rows(values: Sequence[Mapping[str, Any]]) -> None:
    """Plain rows as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for key, value in values[0].items():
        number = isinstance(value, int) and not isinstance(value, bool)
        table.add_column(key, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in values:
        shown = (
            "yes" if v is True else "no" if v is False else f"{v:,}" if isinstance(v, int) else str(v)
            for v in row.values()
        )
        table.add_row(*shown)
    out.print(table)


def dataset(d: Dataset) -> None:
    """Counts per class and where the set comes from."""
    h, w, c = d.shape
    out.print(f"{d.name}: {len(d.train_y):,} train and {len(d.test_y):,} test images, {h} x {w} x {c}")
    train, test = (np.bincount(y, minlength=len(d.classes)) for y in (d.train_y, d.test_y))
    rows(
        [
            {"class": i, "name": name, "train": int(train[i]), "test": int(test[i])}
            for i, name in enumerate(d.classes)
        ]
    )
    for name, column in d.columns.items():
        out.print(f"column {name}: {len(np.unique(column))} values")
    for key, value in d.source.items():
        out.print(f"{key}: {value}", soft_wrap=True)


def holdings(train: NDArray[np.int64], test: NDArray[np.int64], classes: Sequence[str]) -> None:
    """Who holds what: train + local test samples per client and class; in a narrow terminal their sum."""
    clients = range(min(len(train), 100))
    cells = [[f"{a}+{b}" if a or b else "·" for a, b in zip(train[k], test[k], strict=True)] for k in clients]
    heads = list(classes)
    width = sum(max(map(len, column)) + 2 for column in zip(heads, *cells, strict=True)) + 22
    if width > out.width:
        cells = [[str(n) if n else "·" for n in train[k] + test[k]] for k in clients]
        heads = [str(c) for c in range(len(classes))]
        line("samples of each class, local test included; classes:")
        out.print(", ".join(f"{c} {name}" for c, name in enumerate(classes)))
    shown: list[dict[str, Any]] = []
    for k in clients:
        counts = {"train": int(train[k].sum()), "test": int(test[k].sum())}
        shown.append({"client": k, **counts, **dict(zip(heads, cells[k], strict=True))})
    rows(shown)
    if len(train) > 100:
        out.print(f"and {len(train) - 100:,} more clients")


def sets(published: Sequence[Mapping[str, Any]]) -> None:
    """The published sets, and who may use them for what."""
    heads = {"name": "name", "modality": "modality", "classes": "classes", "channels": "ch."}
    heads |= {"train": "train", "val": "val", "test": "test", "present": "here"}
    rows([{head: row[key] for key, head in heads.items()} for row in published])
    for licence in dict.fromkeys(row["licence"] for row in published):
        names = ", ".join(row["name"] for row in published if row["licence"] == licence)
        out.print(f"{licence}: {names}")
