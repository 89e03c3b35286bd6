"""Cells in processes of this machine, which live over many cells and load the data themselves."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from fedkper.errors import RunError
from fedkper.execute import settle
from fedkper.pool import importable_main, interrupts_later
from fedkper.sweep.cells import ENDS, Event, Request, Riding, work


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


class Processes:
    """At most `size` worker processes, started when there is a cell for them. See `sweep.Pool`."""

    def __init__(self, request: Request, size: int) -> None:
        self.request = request
        self.size = size
        # Forked from a process that has done nothing but load the libraries: they are loaded once, and the
        # workers share their memory. Elsewhere than on Linux some libraries do not survive a fork.
        self.context: Any = mp.get_context("forkserver" if sys.platform == "linux" else "spawn")
        self.context.set_forkserver_preload(["fedkper.sweep.cells"])
        self.idle: list[_Worker] = []
        self.busy: dict[Connection, tuple[_Worker, Riding]] = {}

    def send(self, riding: Riding) -> None:
        while self.idle:
            worker = self.idle.pop()
            if self._sent(worker, riding):
                return
            self._end(worker)  # it was killed while it had nothing to do
        if not self._sent(self._started(), riding):
            raise RunError("a worker process ended before it had anything to do")

    def wait(self) -> list[Event]:
        events: list[Event] = []
        for pipe in wait(list(self.busy), timeout=1):
            worker, riding = self.busy[pipe]  # type: ignore[index]
            try:
                told: list[Event] = worker.pipe.recv()
            except (EOFError, OSError):
                self._end(worker)
                text = f"its process ended with exit code {worker.process.exitcode} (out of memory?)"
                told = [Event("again", cell, text=text) for cell in riding]
            else:
                if told[0].kind in ENDS:
                    self.idle.append(worker)
            if told[0].kind in ENDS:
                del self.busy[worker.pipe]
            events += told
        return events

    def stop(self) -> None:
        for worker, _ in self.busy.values():
            try:
                worker.pipe.send(None)
            except OSError:
                continue
        for worker, _ in self.busy.values():
            worker.process.join()

    def close(self) -> None:
        for worker in [*self.idle, *(worker for worker, _ in self.busy.values())]:
            self._end(worker)
        self.idle, self.busy = [], {}

    def _sent(self, worker: _Worker, riding: Riding) -> bool:
        try:
            worker.pipe.send(riding)
        except OSError:
            return False
        self.busy[worker.pipe] = worker, riding
        return True

    def _started(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, self.request), daemon=True)
        try:
            with importable_main(), interrupts_later():
                process.start()
        except OSError as error:
            ours.close()
            raise RunError(f"a worker cannot be started ({error}); try fewer --jobs") from error
        finally:
            theirs.close()
        return _Worker(process, ours)

    def _end(self, worker: _Worker) -> None:
        worker.pipe.close()
        worker.process.join(0.5)
        if worker.process.is_alive():
            worker.process.terminate()
        worker.process.join()


def _serve(pipe: Connection, request: Request) -> None:
    """A worker process, until the pipe closes or the sweep's process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    settle()

    def tell(event: Event) -> None:
        pipe.send([event])
        if pipe.poll():  # nothing but the request to stop can come while a cell runs
            raise KeyboardInterrupt

    try:
        while (riding := pipe.recv()) is not None:
            pipe.send(work(riding, request, tell))
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _end_with_parent() -> None:
    """A killed sweep takes its workers along: they would hold the runs that its successor goes on with."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
