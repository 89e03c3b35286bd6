"""How clients run, with the same results: one after another, or side by side as lanes; here or in a pool."""

from __future__ import annotations

import ctypes
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedkper import memory, rng, tree
from fedkper.errors import RunError
from fedkper.lanes import Lanes
from fedkper.method import Update, client_round
from fedkper.site import Site
from fedkper.task import CHUNK, Task, chunk, pixels
from fedkper.tree import Tree, lanes, rest, spread, stack, to

# Images in one evaluation job: few enough to spread over workers, enough not to be all messages.
JOB = 8 * CHUNK


class Trained(NamedTuple):
    """A client's update as its worker hands it over."""

    update: Update
    """without the sub-trees of `own`, which stay where the client is"""
    checksum: str
    """of the client's state on the disk; empty if it keeps nothing"""


class Visit(NamedTuple):
    """A round of clients that train together."""

    trained: list[Trained]
    logits: list[tuple[Tensor, Tensor | None]]
    """see Worker.local_logits"""
    train_seconds: float
    eval_seconds: float


class Worker:
    """The work itself, wherever it runs. Keeps what it last received and trained, to evaluate it later."""

    def __init__(self, site: Site, device: str = "cpu") -> None:
        self.site = site
        self.device = device
        riders = site.riders
        self.local_test = [torch.cat([site.test_index[k] for k in rider.scored]) for rider in riders]
        self.initial_own = [site.method.init(site.model, rider.initial)[1] for rider in riders]
        self.shared: dict[int, Tree] = {}
        self.scored: dict[int, Tree] = {}
        self.trained: list[tuple[list[int], Task, Update]] = []

    def receive(self, shared: Tree, differing: Tree, rider: int = 0) -> None:
        """What the server sends, and the leaves in which the model scored as "global" differs from it.

        `rider`: of which run, where several ride together.
        """
        self.shared[rider] = to(shared, self.device)
        self.scored[rider] = rest(self.shared[rider]) | to(differing, self.device)
        self.trained.clear()

    def _received(self, clients: list[int]) -> Tree:
        """What each client's server has sent, a lane each."""
        riders = [self.site.rider(client) for client in clients]
        if len(set(riders)) == 1:
            return spread(self.shared[riders[0]], len(clients))
        return stack([self.shared[rider] for rider in riders])

    def visit(self, clients: list[int], round: int, kept: list[Path | None], keep: list[Path]) -> Visit:
        """Trains some clients and scores their local models at once, so that none has to be kept."""
        clock = [time.perf_counter()]
        trained = self.train(clients, round, kept, keep)
        clock.append(time.perf_counter())
        answers = self.local_logits(clients)
        clock.append(time.perf_counter())
        self.trained.clear()
        return Visit(trained, answers, clock[1] - clock[0], clock[2] - clock[1])

    def train(
        self, clients: list[int], round: int, kept: list[Path | None], keep: list[Path]
    ) -> list[Trained]:
        """A round of some clients, a lane each.

        A client's own state is read and written here, so that it never passes through the server's process:
        `kept` is where it is, None before a client's first round, `keep` where it will be.
        """
        first = (self.initial_own[self.site.rider(client)] for client in clients)
        owns = [own if path is None else tree.load(path) for own, path in zip(first, kept, strict=True)]
        done = []
        for update, path in zip(self._fitting(clients, round, owns), keep, strict=True):
            try:
                checksum = tree.save(update.own, path) if update.own else ""
            except OSError as error:
                raise RunError(f"{path}: cannot be written ({error.strerror})") from error
            done.append(Trained(update._replace(own=rest(update.own)), checksum))
        return done

    def _fitting(self, clients: list[int], round: int, owns: list[Tree]) -> list[Update]:
        """All lanes at once; where memory runs out, half of them at a time."""
        try:
            return self._train(clients, round, owns)
        except torch.OutOfMemoryError as error:
            if len(clients) == 1:
                raise RunError(f"a single client does not fit into the memory of {self.device}") from error
        print(f"note: {len(clients)} lanes do not fit into the memory; going on with half", file=sys.stderr)
        half = (len(clients) + 1) // 2
        parts = (slice(0, half), slice(half, None))
        return [u for part in parts for u in self._fitting(clients[part], round, owns[part])]

    def _train(self, clients: list[int], round: int, owns: list[Tree]) -> list[Update]:
        task, own = self.site.task(clients, round), stack([to(own, self.device) for own in owns])
        shared = self._received(clients)
        with rng.drawing(task.streams[0].seed("the model's own")):  # dropout and the like
            update = client_round(self.site.method, task, shared, own)
        self.trained.append((clients, task, update))
        here = Update(*(to(part, "cpu") for part in update))  # at once, not lane by lane
        return [_lane(here, at) for at in range(len(clients))]

    def local_logits(self, clients: list[int]) -> list[tuple[Tensor, Tensor | None]]:
        """The local models of clients trained together, each on its local test part: [n, C].

        The second is the model before a tuning that is for the scoring only, where the method has one.
        """
        found: dict[int, tuple[Tensor, Tensor | None]] = {}
        for group, task, update in self.trained:
            if group[0] in clients:
                shared, method = self._received(group), self.site.method
                with rng.drawing(task.streams[0].seed("scoring")):
                    models = method.local_model(task, shared, update), method.untuned_model(task, update)
                after, before = (None if m is None else self._local_test(group, m) for m in models)
                assert after is not None
                for at, client in enumerate(group):
                    found[client] = after[at], None if before is None else before[at]
        return [found[client] for client in clients]

    def _local_test(self, clients: list[int], theta: Tree) -> list[Tensor]:
        parts = [self.site.test_part(client) for client in clients]
        if not any(map(len, parts)):
            return [torch.empty(0, self.site.classes)] * len(parts)
        images = self.site.train_x.new_zeros(len(parts), max(map(len, parts)), *self.site.train_x.shape[1:])
        for lane, part in enumerate(parts):
            images[lane, : len(part)] = self.site.train_x[part]
        found = logits(self.site.model, theta, images)
        return [found[lane, : len(part)] for lane, part in enumerate(parts)]

    def global_logits(self, start: int, end: int, rider: int = 0) -> Tensor:
        """A run's global model on images of G: [end - start, C]."""
        return logits(self.site.model, self.scored[rider], self.site.test_x[None, start:end])[0]

    def global_on_local_logits(self, start: int, end: int, rider: int = 0) -> Tensor:
        """A run's global model on images of the scored clients' local test parts, one after another."""
        images = self.site.train_x[self.local_test[rider][start:end]]
        return logits(self.site.model, self.scored[rider], images[None])[0]


@torch.no_grad()
def logits(model: Lanes, theta: Tree, images: Tensor) -> Tensor:
    """Logits [L, n, C] for images [L, n, H, W, channels], in chunks of a fixed size, on the CPU."""
    missing = model.names - theta.keys()
    if missing:  # the module would fill in its initial numbers
        raise RunError(
            f"the model to be scored lacks {', '.join(sorted(missing)[:3])}: see the method's scoring"
        )
    parts = [model(theta, pixels(part), train=False).logits for part in images.split(chunk(images), dim=1)]
    return torch.cat(parts, 1).cpu()


def _lane(update: Update, at: int) -> Update:
    """One client's part of an update."""
    index = slice(at, at + 1)
    shared, own, sums = (lanes(tree, index) for tree in (update.shared, update.own, update.sums))
    return Update(shared, update.weight[index], own, update.samples[index], sums)


class Call(NamedTuple):
    """A method of Worker by name, with its arguments; any process can do it."""

    name: str
    args: tuple[Any, ...]


class Executor(Protocol):
    """Where calls are carried out."""

    job: int
    """images in one call that scores the global model"""

    def plan(self, clients: Sequence[int]) -> list[list[int]]: ...
    def broadcast(self, name: str, *args: Any) -> None: ...
    def each(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]: ...
    def run(self, calls: Sequence[Call]) -> list[Any]: ...
    def close(self) -> None: ...


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


class Here:
    """Runs everything in this process, up to `most` clients side by side.

    None: one on a CPU, where a core is quickest with one model; elsewhere as many as fit into memory.
    """

    def __init__(self, site: Site, device: str = "cpu", most: int | None = None) -> None:
        settle()
        self.site = site
        if device != "cpu":  # float32 means float32 there too, unless asked otherwise
            exact = site.experiment.precision != "tf32"
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not exact
        self.worker = Worker(site.to(device), device)
        self.most = most or (1 if device == "cpu" else memory.lanes_that_fit(self.worker.site, device))
        self.job = JOB if device == "cpu" else sys.maxsize

    def plan(self, clients: Sequence[int]) -> list[list[int]]:
        """Which clients train together: those of similar size, so that short ones wait for nothing.

        BatchNorm would take padding for data, and dropout draws from one generator: such models train alone.
        """
        alone = bool(self.site.model.batch_norm) or self.site.model.random
        most = 1 if alone else self.most
        order = list(clients) if most == 1 else sorted(clients, key=lambda k: -len(self.site.train_part(k)))
        return [order[at : at + most] for at in range(0, len(order), most)]

    def broadcast(self, name: str, *args: Any) -> None:
        getattr(self.worker, name)(*args)

    def each(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Which call is done, and its result, as they come."""
        for at, call in enumerate(calls):
            yield at, answer(self.worker, call.name, call.args)

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """The results in the order of the calls."""
        return [value for _, value in self.each(calls)]

    def close(self) -> None:
        pass


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def answer(worker: Worker, name: str, args: tuple[Any, ...]) -> Any:
    """What a method of the worker returns. Raises RunError for whatever goes wrong in it."""
    try:
        return getattr(worker, name)(*args)
    except RunError:
        raise
    except Exception as error:  # a user's own method or model may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        raise RunError(f"{type(error).__name__}: {error} ({where})") from error
