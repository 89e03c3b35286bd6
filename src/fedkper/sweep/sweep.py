"""Many experiments: a folder a cell, run side by side; stopped anywhere, they go on where they were."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol

from fedkper import __version__, data, folders, tree
from fedkper import run as single
from fedkper.data.dataset import Dataset
from fedkper.errors import InputError, RunError
from fedkper.execute import cores
from fedkper.experiment import Experiment, from_json
from fedkper.record import refuse_used
from fedkper.run import Execution
from fedkper.runfiles import read_json
from fedkper.sweep.cells import ENDS, Cell, Event, OnEvent, Request, Riding, cells, finished, setting

__all__ = ["Cell", "Event", "OnEvent", "Outcome", "cells", "check", "finished", "remembered", "run"]
REQUEST = "sweep.json"


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    cell: Cell
    state: Literal["finished", "failed"]
    reason: str = ""
    """why it failed, in one sentence"""


class Remembered(NamedTuple):
    """What a folder's sweep.json says that was asked for; nothing where there is none."""

    cells: tuple[Cell, ...] = ()
    data: Path | None = None
    """folder of the data files"""
    partition_file: Path | None = None


class Pool(Protocol):
    """Where cells are carried out: at most `size` handfuls of them at a time."""

    size: int

    def send(self, riding: Riding) -> None:
        """Hands cells to a worker that has nothing to do, which carries them out together."""

    def wait(self) -> list[Event]:
        """What happened; waits for it, at most about a second. Every cell ends with one of ENDS."""

    def stop(self) -> None:
        """Ends the cells that run, each at its next checkpoint if it can be told."""

    def close(self) -> None:
        """Ends the workers."""


def run(
    cells: Sequence[Cell],
    folder: Path,
    execution: Execution,
    jobs: int | None = None,
    on_event: OnEvent = lambda event: None,
    stored: Path | None = None,
    ray: str = "",
) -> list[Outcome]:
    """Runs those of the cells that are not finished; returns how each ended, in the order of `cells`.

    A cell is a run in `folder`/`place`, started, resumed or left alone as it is found. `jobs` run at a time:
    one a core if not given, one on an accelerator. Where there are lanes, cells that differ in their seed
    only run together. `stored`: a partition file for all of them. `ray`: "local"
    or the address of a Ray cluster to run on instead of processes of this machine.

    A cell whose worker dies or lacks memory is tried again alone when the others are done, then counts as
    failed. Ctrl-C ends the cells in progress at their next checkpoint; a second one ends them at once.
    Raises InputError, before anything is trained, for whatever is wrong with any cell, and RunError while
    another process runs a sweep in the folder.
    """
    if not cells:
        return []
    execution = dataclasses.replace(execution, workers=1)  # better than several workers in one cell
    for text in check(cells, folder, execution, stored):
        on_event(Event("notice", text=text))
    with _cluster(ray, jobs):
        folders.make(folder)
        request = Request(folder, execution, stored, data.folder(execution.data))
        with closing(_locked(folder)):
            _remember(cells, request)
            outcomes = _finished(cells, folder, on_event)
            for alone in (False, True):
                left = [cell for cell in cells if cell not in outcomes]
                queue = deque(_together(left, execution) if not alone else [(cell,) for cell in left])
                if queue:
                    pool = _pool(request, 1 if alone else jobs, len(queue), ray)
                    outcomes |= _drain(pool, queue, on_event, alone)
    return [outcomes[cell] for cell in cells]


def _cluster(ray: str, jobs: int | None) -> AbstractContextManager[None]:
    if not ray:
        return nullcontext()
    from fedkper.sweep.ray_pool import connected

    return connected(ray, jobs)


def _locked(folder: Path) -> IO[str]:
    try:
        return folders.locked(folder)
    except InputError:
        raise
    except RunError:
        raise RunError(f"{folder}: another sweep runs in it; wait for it or stop it") from None


def _finished(cells: Sequence[Cell], folder: Path, on_event: OnEvent) -> dict[Cell, Outcome]:
    """The cells of which nothing is left to do; more rounds than a finished run has are something to do."""
    outcomes = {}
    for cell in cells:
        path, rounds = folder / cell.place, cell.experiment.rounds
        if finished(path) and single.stored_experiment(path).rounds == rounds:
            outcomes[cell] = Outcome(cell, "finished")
            on_event(Event("skipped", cell, rounds))
    return outcomes


def _pool(request: Request, jobs: int | None, count: int, ray: str) -> Pool:
    """Processes of this machine or a Ray cluster, no more of them than cells."""
    if ray:
        from fedkper.sweep.ray_pool import Cluster

        return Cluster(ray, request, jobs, count)
    from fedkper.sweep.pool import Processes

    size = jobs or (cores() if request.execution.device == "cpu" else 1)
    return Processes(request, min(size, count))


def _together(cells: Sequence[Cell], execution: Execution) -> list[Riding]:
    """The cells by what they have in common but the seed, where there are lanes to fill; else one by one."""
    if execution.device == "cpu" and (execution.lanes or 1) == 1:
        return [(cell,) for cell in cells]
    groups: dict[Experiment, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(setting(cell.experiment), []).append(cell)
    return [tuple(group) for group in groups.values()]


def _drain(pool: Pool, queue: deque[Riding], on_event: OnEvent, alone: bool) -> dict[Cell, Outcome]:
    """Runs the cells of a queue. Returns how they ended, without those to be tried `alone` later."""
    running: dict[Cell, Riding] = {}
    outcomes = {}
    try:
        on_event(Event("jobs", done=pool.size))
        while queue or running:
            while queue and len(set(running.values())) < pool.size:
                riding = queue.popleft()
                pool.send(riding)
                running |= dict.fromkeys(riding, riding)
                for cell in riding:
                    on_event(Event("sent", cell))
            for event in pool.wait():
                if event.kind == "again" and alone:
                    event = event._replace(kind="failed")
                if event.cell and event.kind in ENDS:
                    del running[event.cell]
                if event.cell and event.kind == "finished":
                    outcomes[event.cell] = Outcome(event.cell, "finished")
                if event.cell and event.kind == "failed":
                    outcomes[event.cell] = Outcome(event.cell, "failed", event.text)
                on_event(event)
    except KeyboardInterrupt:
        on_event(Event("stopping"))
        pool.stop()
        raise
    finally:
        pool.close()
    return outcomes


# --- before anything is trained ---------------------------------------------------------------------------


def check(cells: Sequence[Cell], folder: Path, execution: Execution, stored: Path | None = None) -> list[str]:
    """Raises InputError with all that is wrong with any cell, unless each can be started or gone on with.

    Returns what a person should know about the data. Each data set is loaded once. Of cells that differ in
    their seed only, the first is tried in full, with partition and model; the others' folders are looked at.
    """
    if os.path.isfile(folder / "run.json"):
        raise InputError(f"--out {folder}: is the folder of a run; name another one for the sweep")
    single.check_device(execution)
    wrong: dict[str, list[str]] = {}
    notices: dict[str, None] = {}
    groups: dict[tuple[str, int, str], list[Cell]] = {}
    for cell in cells:
        e = cell.experiment
        with _noted(wrong, [cell]):
            e.checked()
            groups.setdefault((e.dataset, e.size, e.precision), []).append(cell)
    for group in groups.values():
        with _noted(wrong, group):
            dataset = single.load(group[0].experiment, execution)
            notices |= dict.fromkeys(dataset.notices)
            tried: set[Experiment] = set()
            for cell in group:
                with _noted(wrong, [cell]):
                    _check(cell, folder / cell.place, dataset, stored, tried)
    if wrong:
        raise InputError(_sentences(wrong, len(cells)))
    return list(notices)


def _check(cell: Cell, folder: Path, dataset: Dataset, stored: Path | None, tried: set[Experiment]) -> None:
    """One cell; `tried`: the settings that can be trained."""
    e = cell.experiment
    if os.path.isfile(folder / "run.json"):
        before = single.stored_experiment(folder)
        if before.rounds > e.rounds:
            raise InputError(
                f"--rounds {e.rounds}: the run in {folder} is of {before.rounds}; name another --out"
            )
        if before == e and setting(e) in tried and finished(folder):
            return
    elif setting(e) in tried:
        refuse_used(folder)
        return
    single.check(e, folder, dataset, stored)
    tried.add(setting(e))


@contextmanager
def _noted(wrong: dict[str, list[str]], cells: Sequence[Cell]) -> Iterator[None]:
    """Goes on after an InputError, with its sentence and the cells that it is about in `wrong`."""
    try:
        yield
    except InputError as error:
        wrong.setdefault(str(error), []).extend(cell.place for cell in cells)


def _sentences(wrong: dict[str, list[str]], count: int) -> str:
    """A line for each fault. A single one that all cells share needs no list of them."""
    if len(wrong) == 1 and sum(map(len, wrong.values())) == count:
        return next(iter(wrong))
    lines = []
    for text, places in wrong.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        lines.append(f"{text} (cell {places[0]}{more})")
    return "\n".join(lines)


def keeping(cells: Sequence[Cell], folder: Path) -> list[Cell]:
    """The cells, with the places that they have in the sweep of the folder: names depend on what varies."""
    known = {_first(cell).experiment: cell.place for cell in remembered(folder).cells}
    return [Cell(cell.experiment, known.get(_first(cell).experiment, cell.place)) for cell in cells]


def _first(cell: Cell) -> Cell:
    """The cell without its number of rounds, which may grow."""
    return dataclasses.replace(cell, experiment=dataclasses.replace(cell.experiment, rounds=1))


def _remember(cells: Sequence[Cell], request: Request) -> None:
    """Writes sweep.json, the request, which `--grid` reads. More cells than before may be asked for.

    Raises InputError where the folder holds a sweep with other cells: they would be lost from sight.
    """
    folder, execution, stored, _ = request
    asked, known = (set(map(_first, them)) for them in (cells, remembered(folder).cells))
    other = sorted(cell.place for cell in known - asked)
    if other:
        raise InputError(
            f"--out {folder}: holds a sweep with other cells ({len(other)} of {len(known)}, such as "
            f"{other[0]}); ask for these too, or name another --out"
        )
    rows = [cell.experiment.to_json() for cell in cells]
    same = {name: value for name, value in rows[0].items() if all(row[name] == value for row in rows)}
    content = {
        "experiment": same,
        "cells": [{name: value for name, value in row.items() if name not in same} for row in rows],
        "folders": [cell.place for cell in cells],
        "data": None if execution.data is None else str(execution.data.absolute()),
        "partition_file": None if stored is None else str(stored.absolute()),
        "fedkper": __version__,
    }
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        tree.write(folder / REQUEST, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise RunError(f"{folder / REQUEST}: cannot be written ({error.strerror})") from error


def remembered(folder: Path) -> Remembered:
    """The sweep in a folder. Raises InputError where sweep.json is damaged."""
    if not os.path.isfile(folder / REQUEST):
        return Remembered()
    values, where = read_json(folder, REQUEST), str(folder / REQUEST)
    same, rows, places = values.get("experiment"), values.get("cells") or [], values.get("folders") or []
    if not (isinstance(same, dict) and _all(dict, rows) and _all(str, places) and len(rows) == len(places)):
        raise InputError(f"{where}: damaged, it does not say what was asked for")
    paths = (values.get(name) for name in ("data", "partition_file"))
    data_folder, stored = (Path(path) if isinstance(path, str) else None for path in paths)
    found = (Cell(from_json(same | row, where), place) for row, place in zip(rows, places, strict=True))
    return Remembered(tuple(found), data_folder, stored)


def _all(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def by_reason(failed: Sequence[Outcome]) -> dict[str, list[str]]:
    """The places of cells that failed, by the reason."""
    reasons: dict[str, list[str]] = {}
    for outcome in failed:
        reasons.setdefault(outcome.reason, []).append(outcome.cell.place)
    return reasons
