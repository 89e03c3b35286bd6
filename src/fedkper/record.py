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
from collections.abc import Iterable
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
    "global_on_local_acc",
)
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
KEPT = 2


class Record:
    """The folder of a run, open for writing by one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoint"
        self._lock = _locked(folder)

    @staticmethod
    def create(folder: Path) -> Record:
        """A new run's folder. Raises InputError if it already holds something or has an unsafe name."""
        if (folder / "run.json").exists():
            raise InputError(
                f"--out {folder}: holds a run already; go on with --resume, or name another folder"
            )
        if folder.is_dir() and any(p.name != ".lock" for p in folder.iterdir()):
            raise InputError(f"--out {folder}: is not empty; name another folder")
        make_folder(folder)
        record = Record(folder)
        record.checkpoints.mkdir()
        record._table("rounds.csv", ROUND_COLUMNS, [])
        record._table("clients.csv", CLIENT_COLUMNS, [])
        return record

    @staticmethod
    def open(folder: Path) -> Record:
        """An existing run's folder. Raises InputError if it is none."""
        if not (folder / "run.json").is_file():
            raise InputError(f"--out {folder}: holds no run to resume (no run.json); check the path")
        return Record(folder)

    def write_json(self, name: str, values: Any) -> None:
        text = json.dumps(values, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        tree.write(self.folder / name, text.encode())

    def event(self, kind: str, **values: Any) -> None:
        with open(self.folder / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": kind, **values}, allow_nan=False) + "\n")

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
        sums = {name: tree.save(state, self.checkpoints / name) for name, state in files.items()}
        previous = self._state(round - 1) or {}
        owns = previous.get("own", {}) | {name: s for name, s in sums.items() if name.startswith("own")}
        wanted = {_own_name(client, at) for client, at in visits.items()}
        state = {
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
            except (InputError, ValueError, KeyError, TypeError) as error:
                cause = str(error) if isinstance(error, InputError) else f"{path}: damaged"
                notice = f"{cause}; went back to the checkpoint before"
                continue
            visits = {int(name[4:10]): int(name[11:17]) for name in state["own"]}
            self._cut(state["round"])
            return state["round"], shared, visits, notice
        if notice:
            raise InputError(f"{notice.partition(';')[0]}; no other checkpoint is left: start the run anew")
        self._cut(0)
        return 0, {}, {}, ""

    def own(self, client: int, round: int) -> Tree:
        """A client's personal state as it was after `round`."""
        return tree.load(self.checkpoints / _own_name(client, round))

    def curves(self) -> Curves:
        return read_curves(self.folder)

    def _state(self, round: int) -> dict[str, Any] | None:
        path = self.checkpoints / f"state-{round:06d}.json"
        return json.loads(path.read_text()) if path.is_file() else None  # type: ignore[no-any-return]

    def _clear(self, round: int, own: dict[str, str]) -> None:
        """Removes what neither of the two newest states needs."""
        keep = {f"{kind}-{round - back:06d}" for kind in ("state", "shared") for back in range(KEPT)}
        previous = self._state(round - 1) or {"own": {}}
        for path in self.checkpoints.iterdir():
            if path.stem not in keep and path.name not in own and path.name not in previous["own"]:
                path.unlink()

    def _cut(self, round: int) -> None:
        """Drops the lines of rounds after `round`, a half-written one too."""
        for name, columns in (("rounds.csv", ROUND_COLUMNS), ("clients.csv", CLIENT_COLUMNS)):
            kept = [row for row in _rows(self.folder / name) if int(row["round"]) <= round]
            self._table(name, columns, kept)
        for path in self.checkpoints.glob(".*.tmp"):
            path.unlink()

    def _table(self, name: str, columns: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> None:
        tree.write(self.folder / name, (",".join(columns) + "\n" + _lines(columns, rows)).encode())

    def _add(self, name: str, columns: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> None:
        with open(self.folder / name, "a", encoding="utf-8", newline="") as file:
            file.write(_lines(columns, rows))
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._lock.close()


def unique(parent: Path, name: str) -> Path:
    """A folder for a run that nobody else has: the name, the time, and a number if need be. It is made."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").strip("-.")[:90]
    for number in range(1, 1000):
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            make_folder(parent)
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise InputError(f"{parent / stem}: a thousand runs of that name exist; name another --out")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A run's file. Raises InputError that names it if it is missing or damaged."""
    path = folder / name
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); is {folder} the folder of a run?"
        ) from error
    except ValueError as error:
        raise InputError(f"{path}: damaged, not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: damaged, no JSON object")
    return values


def read_curves(folder: Path) -> Curves:
    """The raw curves of a run, from its two tables. Raises InputError if one is missing or damaged."""
    rounds, clients = _rows(folder / "rounds.csv"), _rows(folder / "clients.csv")
    count = len({row["client"] for row in clients})
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
    """Complete lines of a table; a last line that a kill cut short is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); is this the folder of a run?"
        ) from error
    whole = text[: text.rfind("\n") + 1]
    return [row for row in csv.DictReader(io.StringIO(whole)) if None not in row.values() and None not in row]


def _lines(columns: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return "" if value is None else repr(value) if isinstance(value, float) else str(value)

    return "".join(",".join(cell(row[c]) for c in columns) + "\n" for row in rows)


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


def _own_name(client: int, round: int) -> str:
    return f"own-{client:06d}-{round:06d}.safetensors"


def make_folder(folder: Path) -> None:
    """Makes a folder; every part of the path that does not exist yet must be a name that any system takes."""
    for part in (folder, *folder.parents):
        if part.exists():
            break
        name = part.name
        if (
            not re.fullmatch(r"[A-Za-z0-9._-]{1,99}", name)
            or _RESERVED.fullmatch(name)
            or name.strip(".") != name
        ):
            raise InputError(
                f"--out {folder}: '{name}' is no safe folder name; use up to 99 letters, digits, '.', '-' and "
                "'_', no dot at either end, and no reserved word such as CON"
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
        raise InputError(f"--out {folder}: cannot be written ({error.strerror})") from error
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
