"""Cells as tasks of a Ray cluster, local or of many machines that share the folders. Needs the extra: ray."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedkper import __version__
from fedkper.errors import InputError, RunError
from fedkper.execute import cores
from fedkper.sweep.cells import Cell, Event, Request, Riding, work

# Seconds between two looks at the tables of the cells that run.
LOOK = 0.5


class Cluster:
    """At most `size` tasks, a core each. See `sweep.Pool`.

    To be used while `connected`. A task is `cells.work`, as in a process of this machine; how far it is, its
    rounds.csv says. Raises InputError if a machine of the cluster sees other folders.
    """

    def __init__(self, address: str, request: Request, jobs: int | None, count: int) -> None:
        self.ray = _ray()
        self.request, self.here = request, os.getcwd()
        self.running: dict[Any, Riding] = {}
        self.rounds: dict[Cell, int | None] = {}
        """rounds last seen of the cells that run; None until the run has begun"""
        _require_shared(self.ray, request.folder.absolute(), self.here)
        gpus = 1 if request.execution.device != "cpu" else 0
        # A cell whose worker dies is tried again by the sweep, alone; Ray would repeat it at once.
        self.task = self.ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_work)
        most = int(self.ray.cluster_resources().get("GPU" if gpus else "CPU", 0))
        if not most:
            raise InputError(f"--ray {address}: the cluster has no {'GPU' if gpus else 'CPU'} to offer")
        self.size = max(1, min(jobs or most, most, count))

    def send(self, riding: Riding) -> None:
        self.running[self.task.remote(riding, self.request, self.here)] = riding
        self.rounds |= dict.fromkeys(riding)

    def wait(self) -> list[Event]:
        ended, _ = self.ray.wait(list(self.running), num_returns=1, timeout=LOOK)
        events = [event for ref in ended for event in self._end(ref)]
        for cell in (cell for riding in self.running.values() for cell in riding):
            done, before = _rounds(self.request.folder / cell.place), self.rounds[cell]
            if done is not None and done != before:
                self.rounds[cell] = done
                events.append(Event("begun" if before is None else "round", cell, done))
        return events

    def _end(self, ref: Any) -> list[Event]:
        riding = self.running.pop(ref)
        for cell in riding:
            del self.rounds[cell]
        try:
            events: list[Event] = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            return [Event("again", cell, text=f"its Ray worker ended ({reason})") for cell in riding]
        return events

    def stop(self) -> None:
        """A round in progress is lost: a task cannot be told anything else than to end."""
        self.close()
        self.ray.wait(list(self.running), num_returns=len(self.running), timeout=30)

    def close(self) -> None:
        for ref in self.running:
            self.ray.cancel(ref, force=True)


@contextmanager
def connected(address: str, jobs: int | None) -> Iterator[None]:
    """A cluster at hand: that at `address`, or a "local" one of `jobs` cores, which ends with this.

    Raises InputError where Ray is missing or no cluster can be reached.
    """
    ray = _ray()
    _connect(ray, address, jobs)
    try:
        yield
    finally:
        ray.shutdown()


def _ray() -> Any:
    # Read when ray is imported: nothing is sent to anyone, and devices are those that the machine has.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
    except ImportError as error:
        raise InputError("--ray: needs the extra: pip install 'fedkper[ray]'") from error
    return ray


def _connect(ray: Any, address: str, jobs: int | None) -> None:
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"--ray {address}: nothing answers there ({error})") from error
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {"num_cpus": jobs or cores(), "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"--ray {address}: no cluster can be reached there ({reason})") from error


def _require_shared(ray: Any, folder: Path, here: str) -> None:
    """Raises InputError unless every machine of the cluster sees the sweep's folder and this program."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token = folder / f".shared-{secrets.token_hex(8)}.tmp"
    try:
        token.write_text(token.name, encoding="utf-8")
        for node in (node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")):
            name = node["NodeManagerHostname"]
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            look = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy=there)(_look)
            try:
                version, seen, same = ray.get(look.remote(token, here), timeout=120)
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
                raise InputError(f"--ray: {name} cannot run fedkper ({reason[0]})") from error
            if version != __version__:
                raise InputError(f"--ray: {name} has fedkper {version}, this machine {__version__}")
            if not seen or not same:
                what = folder if not seen else here
                raise InputError(f"--ray: {name} does not see the folder {what}; it must be shared by all")
    except OSError as error:
        raise RunError(f"{token}: cannot be written ({error.strerror})") from error
    finally:
        token.unlink(missing_ok=True)


def _look(token: Path, here: str) -> tuple[str, bool, bool]:
    """What a machine of the cluster has: the version, the sweep's folder, the folder it was started in."""
    from fedkper import __version__ as version

    return version, token.is_file() and token.read_text(encoding="utf-8") == token.name, os.path.isdir(here)


def _work(riding: Riding, request: Request, here: str) -> list[Event]:
    """A task: cells, in the folder in which the sweep was started, since paths may be relative to it."""
    os.chdir(here)
    return work(riding, request, lambda event: None)


def _rounds(folder: Path) -> int | None:
    """Rounds that are safe on the disk; None for a run that has not begun."""
    try:
        return (folder / "rounds.csv").read_bytes().count(b"\n") - 1
    except OSError:
        return None
