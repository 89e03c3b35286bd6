"""Worker processes, one a core, that live as long as a run and hold the data once, in shared memory."""

from __future__ import annotations

import multiprocessing as mp
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
import torch.multiprocessing  # registers how tensors in shared memory travel
from torch import Tensor

from fedkper.errors import RunError
from fedkper.execute import JOB, Call, Worker, answer, settle
from fedkper.experiment import Experiment
from fedkper.site import Site


class Pool:
    """`size` worker processes that live as long as the run. Raises RunError if one fails or dies."""

    def __init__(self, site: Site, size: int) -> None:
        settle()  # the server's own sums must not depend on the number of cores either
        self.size = size
        self.job = JOB
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        try:
            self._start(site)
        except (OSError, RuntimeError) as error:
            self.close()
            raise RunError(
                f"{size} workers cannot be started ({error}). They hold the data in shared memory "
                "(/dev/shm), which may be too small: make it larger, or use --workers 1, which needs none"
            ) from error
        except BaseException:
            self.close()
            raise

    def _start(self, site: Site) -> None:
        context = mp.get_context("spawn")
        with importable_main(), interrupts_later():
            for _ in range(self.size):
                ours, theirs = context.Pipe()
                self.pipes.append(ours)
                process = context.Process(target=_serve, args=(theirs, site.experiment), daemon=True)
                try:
                    process.start()
                finally:
                    theirs.close()
                self.processes.append(process)
        for tensor in (site.train_x, site.train_y, site.test_x, site.test_y):
            tensor.share_memory_()
        for worker in range(self.size):
            self._send(worker, site)
        for worker in range(self.size):  # each is ready, or tells why it is not
            self._receive(worker)

    def plan(self, clients: Sequence[int]) -> list[list[int]]:
        """Which clients train together: each alone, since a core is quickest with one model."""
        return [[client] for client in clients]

    def broadcast(self, name: str, *args: Any) -> None:
        """Calls a method of every worker."""
        message = _pack((name, args))
        for worker in range(self.size):
            self._send_bytes(worker, message)
        for worker in range(self.size):
            self._receive(worker)

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """The results in the order of the calls."""
        done = dict(self.each(calls))
        return [done[at] for at in range(len(calls))]

    def each(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Which call is done, and its result, as they come."""
        queue = deque(range(len(calls)))
        busy: dict[int, int] = {}

        def feed(worker: int) -> None:
            if queue:
                busy[worker] = queue.popleft()
                self._send(worker, tuple(calls[busy[worker]]))

        for worker in range(self.size):
            feed(worker)
        while busy:
            for pipe in wait([self.pipes[w] for w in busy]):
                worker = self.pipes.index(pipe)  # type: ignore[arg-type]
                value, at = self._receive(worker), busy.pop(worker)
                feed(worker)
                yield at, value

    def _send(self, worker: int, message: Any) -> None:
        self._send_bytes(worker, _pack(message))

    def _send_bytes(self, worker: int, message: bytes) -> None:
        try:
            self.pipes[worker].send_bytes(message)
        except OSError:
            self._died(worker)

    def _receive(self, worker: int) -> Any:
        try:
            ok, value = self.pipes[worker].recv()
        except (EOFError, OSError):
            self._died(worker)
        if not ok:
            raise RunError(value)
        return value

    def _died(self, worker: int) -> NoReturn:
        process = self.processes[worker]
        process.join(5)
        raise RunError(
            f"worker {worker + 1} of {self.size} ended with exit code {process.exitcode} (out of memory?); "
            "try fewer --workers"
        )

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.5)
            if process.is_alive():
                process.terminate()
            process.join()


class importable_main:
    """A worker must not run the program that started it: hides __main__'s file while workers start."""

    def __enter__(self) -> None:
        self.main = sys.modules["__main__"]
        hidden = [name for name in ("__file__", "__spec__") if name in vars(self.main)]
        self.kept: dict[str, Any] = {name: vars(self.main).pop(name) for name in hidden}
        self.main.__spec__ = None

    def __exit__(self, *_: object) -> None:
        vars(self.main).update(self.kept)


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Ctrl-C reaches this process when the block ends; a worker started in it takes it for ignored."""
    if not hasattr(signal, "pthread_sigmask"):  # not a POSIX system
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Pickler(ForkingPickler):
    """Messages between our own processes: tensors in shared memory as handles, others as arrays."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Tensor) and not thing.is_shared():
            return _aligned, (thing.detach().numpy(),)
        return NotImplemented


def _aligned(array: Any) -> Tensor:
    """A tensor in memory of torch's own: sums over memory that is not aligned are rounded differently."""
    return torch.from_numpy(array).clone()


def _pack(message: Any) -> bytes:
    return bytes(_Pickler.dumps(message, 5))


def _serve(pipe: Connection, experiment: Experiment) -> None:
    """A worker process: the site first, then calls, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    settle()
    try:
        site = pipe.recv_bytes()
        try:
            experiment.checked()  # a user's own method and model must be known before the site that has them
            worker = Worker(ForkingPickler.loads(site))
        except Exception as error:
            told = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            pipe.send_bytes(_pack((False, f"a worker cannot start: {told}")))
            return
        pipe.send_bytes(_pack((True, None)))
        while True:
            name, args = pipe.recv()
            pipe.send_bytes(_pack(_answer(worker, name, args)))
    except (EOFError, OSError):
        return


def _answer(worker: Worker, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, answer(worker, name, args)
    except RunError as error:
        return False, str(error)
