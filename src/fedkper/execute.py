"""How clients run, with the same results: in this process, or on single-threaded workers, one a core."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, NoReturn

import torch
import torch.multiprocessing  # registers how tensors in shared memory travel
from torch import Tensor

from fedkper import rng
from fedkper.errors import RunError
from fedkper.experiment import Experiment
from fedkper.lanes import Lanes
from fedkper.method import Method, Update, client_round
from fedkper.task import CHUNK, SGD, Task, pixels
from fedkper.tree import Tree, rest

# Chunks in one evaluation job: small enough to spread over workers, large enough not to be all messages.
JOB = 8 * CHUNK


@dataclass(frozen=True)
class Site:
    """What every worker holds: the data, who has which part of it, the model, the method and the settings."""

    experiment: Experiment
    method: Method
    model: Lanes
    classes: int
    train_x: Tensor
    """[N, H, W, channels] uint8, in shared memory"""
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    train_index: Sequence[Tensor]
    """per client, D_k"""
    test_index: Sequence[Tensor]
    """per client, L_k"""

    def to(self, device: str) -> Site:
        """The same with its tensors on a device."""
        if device == "cpu":
            return self
        moved = {f.name: to(getattr(self, f.name), device) for f in fields(self) if f.name not in ("model",)}
        return replace(self, **moved)

    def task(self, client: int, round: int) -> Task:
        e, index = self.experiment, self.train_index[client]
        return Task(
            model=self.model,
            x=self.train_x[index][None],
            y=self.train_y[index][None],
            n=torch.tensor([len(index)], device=index.device),
            classes=self.classes,
            streams=[rng.Stream(e.seed, round, client)],
            sgd=SGD(e.lr * e.lr_decay**round, e.momentum, e.weight_decay, e.grad_clip),
            epochs=e.epochs,
            batch=e.batch,
            round=round,
            rounds=e.rounds,
        )


class Worker:
    """The work itself, wherever it runs. Keeps what it last received and trained, to evaluate it later."""

    def __init__(self, site: Site, device: str = "cpu") -> None:
        self.site = site
        self.device = device
        self.local_test = torch.cat(list(site.test_index))
        self.shared: Tree = {}
        self.scored: Tree = {}
        self.trained: dict[int, tuple[Task, Tree, Update]] = {}

    def receive(self, shared: Tree, differing: Tree) -> None:
        """What the server sends, and the leaves in which the model scored as "global" differs from it."""
        self.shared = to(shared, self.device)
        self.scored = rest(self.shared) | to(differing, self.device)
        self.trained.clear()

    def train(self, client: int, round: int, own: Tree) -> Update:
        task, own = self.site.task(client, round), to(own, self.device)
        if self.site.model.random:
            with rng.drawing(task.streams[0].seed("dropout")):
                update = client_round(self.site.method, task, self.shared, own)
        else:
            update = client_round(self.site.method, task, self.shared, own)
        self.trained[client] = task, self.shared, update
        return update if self.device == "cpu" else Update(*(to(part, "cpu") for part in update))

    def local_logits(self, client: int) -> tuple[Tensor, Tensor | None]:
        """The local model of a client trained in this round, on its local test part: [n, C].

        The second is the model before a tuning that is for the scoring only, where the method has one.
        """
        task, shared, update = self.trained[client]
        method, images = self.site.method, self.site.train_x[self.site.test_index[client]]
        if not len(images):
            return torch.empty(0, self.site.classes), None
        untuned = method.untuned_model(task, update)
        before = None if untuned is None else logits(self.site.model, untuned, images)
        return logits(self.site.model, method.local_model(task, shared, update), images), before

    def global_logits(self, start: int) -> Tensor:
        """The global model on JOB images of G: [JOB, C]."""
        return logits(self.site.model, self.scored, self.site.test_x[start : start + JOB])

    def global_on_local_logits(self, start: int) -> Tensor:
        """The global model on JOB images of all clients' local test parts, one after another."""
        return logits(self.site.model, self.scored, self.site.train_x[self.local_test[start : start + JOB]])


@torch.no_grad()
def logits(model: Lanes, theta: Tree, images: Tensor) -> Tensor:
    """Logits [n, C] of one model for images [n, H, W, channels], in chunks of a fixed size, on the CPU."""
    parts = [model(theta, pixels(part)[None], train=False).logits[0] for part in images.split(CHUNK)]
    return torch.cat(parts).cpu()


def to(thing: Any, device: str) -> Any:
    """Tensors, and trees and sequences of them, on a device; anything else as it is."""
    if isinstance(thing, Tensor):
        return thing.to(device)
    if isinstance(thing, dict):
        return {k: v.to(device) for k, v in thing.items()}
    return [v.to(device) for v in thing] if isinstance(thing, list) else thing


class Call(NamedTuple):
    """A method of Worker by name, with its arguments; `worker` where only that process can do it."""

    name: str
    args: tuple[Any, ...]
    worker: int | None = None


class Done(NamedTuple):
    """What a call returned, which worker did it, and its seconds there."""

    value: Any
    worker: int
    seconds: float


def settle() -> None:
    """Makes this process fit for small models: one thread, no denormal numbers, freed memory kept.

    One thread is faster than several here, and its sums do not depend on the number of cores. A client with
    one class drives gradients into the denormal range, where arithmetic is many times slower.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            # Gradients of a few MB would else be mapped and unmapped, page by page, in every step.
            libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, its largest value
            libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


class Serial:
    """Runs everything in this process."""

    def __init__(self, site: Site, device: str = "cpu") -> None:
        settle()
        self.worker = Worker(site.to(device), device)

    def broadcast(self, name: str, *args: Any) -> None:
        getattr(self.worker, name)(*args)

    def run(self, calls: Sequence[Call]) -> list[Done]:
        """The results in the order of the calls."""
        return [Done(*_timed(self.worker, c.name, c.args)) for c in calls]

    def close(self) -> None:
        pass


class Pool:
    """`size` worker processes that live as long as the run. Raises RunError if one fails or dies."""

    def __init__(self, site: Site, size: int) -> None:
        settle()  # the server's own sums must not depend on the number of cores either
        self.size = size
        self.pipes: list[Connection] = []
        self.processes = []
        context = mp.get_context("spawn")
        with _importable_main(), _interrupts_later():
            for _ in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, site.experiment), daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        for tensor in (site.train_x, site.train_y, site.test_x, site.test_y):
            tensor.share_memory_()
        for worker in range(size):
            self._send(worker, site)

    def broadcast(self, name: str, *args: Any) -> None:
        """Calls a method of every worker."""
        message = _pack((name, args))
        for worker in range(self.size):
            self._send_bytes(worker, message)
        for worker in range(self.size):
            self._receive(worker)

    def run(self, calls: Sequence[Call]) -> list[Done]:
        """The results in the order of the calls."""
        free = deque(i for i, c in enumerate(calls) if c.worker is None)
        bound = {w: deque(i for i, c in enumerate(calls) if c.worker == w) for w in range(self.size)}
        results: dict[int, Done] = {}
        busy: dict[int, int] = {}

        def feed(worker: int) -> None:
            queue = bound[worker] or free
            if queue:
                busy[worker] = queue.popleft()
                self._send(worker, calls[busy[worker]][:2])

        for worker in range(self.size):
            feed(worker)
        while busy:
            for pipe in wait([self.pipes[w] for w in busy]):
                worker = self.pipes.index(pipe)  # type: ignore[arg-type]
                value, seconds = self._receive(worker)
                results[busy.pop(worker)] = Done(value, worker, seconds)
                feed(worker)
        return [results[i] for i in range(len(calls))]

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


Executor = Serial | Pool


def executor(site: Site, workers: int, device: str = "cpu") -> Executor:
    """One process for one worker or for an accelerator, else a pool."""
    return Serial(site, device) if workers == 1 or device != "cpu" else Pool(site, workers)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _importable_main:
    """A worker must not run the program that started it: hides __main__'s file while workers start."""

    def __enter__(self) -> None:
        self.main = sys.modules["__main__"]
        hidden = [name for name in ("__file__", "__spec__") if name in vars(self.main)]
        self.kept: dict[str, Any] = {name: vars(self.main).pop(name) for name in hidden}
        self.main.__spec__ = None

    def __exit__(self, *_: object) -> None:
        vars(self.main).update(self.kept)


@contextmanager
def _interrupts_later() -> Iterator[None]:
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
    experiment.checked()  # a user's own method and model must be known before the site that holds them comes
    try:
        worker = Worker(pipe.recv())
        while True:
            name, args = pipe.recv()
            pipe.send_bytes(_pack(_answer(worker, name, args)))
    except (EOFError, OSError):
        return


def _answer(worker: Worker, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        value, _, seconds = _timed(worker, name, args)
        return True, (value, seconds)
    except RunError as error:
        return False, str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return False, f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"


def _timed(worker: Worker, name: str, args: tuple[Any, ...]) -> tuple[Any, int, float]:
    start = time.perf_counter()
    return getattr(worker, name)(*args), 0, time.perf_counter() - start
