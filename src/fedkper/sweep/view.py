"""What a person sees of a sweep that runs: cells, rounds and an honest estimate of the time left."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn

from fedkper import tables
from fedkper.errors import RunError
from fedkper.sweep.cells import Cell, Event, setting
from fedkper.sweep.sweep import Outcome

# Seconds between two lines about the whole in a log file.
PAUSE = 60


class TimeLeft:
    """Seconds until the last cell ends, from the rounds measured in this sitting.

    A round of a cell takes what rounds of its setting took; where none was measured, what those of its method
    took; else what the average round took. Rounds done in an earlier sitting count as done, not as speed.
    The cells that wait go to whichever worker is free first, as they will.
    """

    def __init__(self, cells: Sequence[Cell], clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.jobs = 1
        self.left = {cell: cell.experiment.rounds for cell in cells}
        self.running: dict[Cell, float] = {}
        """when each was given to a worker"""
        self.begun: dict[Cell, tuple[float, int]] = {}
        """when each was loaded, and the rounds done by then"""
        self.measured: dict[Cell, tuple[float, int]] = {}
        """seconds and rounds of this sitting; of a finished cell with the seconds that loading took"""

    def add(self, event: Event) -> None:
        cell, now = event.cell, self.clock()
        if event.kind == "jobs":
            self.jobs = event.done
        if cell is None:
            return
        if event.kind == "sent":
            self.running[cell] = now
        elif event.kind in ("begun", "round"):
            self.left[cell] = cell.experiment.rounds - event.done
            since, before = self.begun.setdefault(cell, (now, event.done))
            if event.done > before:
                self.measured[cell] = now - since, event.done - before
        elif event.kind == "again":
            self.running.pop(cell)
            self.begun.pop(cell, None)
        else:
            since = self.running.pop(cell, now)
            if event.kind == "finished" and cell in self.measured:
                self.measured[cell] = now - since, self.measured[cell][1]
            self.left[cell] = 0

    def seconds(self) -> float | None:
        """None until a round has been measured."""
        paces = self._paces()
        if not paces:
            return None
        average = _pace(list(self.measured.values()))

        def cost(cell: Cell) -> float:
            e = cell.experiment
            return self.left[cell] * paces.get(setting(e), paces.get(e.method, average))

        ends = [0.0] * max(0, self.jobs - len(self.running)) + [cost(cell) for cell in self.running]
        heapq.heapify(ends)
        for cell, rounds in self.left.items():
            if rounds and cell not in self.running:
                heapq.heapreplace(ends, ends[0] + cost(cell))
        return max(ends)

    def unmeasured(self) -> list[str]:
        """Methods with rounds left of which none was measured, so that their cost is a guess."""
        known = {cell.experiment.method for cell in self.measured}
        return list(
            dict.fromkeys(
                c.experiment.method for c, n in self.left.items() if n and c.experiment.method not in known
            )
        )

    def _paces(self) -> dict[object, float]:
        """Seconds a round by setting and by method."""
        groups: dict[object, list[tuple[float, int]]] = {}
        for cell, pair in self.measured.items():
            for key in (setting(cell.experiment), cell.experiment.method):
                groups.setdefault(key, []).append(pair)
        return {key: _pace(pairs) for key, pairs in groups.items()}


def _pace(pairs: list[tuple[float, int]]) -> float:
    return sum(seconds for seconds, _ in pairs) / sum(rounds for _, rounds in pairs)


def duration(seconds: float) -> str:
    """As exact as an estimate is."""
    minutes = round(seconds / 60)
    if seconds < 55:
        return f"{max(5, round(seconds / 5) * 5)} s"
    if minutes < 60:
        return f"{max(1, minutes)} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 60 * 24 else f"{seconds / 86400:.1f} days"


class View:
    """A bar of all rounds and a line for each cell in progress; in a log file lines at the ends of cells."""

    def __init__(self, cells: Sequence[Cell], again: str) -> None:
        self.cells = cells
        self.again = again
        """the command that goes on, told if the sweep is stopped or fails"""
        self.time = TimeLeft(cells)
        self.begun = False
        """whether something may have been trained"""
        self.ended = 0
        self.last = time.monotonic()
        self.tasks: dict[Cell, TaskID] = {}
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=tables.err,
            disable=not tables.err.is_terminal,
        )
        self.total = self.bar.add_task("checking", total=sum(c.experiment.rounds for c in cells), state="")

    def __enter__(self) -> View:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        stopped = isinstance(error, (KeyboardInterrupt, RunError)) and getattr(error, "exit_code", 1) == 1
        if self.begun and stopped:
            tables.go_on(self.again)

    def on_event(self, event: Event) -> None:
        self.time.add(event)
        self.ended += event.kind in ("skipped", "finished", "failed")
        if event.kind == "notice":
            tables.notice(event.text)
        elif event.kind == "jobs":
            self._begin()
        elif event.kind == "stopping":
            tables.line(
                "stopping; a second Ctrl-C does not wait for the rounds in progress", "yellow", tables.err
            )
        if event.cell is not None:
            self._draw(event, event.cell)
            self._log(event, event.cell)

    def _begin(self) -> None:
        if not self.begun and self.ended:
            tables.notice(f"{self.ended} of {len(self.cells)} cells are finished already")
        self.begun = True

    def _draw(self, event: Event, cell: Cell) -> None:
        if event.kind in ("begun", "round"):
            if cell not in self.tasks:
                self.tasks[cell] = self.bar.add_task(
                    _middle(cell.place), total=cell.experiment.rounds, state=""
                )
            state = tables.state(event.line) if event.line else ""
            self.bar.update(self.tasks[cell], completed=event.done, state=state)
        elif event.kind in ("finished", "failed", "again") and cell in self.tasks:
            self.bar.remove_task(self.tasks.pop(cell))
        done = sum(c.experiment.rounds - self.time.left[c] for c in self.cells)
        cells = f"{self.ended} of {len(self.cells)} cells, rounds"
        left = self.left() if any(self.time.left.values()) else ""
        self.bar.update(self.total, description=cells, completed=done, state=left)

    def _log(self, event: Event, cell: Cell) -> None:
        """What stays: failures everywhere; in a log file how far it is, too."""
        now, text = time.monotonic(), ""
        if event.kind == "again":
            tables.notice(f"{cell.place}: {event.text}; it is tried again alone at the end")
        elif event.kind == "failed":
            text = f"{cell.place} failed: {event.text}"
        elif event.kind == "finished" and not tables.err.is_terminal:
            text = f"{cell.place} finished"
        elif event.kind == "round" and not tables.err.is_terminal and now > self.last + PAUSE:
            text = "going on"
        if text:
            self.last = now
            tables.line(f"{text}; {self._far()}", "red" if event.kind == "failed" else "", tables.err)

    def _far(self) -> str:
        rounds = sum(self.time.left.values())
        left = f", {rounds:,} round{'s' if rounds > 1 else ''} left, {self.left()}" if rounds else ""
        return f"{self.ended} of {len(self.cells)} cells{left}"

    def left(self) -> str:
        """The time left in words."""
        seconds = self.time.seconds()
        if seconds is None:
            return "time left not known yet"
        guessed = self.time.unmeasured()
        more = f" and {len(guessed) - 1} more" if len(guessed) > 1 else ""
        doubt = f", {guessed[0]}{more} not measured yet" if guessed else ""
        return f"about {duration(seconds)} left{doubt}"


def _middle(place: str, width: int = 32) -> str:
    """A name as it fits into a line: begin and end tell cells apart."""
    return place if len(place) <= width else f"{place[: width // 2]}…{place[len(place) - width // 2 + 1 :]}"


def tell_rejected(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Tells, of every finished cell, which updates were left out."""
    for outcome in outcomes:
        if outcome.state == "finished":
            tables.rejected(folder / outcome.cell.place)
