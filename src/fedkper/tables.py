"""What a person reads in the terminal: the table of the paper's seven columns, progress, notices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedkper.data.dataset import Dataset

COLUMNS = {
    "global_acc": "global\naccuracy",
    "global_bwt": "global\nBwT",
    "global_consistency": "global\nconsist.",
    "local_acc": "local\naccuracy",
    "worst_client_acc": "worst\nclient",
    "local_consistency": "local\nconsist.",
    "balance": "\nbalance",
}
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def cell(entry: Mapping[str, Any], deviation: str = "std_rounds") -> str:
    """A mean, below it its deviation; a dash where it is undefined."""
    if entry["mean"] is None:
        return "–"
    return f"{entry['mean']:.3f}" + ("" if entry.get(deviation) is None else f"\n±{entry[deviation]:.3f}")


def results(rows: Sequence[tuple[str, Mapping[str, Any]]], first: str, deviation: str = "std_rounds") -> None:
    """The table of results: a line a run (name, summary), then why a number is missing."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(f"\n{first}", overflow="fold")
    for title in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    missing: dict[str, None] = {}
    for name, summary in rows:
        table.add_row(name, *(cell(summary[key], deviation) for key in COLUMNS))
        for key, title in COLUMNS.items():
            if summary[key]["mean"] is None:
                missing[f"– {title.strip().replace(chr(10), ' ')}: {summary[key]['reason']}"] = None
    out.print(table)
    over = "rounds" if deviation == "std_rounds" else "seeds"
    out.print(f"means over rounds, ± deviation over {over}; in every column higher is better", style="dim")
    for line in missing:
        out.print(line, style="dim", markup=False, soft_wrap=True)


def progress() -> Progress:
    """A live line on a terminal, on standard error, so that standard output stays the result."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
    )


def notice(text: str) -> None:
    err.print(f"note: {text}", style="yellow", markup=False, soft_wrap=True)


def state(line: Mapping[str, Any]) -> str:
    """A round's line in short."""
    shown = {"global": line["global_acc"], "local": line["local_acc"], "forgetting": line["global_bwt"]}
    return "  ".join(f"{name} {'–' if v is None else f'{v:.3f}'}" for name, v in shown.items())


def rows(values: Sequence[Mapping[str, Any]]) -> None:
    """Plain rows as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for key, value in values[0].items():
        table.add_column(
            key, justify="right" if isinstance(value, int) and not isinstance(value, bool) else "left"
        )
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
    out.print(
        f"{d.name}: {len(d.train_y):,} train and {len(d.test_y):,} test images, {h} x {w} x {c}", markup=False
    )
    train, test = (np.bincount(y, minlength=len(d.classes)) for y in (d.train_y, d.test_y))
    rows(
        [
            {"class": i, "name": name, "train": int(train[i]), "test": int(test[i])}
            for i, name in enumerate(d.classes)
        ]
    )
    for name, column in d.columns.items():
        out.print(f"column {name}: {len(np.unique(column))} values", markup=False)
    for key, value in d.source.items():
        out.print(f"{key}: {value}", markup=False, soft_wrap=True)


def holdings(train: NDArray[np.int64], test: NDArray[np.int64], classes: Sequence[str]) -> None:
    """Who holds what: train + local test samples per client and class."""
    shown: list[dict[str, Any]] = []
    for k in range(min(len(train), 100)):
        cells = {
            name: f"{a}+{b}" if a or b else "·" for name, a, b in zip(classes, train[k], test[k], strict=True)
        }
        shown.append({"client": k, "train": int(train[k].sum()), "test": int(test[k].sum()), **cells})
    rows(shown)
    if len(train) > 100:
        out.print(f"and {len(train) - 100:,} more clients")
