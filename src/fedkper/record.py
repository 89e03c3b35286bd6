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
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fedkper import tree
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
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
KEPT = 2
# What a start that was cut short before run.json leaves behind.
_BEGUN = {".lock", "checkpoint", "rounds.csv", "clients.csv", "partition.json"}


class Record:
    """The folder of a run, open for writing by one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None
        self.checkpoints = folder / "checkpoint"
        self._lock = _locked(folder)

    @staticmethod
    def create(folder: Path) -> Record:
        """A new run's folder. Raises InputError if it already holds something or has an unsafe name."""
        _refuse_used(folder)
        make_folder(folder)
        record = Record(folder)
        try:
            _refuse_used(folder)  # again: another process may have finished a run here meanwhile
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
            tree.write(self.folder / name, text.encode())

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

    def save(self, round: int, shared: Tree, own: dict[int, Tree], visits: dict[int, int]) -> None:
        """The state after `round`; the JSON file comes last and makes it valid. The one before is kept.

        `own`: the state of this round's clients; `visits`: for every client seen, the round its state is of.
        """
        files = {f"shared-{round:06d}.safetensors": shared}
        files |= {_own_name(client, round): state for client, state in own.items() if state}
        with self._writing(self.checkpoints):
            sums = {name: tree.save(state, self.checkpoints / name) for name, state in files.items()}
            previous = self._state(round - 1) or {}
            owns = previous.get("own", {}) | {name: s for name, s in sums.items() if name.startswith("own")}
            wanted = {_own_name(client, at) for client, at in visits.items()}
            state: dict[str, Any] = {
                "round": round,
                "shared": sums[f"shared-{round:06d}.safetensors"],
                "own": {name: s for name, s in owns.items() if name in wanted},
            }
            tree.write(self.checkpoints / f"state-{round:06d}.json", json.dumps(state).encode())
            self._clear(round, state["own"])

    def restore(self) -> tuple[int, Tree, dict[int, int], str]:
        """The newest valid state: rounds done, shared, visits, and a notice if the newest was damaged.

        Lines of rounds after it are dropped. Raises InputError if no state is valid.
        """
        notice = ""
        for path in sorted(self.checkpoints.glob("state-*.json"), reverse=True):
            try:
                state = json.loads(path.read_text())
                shared = tree.load(
                    self.checkpoints / f"shared-{state['round']:06d}.safetensors", state["shared"]
                )
                for name, checksum in state["own"].items():
                    tree.load(self.checkpoints / name, checksum)
                visits = {int(name[4:10]): int(name[11:17]) for name in state["own"]}
            except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                cause = str(error) if isinstance(error, InputError) else f"{path}: damaged"
                notice = f"{cause}; went back to the checkpoint before"
                continue
            self._cut(state["round"])
            return state["round"], shared, visits, notice
        if notice:
            raise InputError(f"{notice.partition(';')[0]}; no other checkpoint is valid: start a new run")
        if len(_rows(self.folder / "rounds.csv")) > 1:
            raise InputError(f"{self.checkpoints}: no checkpoint is there: start a new run")
        self._cut(0)
        return 0, {}, {}, ""

    def own(self, client: int, round: int) -> Tree:
        """A client's personal state as it was after `round`."""
        return tree.load(self.checkpoints / _own_name(client, round))

    def curves(self) -> Curves:
        return read_curves(self.folder)

    def _state(self, round: int) -> dict[str, Any] | None:
        path = self.checkpoints / f"state-{round:06d}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def _clear(self, round: int, own: dict[str, str]) -> None:
        """Removes what neither of the two newest states needs."""
        keep = {f"{kind}-{round - back:06d}" for kind in ("state", "shared") for back in range(KEPT)}
        previous = self._state(round - 1) or {"own": {}}
        for path in self.checkpoints.iterdir():
            if path.stem not in keep and path.name not in own and path.name not in previous["own"]:
                path.unlink()

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


def unique(parent: Path, name: str) -> Path:
    """A folder for a run that nobody else has: the name, the time, and a number if need be. It is made."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{name[:70]}-{time.strftime('%Y%m%d-%H%M%S')}").strip("-.")
    for number in range(1, 1000):
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            make_folder(parent)
            folder.mkdir()
            return folder
        except (FileExistsError, FileNotFoundError):  # taken, or `parent` was removed meanwhile
            continue
        except OSError as error:
            raise InputError(f"{folder}: cannot be made ({error.strerror}); name an --out") from error
    raise InputError(f"{parent / stem}: a thousand runs of that name exist; name another --out")


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
    count = len({row["client"] for row in clients})
    on_local: list[list[float | None]] = [[None] * count for _ in rounds]
    sampled: list[list[int]] = [[] for _ in rounds]
    local: list[dict[int, float | None]] = [{} for _ in rounds]
    sizes: dict[int, int] = {}
    try:
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
    except (KeyError, ValueError, IndexError) as error:
        raise InputError(f"{folder}: rounds.csv or clients.csv is damaged ({error})") from error


def _rows(path: Path) -> list[dict[str, str]]:
    """Complete lines of a table; a last line that a kill cut short is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        header, *lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))) or [[]]
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); is this the folder of a run?"
        ) from error
    except csv.Error as error:
        raise InputError(f"{path}: damaged ({error})") from error
    if header[:1] != ["round"]:
        raise InputError(f"{path}: damaged, its first line does not name the columns")
    for number, line in enumerate(lines, 2):
        if len(line) != len(header) or not line[0].isdecimal() or line[0] == "0":
            raise InputError(f"{path}: damaged in line {number}")
    return [dict(zip(header, line, strict=True)) for line in lines]


def _lines(columns: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return "" if value is None else repr(value) if isinstance(value, float) else str(value)

    return "".join(",".join(cell(row[c]) for c in columns) + "\n" for row in rows)


def _number(cell: str) -> float | None:
    value = float(cell) if cell else None
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"{cell} is no accuracy")
    return value


def _own_name(client: int, round: int) -> str:
    return f"own-{client:06d}-{round:06d}.safetensors"


def _refuse_used(folder: Path) -> None:
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


def make_folder(folder: Path) -> None:
    """Makes a folder; every part of the path that does not exist yet must be a name that any system takes."""
    for part in (folder, *folder.parents):
        if os.path.exists(part):
            break
        name = part.name
        safe = re.fullmatch(r"[A-Za-z0-9._-]{1,99}", name) and name.strip(".") == name
        if not safe or _RESERVED.fullmatch(name):
            shown = name if len(name) < 120 else f"{name[:100]}..."
            raise InputError(
                f"--out: '{shown}' is no safe folder name; use up to 99 letters, digits, '.', '-' and '_', "
                "no dot at either end, and no reserved word such as CON"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be made ({error.strerror})") from error


def _locked(folder: Path) -> IO[str]:
    """Two processes must not write one run: holds a lock as long as this one lives."""
    try:
        file = open(folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115  held open on purpose
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunError(f"{folder}: another process is writing this run; wait for it or stop it") from None
    return file
