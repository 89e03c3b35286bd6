"""How the cost of a round grows: with the clients, those sampled, their images and the model; its memory.

Every row is a run of its own, in a process of its own, on a pool with a worker a core, with one local epoch.
`--large` adds 64 and 224 pixels and ResNet-18, which takes minutes. `--case` runs a single row:
--case '{"method": "fedcurv", "clients": 10000, "sampled": 100}'.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from common import CLASSES, Watch, arguments, markdown, peak_memory, write
from fedkper import models
from fedkper.data import synthetic
from fedkper.data.dataset import Dataset
from fedkper.data.partition import Partition, Partitioning
from fedkper.execute import cores
from fedkper.experiment import Experiment
from fedkper.methods import METHODS
from fedkper.record import Record
from fedkper.simulate import simulate
from fedkper.site import Site, site_of
from fedkper.tree import nbytes

WIDE = Path(__file__).with_name("wide.py")
LOCAL_TEST = 2  # images in a client's local test part
LIMIT_MB = 4096  # to reach: every method on 10,000 clients, 1 % of them a round


@dataclass(frozen=True)
class Case:
    """A run."""

    method: str = "fedavg"
    clients: int = 100
    sampled: int = 10
    images: int = 12
    """of a client"""
    model: str = "cnn"
    size: int = 28
    """edge of the images"""
    embedded: str = ""
    """file with the embedded data set; its images are dealt out again and again. Empty: random images"""
    rounds: int = 5
    """the first warms up, the last is for the memory, and for the time only where there are two"""
    lanes: int = 1
    """clients side by side in one process; 1: a pool"""


# What grows in each series, and by how much the cost should: slope 0 is flat, 1 is linear.
SERIES: dict[str, tuple[list[Case], float]] = {
    "clients": ([Case(clients=n) for n in (100, 1000, 10_000)], 0),
    "sampled": ([Case(clients=1000, sampled=n) for n in (20, 40, 80)], 1),
    "images": ([Case(images=n) for n in (96, 192, 384)], 1),
    "model": ([Case(model=m) for m in (f"{WIDE}:Half", "cnn", f"{WIDE}:Double")], 1),
}
NAMES = {
    "clients": "clients, 10 of them sampled",
    "sampled": "sampled clients, of 1,000",
    "images": "images of a client",
    "model": "model, MB",
}
LARGE = [
    Case(sampled=4, clients=8, rounds=3, model=model, size=size, lanes=lanes)
    for model, size, lanes in (
        ("cnn", 64, 1),
        ("cnn", 64, 4),
        ("resnet18", 28, 1),
        ("resnet18", 64, 1),
        ("resnet18", 64, 4),
        ("resnet18", 224, 1),
        ("resnet18", 224, 4),
    )
]


def federation(case: Case) -> Site:
    """Clients with their own random images, or with images of the embedded set, dealt out in turn."""
    each, draw = case.images + LOCAL_TEST, np.random.default_rng(0)
    if case.embedded:
        with np.load(case.embedded) as data:
            dataset = Dataset(
                "embedded", synthetic.CLASSES, data["x"], data["y"], data["test_x"], data["test_y"]
            )
    else:
        total, shape = case.clients * each, (case.size, case.size, 3)
        x = draw.integers(0, 256, (total, *shape), dtype=np.uint8)
        y = draw.integers(0, CLASSES, total)
        names = tuple(f"class {c}" for c in range(CLASSES))
        dataset = Dataset("random", names, x, y, x[:64].copy(), y[:64].copy())
    parts = np.arange(case.clients * each).reshape(case.clients, each) % len(dataset.train_y)
    partition = Partition(
        Partitioning(kind="iid", clients=case.clients),
        dataset.name,
        tuple(parts[:, : case.images]),
        tuple(parts[:, case.images :]),
    )
    experiment = Experiment(
        method=case.method,
        model=case.model,
        clients=case.clients,
        fraction=case.sampled / case.clients,
        rounds=case.rounds,
        epochs=1,
        score_clients=100 if case.embedded else 10,
    )
    shape = (case.size, case.size, 3)
    return site_of(experiment, dataset, partition, models.build(case.model, shape, CLASSES, 1))


class Meter:
    """Told of every round: notes the time, and watches the memory in the last one."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.at = [time.perf_counter()]
        self.watch = Watch()
        self.resident = 0.0

    def __call__(self, round: int, line: dict[str, Any]) -> None:
        self.at.append(time.perf_counter())
        if round == self.rounds - 1:
            self.watch.start()
        elif round == self.rounds:
            self.watch.stop()
            self.resident = peak_memory(self.watch.pids)


def measure(case: Case) -> dict[str, Any]:
    """Median seconds of a round, seconds to the end of the first, MB that all processes need."""
    site, meter = federation(case), Meter(case.rounds)
    with tempfile.TemporaryDirectory() as folder:
        record = Record.create(Path(folder) / "run")
        lanes = case.lanes if case.lanes > 1 else None
        simulate(site, record, 1 if lanes else cores(), on_round=meter, lanes=lanes)
        record.close()
    seconds = [b - a for a, b in pairwise(meter.at)]
    return {
        "seconds": statistics.median(seconds[1:-1] or seconds[1:]),
        "first": seconds[0],
        "pss_mb": meter.watch.peak,
        "server_mb": meter.watch.parts.get(os.getpid(), 0.0),
        "rss_mb": meter.resident,
        "model_mb": nbytes(site.model.init()) / 1e6,
    }


def apart(case: Case) -> dict[str, Any]:
    """The same in a new process, so that no row holds what another has left."""
    words = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    found: dict[str, Any] = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
    return found


def row(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": case.method.partition(":")[0],
        "model": case.model.rpartition(":")[2],
        "px": case.size,
        "clients": f"{case.clients:,}",
        "sampled": case.sampled,
        "images": case.images,
        "lanes": case.lanes,
        "s a round": f"{found['seconds']:.2f}",
        "ms a sampled client": f"{1000 * found['seconds'] / case.sampled:.0f}",
        "first round s": f"{found['first']:.1f}",
        "MB": f"{found['pss_mb']:.0f}",
        "of it server": f"{found['server_mb']:.0f}",
        "RSS added up": f"{found['rss_mb']:.0f}",
    }


def along(name: str, case: Case, found: dict[str, Any]) -> float:
    """What grows in a series."""
    return float(found["model_mb"] if name == "model" else getattr(case, name))


def slope(x: list[float], y: list[float]) -> float:
    """Of the straight line through log y over log x: 0 is flat, 1 is linear."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def every_method(embedded: Path) -> list[Case]:
    base = Case(clients=10_000, sampled=100, rounds=2, embedded=str(embedded))
    return [replace(base, method="ditto:epochs=1" if name == "ditto" else name) for name in METHODS]


def embed(path: Path) -> None:
    data = synthetic.load()
    np.savez(path, x=data.train_x, y=data.train_y, test_x=data.test_x, test_y=data.test_y)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--case", type=json.loads, help="measure this one only, and print JSON")
    parser.add_argument("--large", action="store_true", help="larger images and models too")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(Case(**options.case))))
        return
    rows: dict[str, list[dict[str, Any]]] = {}
    series: dict[str, dict[str, Any]] = {}

    def measured(title: str, cases: list[Case]) -> list[dict[str, Any]]:
        found = [apart(case) for case in cases]
        rows[title] = [row(case, one) for case, one in zip(cases, found, strict=True)]
        print(f"\n{title}\n\n{markdown(rows[title])}", flush=True)
        return found

    for name, (cases, expected) in SERIES.items():
        found = measured(f"Cost against {NAMES[name]}", cases)
        x = [along(name, case, one) for case, one in zip(cases, found, strict=True)]
        y = [one["seconds"] for one in found]
        series[name] = {"x": x, "seconds": y, "mb": [one["pss_mb"] for one in found]}
        series[name] |= {"slope": slope(x, y), "memory_slope": slope(x, series[name]["mb"])}
        series[name]["expected"] = expected
        print(f"\nslope {series[name]['slope']:.2f} (to reach: about {expected:g})")
    with tempfile.TemporaryDirectory() as folder:
        embedded = Path(folder) / "embedded.npz"
        embed(embedded)
        found = measured("Every method, 10,000 clients on the embedded data", every_method(embedded))
    most = max(one["pss_mb"] for one in found)
    print(f"\nmost memory {most:,.0f} MB (to reach: below {LIMIT_MB:,} MB)")
    if options.large:
        measured("Larger images, a larger model", LARGE)
    write(options.json, {"tables": rows, "series": series, "most_mb": most})


if __name__ == "__main__":
    main()
