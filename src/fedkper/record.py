"""One folder a run, written as the run goes on: plain files that a spreadsheet, pandas or `tail -f` can read.

runfiles.py says which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedkper import checkpoint, folders, tree
from fedkper.errors import InputError, RunError
from fedkper.metrics import Curves
from fedkper.runfiles import (
    CALIBRATION_COLUMNS,
    CLIENT_COLUMNS,
    CONFUSION_COLUMNS,
    ROUND_COLUMNS,
    TABLES,
    read_curves,
    read_events,
    read_rows,
)
from fedkper.scores import Bin, Counts
from fedkper.tree import Tree

# What a start that was cut short before run.json leaves behind.
_BEGUN = {".lock", "checkpoint", "partition.json", *TABLES}


class Details(NamedTuple):
    """What one of MODELS said in a round, on G or on a client's local test part."""

    model: str
    client: int | None
    confusion: Counts
    """[C, C + 1], see scores.Answers.confusion"""


class Record:
    """The folder of a run, open for writing by one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None
        self.checkpoints = folder / "checkpoint"
        self._lock = folders.locked(folder)

    @staticmethod
    def create(folder: Path) -> Record:
        """A new run's folder. Raises InputError if it already holds something or has an unsafe name."""
        refuse_used(folder)
        folders.make(folder)
        record = Record(folder)
        try:
            refuse_used(folder)  # again: another process may have finished a run here meanwhile
            with record._writing(folder):
                record.checkpoints.mkdir(exist_ok=True)
            for name, columns in TABLES.items():
                record._table(name, columns, [])
            record._sweep()
        except BaseException:
            record.close()
            raise
        return record

    @staticmethod
    def open(folder: Path) -> Record:
        """An existing run's folder. Raises InputError if it is none."""
        if not os.path.isfile(folder / "run.json"):
            raise InputError(f"--resume {folder}: holds no run (no run.json); check the path")
        return Record(folder)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """A full disk or a folder that cannot be written is said in one sentence."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{path}: cannot be written ({error.strerror}). What was written before is still valid: make "
                "room or change the rights, then go on"
            ) from error

    def write_json(self, name: str, values: Any) -> None:
        text = json.dumps(values, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        with self._writing(self.folder / name):
            # A path need not be UTF-8: its odd bytes become JSON's own escapes.
            tree.write(self.folder / name, text.encode(errors="backslashreplace"))

    def event(self, kind: str, **values: Any) -> None:
        event = {"event": kind, **values}
        path = self.folder / "events.jsonl"
        with self._writing(path), open(path, "a", encoding="utf-8") as file:
            file.write(_event_line(event))
        self.on_event(event)

    def append(self, round: dict[str, Any], clients: Iterable[dict[str, Any]]) -> None:
        """The lines of a finished round, flushed to the disk."""
        self._add("clients.csv", CLIENT_COLUMNS, clients)
        self._add("rounds.csv", ROUND_COLUMNS, [round])

    def details(self, round: int, details: Iterable[Details], bins: Iterable[Bin]) -> None:
        """Who was taken for what, and how sure the global model was; before `append` of the same round."""
        self._add("confusion.csv", CONFUSION_COLUMNS, _confusion_rows(round, details))
        rows = (dict(zip(CALIBRATION_COLUMNS, (round, *found), strict=True)) for found in bins)
        self._add("calibration.csv", CALIBRATION_COLUMNS, rows)

    def save(
        self, round: int, shared: Tree, differing: Tree, own: Mapping[int, str], visits: dict[int, int]
    ) -> None:
        """The state after `round`; the JSON file comes last and makes it valid. The one before is kept.

        `differing`: leaves in which the model scored as "global" differs from `shared`; `own`: checksums of
        what this round's clients keep; `visits`: the round of every client's state.
        """
        with self._writing(self.checkpoints):
            checkpoint.save(self.checkpoints, round, shared, differing, own, visits)

    def restore(self) -> checkpoint.Restored:
        """The newest valid state: rounds done, shared, visits, and a notice if the newest was damaged.

        Lines of rounds after it are dropped. Raises InputError if no state is valid.
        """
        done, shared, visits, notice = checkpoint.restore(self.checkpoints)
        if not done and len(read_rows(self.folder / "rounds.csv")) > 1:
            raise InputError(f"{self.checkpoints}: no checkpoint is there: start a new run")
        self._cut(done)
        return done, shared, visits, notice

    def own_path(self, client: int, round: int) -> Path:
        """Where a client's personal state is, as it was after `round`."""
        return checkpoint.own_path(self.checkpoints, client, round)

    def curves(self) -> Curves:
        return read_curves(self.folder)

    def _cut(self, round: int) -> None:
        """Drops the lines of rounds after `round`, and whatever a kill left half-written."""
        for name, columns in TABLES.items():
            kept = [row for row in read_rows(self.folder / name) if int(row["round"]) <= round]
            there = list(dict.fromkeys(int(row["round"]) for row in kept))
            if name in ("rounds.csv", "clients.csv") and there != list(range(1, round + 1)):
                raise InputError(
                    f"{self.folder / name}: damaged, not every round from 1 to {round} is in it; "
                    "bring the file back, or start a new run"
                )
            if kept and kept[0].keys() != set(columns):
                raise InputError(f"{self.folder / name}: has other columns than this version writes")
            self._table(name, columns, kept)
        events = [e for e in read_events(self.folder) if e.get("round", 0) <= round]
        path = self.folder / "events.jsonl"
        if path.exists():
            with self._writing(path):
                tree.write(path, "".join(map(_event_line, events)).encode())
        self._sweep()

    def _sweep(self) -> None:
        """Removes the temporary files that a kill left behind."""
        for path in [*self.folder.glob("*.tmp"), *self.checkpoints.glob("*.tmp")]:
            path.unlink()

    def _table(self, name: str, columns: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> None:
        with self._writing(self.folder / name):
            tree.write(self.folder / name, (",".join(columns) + "\n" + _lines(columns, rows)).encode())

    def _add(self, name: str, columns: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> None:
        path = self.folder / name
        with self._writing(path), open(path, "a", encoding="utf-8", newline="") as file:
            file.write(_lines(columns, rows))
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._lock.close()


def _event_line(event: dict[str, Any]) -> str:
    return json.dumps(event, allow_nan=False) + "\n"


def _confusion_rows(round: int, details: Iterable[Details]) -> Iterator[dict[str, Any]]:
    for model, client, confusion in details:
        classes = len(confusion)
        for true, said in zip(*confusion.nonzero(), strict=True):
            answer = None if said == classes else said
            cells = (round, model, client, true, answer, confusion[true, said])
            yield dict(zip(CONFUSION_COLUMNS, cells, strict=True))


def _lines(columns: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return "" if value is None else repr(value) if isinstance(value, float) else str(value)

    return "".join(",".join(cell(row[c]) for c in columns) + "\n" for row in rows)


def refuse_used(folder: Path) -> None:
    """Raises InputError for a folder that holds something else than a start that was cut short."""
    if os.path.exists(folder / "run.json"):
        raise InputError(f"--out {folder}: holds a run already; go on with --resume, or name another folder")
    try:
        names = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be read ({error.strerror})") from error
    begun = _BEGUN if ".lock" in names and not _has_rounds(folder) else set()
    if any(name not in begun and not name.endswith(".tmp") for name in names):
        raise InputError(f"--out {folder}: is not empty; name another folder")


def _has_rounds(folder: Path) -> bool:
    """Whether a folder without run.json holds results all the same."""
    table, checkpoints = folder / "rounds.csv", folder / "checkpoint"
    return (table.is_file() and table.read_bytes().count(b"\n") > 1) or (
        checkpoints.is_dir() and any(path.suffix != ".tmp" for path in checkpoints.iterdir())
    )
