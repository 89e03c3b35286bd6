"""The files of a run's folder and how they are read; record.py writes them.

run.json         what was run: the experiment, versions, hashes of data and partition, device
partition.json   who holds which samples
rounds.csv       a line a round, written when the round ends
clients.csv      a line per client and round
confusion.csv    who was taken for what: counts by true class and answer, zeros left out
calibration.csv  how sure the global model was, and how often right
events.jsonl     what went otherwise than usual, with round and reason: updates that were rejected or did not
                 come, a global model kept, fall-backs, resumptions, a damaged checkpoint
checkpoint/      the last two rounds' state: safetensors and JSON, each replaced atomically
summary.json     the columns of the paper's Table 1
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from fedkper.errors import InputError
from fedkper.metrics import SCORES, Curves
from fedkper.scores import BINS, Bin, Counts

ROUND_COLUMNS = (
    "round",
    "global_acc",
    "global_bwt",
    "local_acc",
    "local_acc_over_samples",
    "worst_client_acc",
    "global_balanced_acc",
    "global_f1",
    "global_auc",
    "global_ece",
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
    "local_auc",
    "untuned_acc",
    "global_on_local_acc",
    "global_on_local_auc",
)
CONFUSION_COLUMNS = ("round", "model", "client", "true", "predicted", "count")
CALIBRATION_COLUMNS = ("round", "bin", "count", "confidence", "accuracy")
TABLES = {
    "rounds.csv": ROUND_COLUMNS,
    "clients.csv": CLIENT_COLUMNS,
    "confusion.csv": CONFUSION_COLUMNS,
    "calibration.csv": CALIBRATION_COLUMNS,
}
MODELS = ("global", "local", "global_on_local")
# The largest number in each column of whole numbers, and the columns that are read.
_WHOLE = {"round": 1_000_000, "sampled": 1, "test_samples": 10**9}
_WHOLE |= {"true": 10**6, "predicted": 10**6, "count": 10**9, "bin": BINS - 1}
_SHARES = ("_acc", "_auc", "_f1", "_ece", "confidence", "accuracy")
_NEEDED = {
    "rounds.csv": {"round", "global_acc"},
    "clients.csv": {"round", "client", "sampled", "test_samples", "local_acc", "global_on_local_acc"},
    "confusion.csv": set(CONFUSION_COLUMNS),
    "calibration.csv": set(CALIBRATION_COLUMNS),
}


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
        if not (
            isinstance(event, dict)
            and isinstance(event.get("event"), str)
            and isinstance(event.get("round", 0), int)
        ):
            raise InputError(f"{path}: damaged in line {number}; correct or remove that line")
        events.append(event)
    return events


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
    rounds = read_rows(folder / "rounds.csv")
    clients = read_rows(folder / "clients.csv")
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
    scores = {name: [_number(row.get(name, "")) for row in rounds] for name in SCORES}
    return Curves([_number(r["global_acc"]) for r in rounds], sampled, on_local, local, sizes, scores)


def read_confusion(folder: Path) -> dict[tuple[int, str, int | None], Counts]:
    """By round, one of MODELS and client (None for G): samples by true class and answer [C, C + 1].

    Empty for a run of a version that did not record it. Raises InputError if the table is damaged.
    """
    if not os.path.exists(folder / "confusion.csv"):
        return {}
    data = read_json(folder, "run.json").get("data")
    names = data.get("classes") if isinstance(data, dict) else None
    classes = len(names) if isinstance(names, list) else 0
    found: dict[tuple[int, str, int | None], Counts] = {}
    for row in read_rows(folder / "confusion.csv"):
        client = int(row["client"]) if row["client"] else None
        said = int(row["predicted"]) if row["predicted"] else classes
        if int(row["true"]) >= classes or said > classes:
            raise InputError(f"{folder / 'confusion.csv'}: damaged, run.json names {classes} classes only")
        key = int(row["round"]), row["model"], client
        table = found.setdefault(key, np.zeros((classes, classes + 1), np.int64))
        table[int(row["true"]), said] = int(row["count"])
    return found


def read_calibration(folder: Path) -> dict[int, list[Bin]]:
    """By round, the bins of the global model's highest probability on G; empty where not recorded."""
    if not os.path.exists(folder / "calibration.csv"):
        return {}
    found: dict[int, list[Bin]] = {}
    for row in read_rows(folder / "calibration.csv"):
        filled = Bin(int(row["bin"]), int(row["count"]), float(row["confidence"]), float(row["accuracy"]))
        found.setdefault(int(row["round"]), []).append(filled)
    return found


def read_rows(path: Path) -> list[dict[str, str]]:
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
        blank = {"client", "predicted"} if path.name == "confusion.csv" else set()
        odd = next(
            (n for n, cell in row.items() if not (n in blank and not cell) and not _fits(n, cell, whole)), ""
        )
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
    if name == "model":
        return cell in MODELS
    try:
        value = float(cell or 0)
    except ValueError:
        return False
    return 0 <= value <= 1 if name.endswith(_SHARES) else math.isfinite(value)


def _clients(folder: Path) -> int:
    """How many clients the run has; the most that any has where run.json does not say so."""
    try:
        clients = json.loads((folder / "run.json").read_text(encoding="utf-8"))["experiment"]["clients"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        clients = None
    return min(clients, 1_000_000) if isinstance(clients, int) else 1_000_000


def _number(cell: str) -> float | None:
    return float(cell) if cell else None
