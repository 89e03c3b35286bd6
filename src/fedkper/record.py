"""One folder a run: plain files that a spreadsheet, pandas or `tail -f` can read.

run.json         what was run: the experiment, versions, hashes of data and partition, device
partition.json   who holds which samples
rounds.csv       a line a round, written when the round ends
clients.csv      a line per client and round
events.jsonl     rejected updates, fall-backs, resumptions
checkpoint/      the last two rounds' state: safetensors and JSON, each replaced atomically
summary.json     the columns of the paper's Table 1
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedkper import checkpoint, folders, tree
from fedkper.errors import InputError, RunError
from fedkper.metrics import Curves
from fedkper.tree import Tree

ROUND_COLUMNS = (
    "round",
    "global_acc",
    "global_bwt",
    "local_acc",
    "local_acc_over_samples",
    "worst_client_acc",
    "train_seconds",
    "merge_seconds",
    "eval_seconds",
    "down_bytes",
    "up_bytes",
)
CLIENT_COLUMNS = (
    "round",
    "client",
    "sampled",
    "samples",
    "test_samples",
    "weight",
    "local_acc",
    "untuned_acc",
    "global_on_local_acc",
)
# The largest number in each column of whole numbers, and the columns that are read.
_WHOLE = {"round": 1_000_000, "sampled": 1, "test_samples": 10**9}
_NEEDED = {
    "rounds.csv": {"round", "global_acc"},
    "clients.csv": {"round", "client", "sampled", "test_samples", "local_acc", "global_on_local_acc"},
}
# What a start that was cut short before run.json leaves behind.
_BEGUN = {".lock", "checkpoint", "rounds.csv", "clients.csv", "partition.json"}


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
            record._table("rounds.csv", ROUND_COLUMNS, [])
            record._table("clients.csv", CLIENT_COLUMNS, [])
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

    def save(self, round: int, shared: Tree, own: dict[int, str], visits: dict[int, int]) -> None:
        """The state after `round`; the JSON file comes last and makes it valid. The one before is kept.

        `own`: checksums of what this round's clients keep; `visits`: the round of every client's state.
        """
        with self._writing(self.checkpoints):
            checkpoint.save(self.checkpoints, round, shared, own, visits)

    def restore(self) -> checkpoint.Restored:
        """The newest valid state: rounds done, shared, visits, and a notice if the newest was damaged.

        Lines of rounds after it are dropped. Raises InputError if no state is valid.
        """
        done, shared, visits, notice = checkpoint.restore(self.checkpoints)
        if not done and len(_rows(self.folder / "rounds.csv")) > 1:
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
        for name, columns in (("rounds.csv", ROUND_COLUMNS), ("clients.csv", CLIENT_COLUMNS)):
            kept = [row for row in _rows(self.folder / name) if int(row["round"]) <= round]
            if list(dict.fromkeys(int(row["round"]) for row in kept)) != list(range(1, round + 1)):
                raise InputError(f"{self.folder / name}: damaged, not every round from 1 to {round} is in it")
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


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run, without a last line that a kill cut short."""
    path = folder / "events.jsonl"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    events = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("round", 0), int):
            raise InputError(f"{path}: damaged in line {number}; correct or remove that line")
        events.append(event)
    return events


def _event_line(event: dict[str, Any]) -> str:
    return json.dumps(event, allow_nan=False) + "\n"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A run's file. Raises InputError that names it if it is missing or damaged."""
    path = folder / name
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); is {folder} the folder of a run?"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged, not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: damaged, no JSON object")
    return values


def read_curves(folder: Path) -> Curves:
    """The raw curves of a run, from its two tables. Raises InputError if one is missing or damaged."""
    rounds = _rows(folder / "rounds.csv")
    clients = _rows(folder / "clients.csv")
    count = 1 + max((int(row["client"]) for row in clients), default=-1)
    on_local: list[list[float | None]] = [[None] * count for _ in rounds]
    sampled: list[list[int]] = [[] for _ in rounds]
    local: list[dict[int, float | None]] = [{} for _ in rounds]
    sizes: dict[int, int] = {}
    for row in clients:
        at, client = int(row["round"]) - 1, int(row["client"])
        if at >= len(rounds):
            continue
        on_local[at][client] = _number(row["global_on_local_acc"])
        sizes[client] = int(row["test_samples"])
        if row["sampled"] == "1":
            sampled[at].append(client)
            local[at][client] = _number(row["local_acc"])
    return Curves([_number(r["global_acc"]) for r in rounds], sampled, on_local, local, sizes)


def _rows(path: Path) -> list[dict[str, str]]:
    """Complete lines of a table; a last line that a kill cut short is left out.

    Raises InputError that names the line if a cell that is read holds anything that no run writes.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        header, *lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))) or [[]]
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); is this the folder of a run?"
        ) from error
    except csv.Error as error:
        raise InputError(f"{path}: damaged ({error})") from error
    if header[:1] != ["round"] or not _NEEDED[path.name] <= set(header):
        raise InputError(f"{path}: damaged, its first line does not name the columns")
    whole = _WHOLE | {"client": _clients(path.parent) - 1}
    rows = []
    for number, line in enumerate(lines, 2):
        row = dict(zip(header, line, strict=False))
        odd = next((name for name, cell in row.items() if not _fits(name, cell, whole)), "")
        if len(line) != len(header):
            raise InputError(f"{path}: damaged in line {number}, which has {len(line)} cells")
        if not odd and path.name == "rounds.csv" and int(row["round"]) != number - 1:
            odd = "round"
        if odd:
            raise InputError(f"{path}: damaged in line {number}, {odd} is '{row[odd][:40]}'")
        rows.append(row)
    return rows


def _fits(name: str, cell: str, whole: dict[str, int]) -> bool:
    """Whether a cell may stand in its column."""
    if name in whole:
        return cell.isdecimal() and len(cell) <= 10 and (name == "round") <= int(cell) <= whole[name]
    if not name.endswith("_acc"):
        return True
    try:
        return not cell or 0 <= float(cell) <= 1
    except ValueError:
        return False


def _clients(folder: Path) -> int:
    """How many clients the run has; the most that any has where run.json does not say so."""
    try:
        clients = json.loads((folder / "run.json").read_text(encoding="utf-8"))["experiment"]["clients"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        clients = None
    return min(clients, 1_000_000) if isinstance(clients, int) else 1_000_000


def _lines(columns: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return "" if value is None else repr(value) if isinstance(value, float) else str(value)

    return "".join(",".join(cell(row[c]) for c in columns) + "\n" for row in rows)


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


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
