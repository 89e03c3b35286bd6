"""Seconds of one federated round against a plain PyTorch loop and the machine's matrix-product rate.

The workload: 20 clients, 2 a round with 480 images of 28 x 28 x 3 each, 5 epochs in batches of 12, the
paper's CNN; after every round the global model on 3,421 images and on all clients' 2,400 local test images.
The three programs take turns, and each row is the median over the turns.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from common import (
    CLASSES,
    FORWARD,
    GLOBAL,
    SHAPE,
    TEST,
    TRAIN,
    arguments,
    markdown,
    peak_memory,
    show,
    train_flop,
    workload,
)
from fedkper import models
from fedkper.execute import cores, settle
from fedkper.models import CNN
from fedkper.record import Record
from fedkper.simulate import simulate

TURNS, ROUNDS = 2, 3  # the first round of a turn warms up and is not counted


def ours(method: str, precision: str) -> tuple[list[dict[str, float]], float]:
    """Lines of rounds.csv with the whole seconds of each round, and the peak memory of all processes."""
    site, lines, memory = workload(method, ROUNDS), [], 0.0
    site = replace(site, model=models.build("cnn", SHAPE, CLASSES, 1, precision=precision))
    at = [time.perf_counter()]

    def on_round(round: int, line: dict[str, Any]) -> None:
        nonlocal memory
        at.append(time.perf_counter())
        lines.append(line | {"seconds": at[-1] - at[-2]})
        memory = peak_memory([os.getpid(), *(p.pid or 0 for p in multiprocessing.active_children())])

    with tempfile.TemporaryDirectory() as folder:
        record = Record.create(Path(folder) / "run")
        simulate(site, record, cores(), on_round=on_round)
        record.close()
    return lines[1:], memory


def plain() -> float:
    """A round of FedAvg as one would write it: one new process, PyTorch's default threads and layout."""
    torch.manual_seed(0)
    x, y = torch.randn(2 * TRAIN, SHAPE[2], *SHAPE[:2]), torch.randint(0, CLASSES, (2 * TRAIN,))
    test = torch.randn(GLOBAL + 20 * TEST, SHAPE[2], *SHAPE[:2])
    server, states = CNN(SHAPE, CLASSES), []
    start = time.perf_counter()
    for client in range(2):
        model = copy.deepcopy(server)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
        for _ in range(5):
            for part in torch.randperm(TRAIN).split(12):
                part = part + client * TRAIN
                optimiser.zero_grad()
                F.cross_entropy(model(x[part]), y[part]).backward()
                optimiser.step()
        states.append(model.state_dict())
    server.load_state_dict({k: (states[0][k] + states[1][k]) / 2 for k in states[0]})
    with torch.no_grad():
        for part in test.split(256):
            server(part).argmax(1)
    return time.perf_counter() - start


def _products(seconds: float) -> float:
    settle()
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    torch.mm(a, b)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(a, b)
        count += 1
    return count * 2 * 1024**3 / (time.perf_counter() - start)


def product_rate() -> float:
    """Matrix products of all cores together, one single-threaded process a core: operations a second."""
    with multiprocessing.get_context("spawn").Pool(cores()) as pool:
        return sum(pool.map(_products, [2.0] * cores()))


def start_up() -> float:
    """Seconds from the command as typed to its first round's training, on the embedded data."""
    words = ["run", "--rounds", "1", "--epochs", "1", "--method", "fedavg"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        start = time.perf_counter()
        command = [sys.executable, "-m", "fedkper.cli", *words, "--out", str(out)]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while child.poll() is None and _lines(out) < 2:
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        if child.wait():
            raise RuntimeError("the command failed")
        header, line = (row.split(",") for row in (out / "rounds.csv").read_text().splitlines())
    done = dict(zip(header, line, strict=True))
    return seconds - float(done["train_seconds"]) - float(done["eval_seconds"])


def _lines(folder: Path) -> int:
    table = folder / "rounds.csv"
    return table.read_bytes().count(b"\n") if table.exists() else 0


PROGRAMS = {
    "FedAvg": ("fedavg", "float32"),
    "FedKPer": ("fedkper", "float32"),
    "FedAvg bf16": ("fedavg", "bf16"),
    "FedKPer bf16": ("fedkper", "bf16"),
}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    turns: dict[str, list[Any]] = {name: [] for name in (*PROGRAMS, "plain loop", "rate", "start")}
    memory = 0.0
    for _ in range(TURNS):
        turns["rate"].append(product_rate())
        turns["start"].append(start_up())
        with multiprocessing.get_context("spawn").Pool(1) as fresh:  # our settings must not help it
            turns["plain loop"].append(fresh.apply(plain))
        for name, (method, precision) in PROGRAMS.items():
            lines, used = ours(method, precision)
            turns[name] += lines
            memory = max(memory, used)

    def median(name: str, column: str) -> float:
        return statistics.median(line[column] for line in turns[name])

    seconds = {name: median(name, "seconds") for name in PROGRAMS}
    seconds["plain loop"] = statistics.median(turns["plain loop"])
    rate = statistics.median(turns["rate"])
    flop = train_flop(2 * TRAIN * 5) + 2 * FORWARD * (GLOBAL + 20 * TEST + 2 * TEST)
    rows = [
        {
            "program": name,
            "s a round": f"{seconds[name]:.2f}",
            "training": f"{median(name, 'train_seconds'):.2f}" if name in PROGRAMS else "",
            "evaluation": f"{median(name, 'eval_seconds'):.2f}" if name in PROGRAMS else "",
            "plain loop's time / its": f"{seconds['plain loop'] / seconds[name]:.2f}",
        }
        for name in seconds
    ]
    results = {
        "seconds": seconds,
        "plain_over_fedavg": seconds["plain loop"] / seconds["FedAvg"],
        "fedkper_over_fedavg": seconds["FedKPer"] / seconds["FedAvg"],
        "fedavg_over_flop_time": seconds["FedAvg"] / (flop / rate),
        "float32_over_bf16": seconds["FedAvg"] / seconds["FedAvg bf16"],
        "product_rate_gflops": rate / 1e9,
        "training_share_of_product_rate": train_flop(2 * TRAIN * 5)
        / median("FedAvg", "train_seconds")
        / rate,
        "start_up_seconds": statistics.median(turns["start"]),
        "peak_memory_mb": memory,
    }
    show("One federated round", rows, results, options.json)
    targets = {
        "plain loop / FedAvg": (f"{results['plain_over_fedavg']:.2f}", "1.8 or more"),
        "FedKPer / FedAvg": (f"{results['fedkper_over_fedavg']:.2f}", "1.15 or less"),
        f"round / its operations at the product rate, {rate / 1e9:.0f} GFLOP/s": (
            f"{results['fedavg_over_flop_time']:.2f}",
            "1.25 or less",
        ),
        "training / product rate": (f"{results['training_share_of_product_rate']:.0%}", "75 % or more"),
        "FedAvg in float32 / in bf16": (f"{results['float32_over_bf16']:.2f}", "1.5 or more"),
        "start-up to the first round": (f"{results['start_up_seconds']:.1f} s", "below 5 s"),
        "peak memory, all processes": (f"{memory:,.0f} MB", "below 1,500 MB"),
    }
    print()
    print(markdown([{"": k, "measured": v, "to reach": to} for k, (v, to) in targets.items()]))


if __name__ == "__main__":
    main()
