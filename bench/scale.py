"""How the cost of a round grows: with the clients, the share sampled, the images of a client and the model.

Each row is a short run on the pool with FedAvg (and Ditto for the personal state on the disk), with images of
28 x 28 x 3 and one local epoch. The global model is scored on 1,000 images and on 100 clients' test parts.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from common import CLASSES, SHAPE, arguments, peak_memory, show
from fedkper import models
from fedkper.data.dataset import Dataset
from fedkper.data.partition import Partition, Partitioning
from fedkper.execute import cores
from fedkper.experiment import Experiment
from fedkper.record import Record
from fedkper.simulate import simulate
from fedkper.site import site_of

ROUNDS = 4  # the first warms up and is not counted
CASES: list[dict[str, Any]] = [
    {"clients": 100, "fraction": 0.1},
    {"clients": 1000, "fraction": 0.01},
    {"clients": 10_000, "fraction": 0.001},
    {"clients": 1000, "fraction": 0.02},
    {"clients": 1000, "fraction": 0.04},
    {"clients": 100, "fraction": 0.1, "images": 24},
    {"clients": 100, "fraction": 0.1, "images": 48},
    {"clients": 10_000, "fraction": 0.01},
    {"clients": 10_000, "fraction": 0.01, "method": "ditto:epochs=1"},
]


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of a round after the first, start-up seconds, and peak memory of all processes."""
    clients, images = case["clients"], case.get("images", 12)
    draw = np.random.default_rng(0)
    total = clients * (images + 2)
    x = draw.integers(0, 256, (total, *SHAPE), dtype=np.uint8)
    names = tuple(f"class {c}" for c in range(CLASSES))
    dataset = Dataset(
        "bench", names, x, draw.integers(0, CLASSES, total), x[:1000], draw.integers(0, CLASSES, 1000)
    )
    parts = np.arange(total).reshape(clients, images + 2)
    partition = Partition(
        Partitioning(kind="iid", clients=clients), "bench", tuple(parts[:, :images]), tuple(parts[:, images:])
    )
    experiment = Experiment(
        method=case.get("method", "fedavg"),
        clients=clients,
        fraction=case["fraction"],
        rounds=ROUNDS,
        epochs=1,
        score_clients=100,
    )
    site = site_of(experiment, dataset, partition, models.build("cnn", SHAPE, CLASSES, 1))
    at, memory = [time.perf_counter()], 0.0

    def on_round(round: int, line: dict[str, Any]) -> None:
        nonlocal memory
        at.append(time.perf_counter())
        memory = peak_memory([os.getpid(), *(p.pid or 0 for p in multiprocessing.active_children())])

    with tempfile.TemporaryDirectory() as folder:
        record = Record.create(Path(folder) / "run")
        simulate(site, record, cores(), on_round=on_round)
        record.close()
    rounds = [b - a for a, b in pairwise(at[1:])]
    return {"seconds": statistics.median(rounds), "first": at[1] - at[0], "memory": memory}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows = []
    for case in CASES:
        found = measure(case)
        sampled = round(case["clients"] * case["fraction"])
        rows.append(
            {
                "method": case.get("method", "fedavg"),
                "clients": f"{case['clients']:,}",
                "sampled": sampled,
                "images a client": case.get("images", 12),
                "s a round": f"{found['seconds']:.2f}",
                "ms a sampled client": f"{1000 * found['seconds'] / sampled:.0f}",
                "first round s": f"{found['first']:.1f}",
                "peak MB": f"{found['memory']:.0f}",
            }
        )
        print(rows[-1], flush=True)
    show("The cost of a round", rows, {}, options.json)


if __name__ == "__main__":
    main()
