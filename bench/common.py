"""What the benchmarks share: a federation of the right shapes, a table, a JSON file, the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkper import models
from fedkper.data.dataset import Dataset
from fedkper.data.partition import Partition, Partitioning
from fedkper.experiment import Experiment
from fedkper.site import Site, site_of

CLIENTS, TRAIN, TEST, GLOBAL, CLASSES = 20, 480, 120, 3421, 8
SHAPE = (28, 28, 3)
# Multiply-adds of the paper's CNN for one image of these shapes (specification 3.4), and of its first layer.
FORWARD, FIRST = 13.53e6, 2400 * 28 * 28


def workload(method: str, rounds: int) -> Site:
    """20 clients with 480 training and 120 local test images each, 2 sampled a round; 3,421 images in G."""
    draw = np.random.default_rng(0)
    total = CLIENTS * (TRAIN + TEST)

    def images(n: int) -> Any:
        return draw.integers(0, 256, (n, *SHAPE), dtype=np.uint8)

    def labels(n: int) -> Any:
        return draw.integers(0, CLASSES, n)

    names = tuple(f"class {c}" for c in range(CLASSES))
    dataset = Dataset("bench", names, images(total), labels(total), images(GLOBAL), labels(GLOBAL))
    parts = np.arange(total).reshape(CLIENTS, TRAIN + TEST)
    partition = Partition(
        Partitioning(kind="iid"), dataset.hash, tuple(parts[:, :TRAIN]), tuple(parts[:, TRAIN:])
    )
    experiment = Experiment(method=method, rounds=rounds)
    return site_of(experiment, dataset, partition, models.build("cnn", SHAPE, CLASSES, experiment.seed))


def train_flop(images: int) -> float:
    """Floating-point operations of training: forward, backward twice as much, no gradient for the input."""
    return 2 * images * (3 * FORWARD - FIRST)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the results here too")
    return parser


def show(title: str, rows: Sequence[dict[str, Any]], results: dict[str, Any], path: Path | None) -> None:
    """Prints a table and the machine; writes everything as JSON."""
    columns = list(rows[0])
    widths = [max(len(c), *(len(str(row[c])) for row in rows)) for c in columns]
    print(f"\n{title}\n")
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        cells = [str(row[c]) for c in columns]
        print(
            "  ".join(
                c.ljust(w) if i == 0 else c.rjust(w)
                for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            )
        )
    write(path, {"rows": list(rows), **results})


def write(path: Path | None, results: dict[str, Any]) -> None:
    """Prints the machine; writes it and the results as JSON."""
    where = machine()
    print("\n" + ", ".join(f"{k} {v}" for k, v in where.items()))
    if path:
        path.write_text(json.dumps({"machine": where, **results}, indent=2) + "\n")


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table for the documentation."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(map(str, row.values())) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> dict[str, Any]:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def peak_memory(pids: Sequence[int]) -> float:
    """MB: the largest resident sizes of the processes added up, shared pages counted in each."""
    kilobytes = 0
    for pid in pids:
        for line in _lines(pid, "status"):
            if line.startswith("VmHWM"):
                kilobytes += int(line.split()[1])
    return kilobytes / 1024


def with_children(pid: int) -> list[int]:
    """A process and all below it."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = next((line for line in _lines(int(entry.name), "status") if line.startswith("PPid")), "")
            below.setdefault(int(parent[5:] or 0), []).append(int(entry.name))
    found = [pid]
    for at in found:  # grows while it is read
        found += below.get(at, [])
    return found


class Watch:
    """Looks every `pause` seconds at the memory that this process and its children need together.

    That is the sum of their proportional set sizes: a page that n processes share counts 1 / n in each. The
    kernel does not keep its peak, so what lies between two looks is missed; looking costs some time, too.
    """

    def __init__(self, pause: float = 0.02) -> None:
        self.pause = pause
        self.pids: list[int] = []
        self.peak = 0.0
        """MB"""
        self.parts: dict[int, float] = {}
        """MB of each process at that moment"""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        self.pids = with_children(os.getpid())
        self.thread.start()

    def stop(self) -> None:
        self.over.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.over.wait(self.pause):
            parts = {pid: proportional(pid) for pid in self.pids}
            if sum(parts.values()) > self.peak:
                self.peak, self.parts = sum(parts.values()), parts


def proportional(pid: int) -> float:
    """MB: the proportional set size of a process; 0 if it has ended."""
    return sum(int(line.split()[1]) for line in _lines(pid, "smaps_rollup") if line.startswith("Pss:")) / 1024


def _lines(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return []
