"""The numbers of many runs in one long table: a line for each number, for pandas, R or a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fedkper import run, runfiles, tree
from fedkper.errors import InputError, RunError

ENDINGS = (".csv", ".parquet")


class Line(NamedTuple):
    """One number of one run."""

    run: str
    method: str
    dataset: str
    seed: int
    partition_seed: int
    round: int
    client: int | None
    """None for a number of the whole round"""
    metric: str
    """the column of rounds.csv or clients.csv"""
    value: str
    """as it stands there"""


def check(path: Path) -> None:
    """Raises InputError unless a table can be written at `path`."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"--curves {path}: must end in {' or '.join(ENDINGS)}")
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise InputError(f"--curves {path}: needs the extra: pip install 'fedkper[parquet]', or use .csv")


def write(folders: Sequence[Path], path: Path) -> int:
    """Writes the long table of the runs; returns its number of lines. An undefined number has no line."""
    lines = (line for folder in folders for line in _lines(folder))
    count, data = (_csv if path.suffix.lower() == ".csv" else _parquet)(lines)
    try:
        tree.write(path, data)
    except OSError as error:
        raise RunError(f"--curves {path}: cannot be written ({error.strerror})") from error
    return count


def _lines(folder: Path) -> Iterator[Line]:
    e = run.stored_experiment(folder)
    for name in ("rounds.csv", "clients.csv"):
        for row in runfiles.read_rows(folder / name):
            round = int(row.pop("round"))
            client = int(row.pop("client")) if "client" in row else None
            for metric, value in row.items():
                if value:
                    of = str(folder), e.method, e.dataset, e.seed, e.partition_seed
                    yield Line(*of, round, client, metric, value)


def _csv(lines: Iterator[Line]) -> tuple[int, bytes]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Line._fields)
    count = 0
    for line in lines:
        writer.writerow(line)
        count += 1
    return count, text.getvalue().encode(errors="replace")


def _parquet(lines: Iterator[Line]) -> tuple[int, bytes]:
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, list[Any]] = {name: [] for name in Line._fields}
    for line in lines:
        for name, cell in zip(Line._fields, line, strict=True):
            columns[name].append(cell)
        columns["value"][-1] = float(line.value)
    whole = pyarrow.int64()
    kinds = dict.fromkeys(("seed", "partition_seed", "round", "client"), whole)
    kinds |= {"value": pyarrow.float64()}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in Line._fields])
    table, data = pyarrow.table(columns, schema=schema), io.BytesIO()
    pyarrow.parquet.write_table(table, data)
    return table.num_rows, data.getvalue()
