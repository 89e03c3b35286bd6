"""The cells of a sweep: what they are called, whether they are finished, and how a worker runs one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fedkper import data, folders, run
from fedkper.data.dataset import Dataset
from fedkper.errors import InputError, RunError
from fedkper.experiment import Experiment
from fedkper.run import Execution
from fedkper.runfiles import read_json, read_rows

# What every folder's name says; of the other fields it says those that differ between cells.
NAMED = ("dataset", "method", "seed")
LONGEST = 70
# Tenths of a second that a worker of a killed sweep may take to end.
PATIENCE = 150


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    experiment: Experiment
    place: str
    """name of its folder below that of the sweep"""


class Event(NamedTuple):
    """What a person may be told meanwhile."""

    kind: Literal[
        "notice", "skipped", "jobs", "sent", "begun", "round", "finished", "again", "failed", "stopping"
    ]
    """notice: `text` is to be read; skipped: finished before; jobs: `done` cells run at a time; sent: to a
    worker; begun: loaded, with `done` rounds done; round: `done` rounds are safe on the disk; again: the
    worker died, lacked memory or failed with several cells, and the cell is tried again alone; stopping:
    Ctrl-C, the rounds in progress end"""
    cell: Cell | None = None
    done: int = 0
    text: str = ""
    line: dict[str, Any] | None = None
    """round: the line of rounds.csv, where it is known"""


ENDS = ("finished", "again", "failed")
# Cells that a worker carries out together: one, or several that differ in their seed only.
Riding = tuple[Cell, ...]
OnEvent = Callable[[Event], None]


class Request(NamedTuple):
    """What all cells of a sweep share, wherever they run."""

    folder: Path
    execution: Execution
    stored: Path | None
    """a partition file for all of them"""
    data: Path
    """folder of the data files; a worker need not have the environment of the sweep"""


def cells(experiments: Sequence[Experiment]) -> list[Cell]:
    """A cell for each distinct experiment, in their order, with unique names of folders that say what varies.

    A name depends on what varies at all and not on the order: with further methods, data sets or seeds the
    others keep theirs. Names have letters, digits, '.', '-' and '_', fewer than 100, and differ in more than
    upper and lower case.
    """
    distinct = list(dict.fromkeys(experiments))
    varying = [
        f.name
        for f in dataclasses.fields(Experiment)
        if f.name not in NAMED and len({getattr(e, f.name) for e in distinct}) > 1
    ]
    names = {setting(e): _name(e, varying) for e in distinct}
    taken = Counter(name.lower() for name in names.values())
    for e, name in names.items():
        if len(name) > LONGEST or taken[name.lower()] > 1:
            values = json.dumps([getattr(e, field) for field in ("dataset", "method", *varying)])
            digest = hashlib.sha256(values.encode()).hexdigest()[:10]
            names[e] = f"{name[: LONGEST - 10].rstrip('._-')}-{digest}"
    return [Cell(e, f"{names[setting(e)]}_seed{e.seed}") for e in distinct]


def setting(experiment: Experiment) -> Experiment:
    """What runs that differ in their seed only have in common."""
    return dataclasses.replace(experiment, seed=0)


def _name(e: Experiment, varying: Sequence[str]) -> str:
    """A setting as a folder's name: data set, method, then what else varies; its seed is not in it.

    The first part has no dot: 'con.x' is no name on some systems.
    """
    parts = [_plain(Path(e.dataset).stem).replace(".", "-") or "data", short(e.method)]
    for field in varying:
        value = getattr(e, field)
        if isinstance(value, float):
            parts.append(
                field + (f"{value:g}" if float(f"{value:g}") == value else repr(value)).replace("+", "")
            )
        elif isinstance(value, int):
            parts.append(f"{field}{value}")
        else:
            parts.append(f"{field}-{short(value) or 'none'}")
    return "_".join(parts)


def short(text: str) -> str:
    """A method, or another text, as part of a folder's name: of FILE.py:CLASS the class."""
    return _plain(Path(text.partition(".py:")[2] or text).name)


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")


def finished(folder: Path) -> bool:
    """Whether a run's folder holds all its rounds and their summary; it is read only."""
    try:
        rounds = run.stored_experiment(folder).rounds
        counts = read_json(folder, "summary.json").get("counts")
        there = len(read_rows(folder / "rounds.csv"))
    except InputError:
        return False
    return isinstance(counts, dict) and counts.get("rounds") == rounds == there


def work(riding: Riding, request: Request, tell: OnEvent) -> list[Event]:
    """Starts cells or goes on with them, in this process. Returns for each the event that ends it, of ENDS.

    Whatever `tell` raises that is no Exception stops the runs at a checkpoint and gets out of here.
    """
    try:
        for cell in riding:
            _wait_for_the_dead(request.folder / cell.place)
        e = riding[0].experiment
        dataset = _dataset(e.dataset, e.size, request.data)
        requests = [_request(cell, request, tell) for cell in riding]
        run.together(request.execution, request.stored, dataset, requests)
    except Exception as error:  # a user's own method or model may raise anything; the other cells go on
        alone = len(riding) > 1 or _lacks_memory(error)
        return [Event("again" if alone else "failed", cell, text=_told(error)) for cell in riding]
    return [Event("finished", cell, cell.experiment.rounds) for cell in riding]


def _request(cell: Cell, request: Request, tell: OnEvent) -> run.Request:
    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            tell(Event("notice", text=f"{cell.place}: {event['reason']}"))

    watch = run.Watch(
        begun=lambda experiment, dataset, done: tell(Event("begun", cell, done)),
        on_round=lambda round, line: tell(Event("round", cell, round, line=line)),
        on_event=on_event,
    )
    return run.Request(cell.experiment, request.folder / cell.place, watch)


@lru_cache(maxsize=1)
def _dataset(name: str, size: int, folder: Path) -> Dataset:
    """The data of the last cell, which the next one of this worker mostly shares."""
    return data.load(name, size, folder)


def _wait_for_the_dead(folder: Path) -> None:
    """A worker ends a moment after the sweep that was killed; until then it holds the run's lock."""
    for _ in range(PATIENCE if os.path.isdir(folder) else 0):
        try:
            folders.locked(folder).close()
            return
        except InputError:
            raise
        except RunError:
            time.sleep(0.1)


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether more memory would have helped; PyTorch says so in words only."""
    if error is None:
        return False
    words = "can't allocate memory" in str(error)
    return words or isinstance(error, MemoryError | torch.OutOfMemoryError) or _lacks_memory(error.__cause__)


def _told(error: Exception) -> str:
    if isinstance(error, RunError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
