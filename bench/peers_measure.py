"""Starts a program and follows it and all its processes from outside: time, CPU and memory a round."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 240.0  # seconds for a turn
PAUSE = 0.5  # seconds between two looks at the memory
TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Turn:
    """What one start of a program gave: a value for each round."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """of all its processes"""
    others: list[float] = field(default_factory=list)
    """share of the machine that programs outside the measurement took, 0 to 1"""
    accuracy: list[float] = field(default_factory=list)
    moved: float = 0.0
    """Euclidean norm of what training has changed in the weights, after the last round"""
    steps: float = 0.0
    """optimiser steps a round, where the program counts them"""
    peak_mb: float = 0.0
    """proportional set sizes of all its processes added up: a page that n of them share counts 1 / n each"""
    first_end: float = 0.0
    """seconds from the start to the end of the first round"""
    failure: str = ""


def adopt_orphans() -> None:
    """Makes processes whose parent has ended children of this one, so that none escapes the measurement."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def measure(command: list[str], environment: Mapping[str, str], folder: Path) -> Turn:
    """Runs `command` in `folder`; it writes a JSON line a round to the pipe that $PEERS_REPORT names."""
    turn = Turn()
    with tempfile.TemporaryDirectory() as place, open(Path(place) / "log", "w+b") as log:
        name = Path(place) / "report"
        os.mkfifo(name)
        pipe = os.open(name, os.O_RDWR | os.O_NONBLOCK)
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {"PEERS_REPORT": str(name)},  # type: ignore[operator]
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _follow(process, pipe, start, turn)
        finally:
            _end(process)
            os.close(pipe)
        if process.returncode or not turn.seconds:
            log.seek(0)
            last = (log.read().decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            turn.failure = turn.failure or f"exit code {process.returncode}: {last[:300]}"
    turn.steps /= max(len(turn.seconds), 1)
    return turn


def _follow(process: subprocess.Popen[bytes], pipe: int, start: float, turn: Turn) -> None:
    """Reads the reports until the program ends or its time is over."""
    last, used, busy, text = start, 0.0, _busy_seconds(), b""
    while True:
        over = process.poll() is not None  # asked first, so that its last words are still read
        if time.perf_counter() - start > LIMIT:
            turn.failure = f"not done after {LIMIT:.0f} s"
            return
        ready, _, _ = select.select([pipe], [], [], 0 if over else PAUSE)
        if ready:
            text += os.read(pipe, 1 << 16)
            *lines, text = text.split(b"\n")
            for line in map(json.loads, lines):
                turn.steps += line.get("steps", 0)
                turn.moved = line.get("moved", turn.moved)
                if "round" in line:
                    now, all_ = _cpu_seconds(), _busy_seconds()
                    spare = (all_ - busy) - (now - used)
                    turn.first_end = turn.first_end or line["at"] - start
                    turn.seconds.append(line["at"] - last)
                    turn.cpu.append(now - used)
                    turn.others.append(max(0.0, spare) / (line["at"] - last) / (os.cpu_count() or 1))
                    turn.accuracy.append(line["accuracy"] or 0.0)
                    last, used, busy = line["at"], now, all_
        elif over:
            return
        else:
            turn.peak_mb = max(turn.peak_mb, _memory_mb())


def _descendants() -> list[int]:
    """Every process below this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found, queue = [], [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, from the state on; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_seconds() -> float:
    """Of all processes below this one, with those of their children that have ended."""
    stats = (_stat(pid) for pid in _descendants())
    return sum(sum(map(int, stat[11:15])) for stat in stats if stat) / TICKS


def _busy_seconds() -> float:
    """Of the whole machine since it started: every state but idle and waiting for a disk."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / TICKS


def _memory_mb() -> float:
    kilobytes = 0
    for pid in _descendants():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes / 1024


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of the program, and waits for it."""
    if process.poll() is None:
        process.terminate()
    for kind in (signal.SIGTERM, signal.SIGKILL):
        for pid in _descendants():
            if pid != process.pid or kind == signal.SIGKILL:
                try:
                    os.kill(pid, kind)
                except ProcessLookupError:
                    continue
        until = time.perf_counter() + 5
        while time.perf_counter() < until and _descendants():
            _reap(process)
            time.sleep(0.05)
        if not _descendants():
            return


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.poll()
    for pid in _descendants():
        if pid != process.pid:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
