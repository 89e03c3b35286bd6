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
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from common import CLASSES, GLOBAL, SHAPE, TEST, TRAIN, arguments, peak_memory, show, train_flop, workload
from fedkper.execute import cores, settle
from fedkper.models import CNN
from fedkper.record import Record
from fedkper.simulate import simulate

TURNS, ROUNDS = 3, 3  # the first round of a turn warms up and is not counted


def ours(method: str) -> tuple[list[dict[str, float]], float]:
    """Lines of rounds.csv with the whole seconds of each round, and the peak memory of all processes."""
    site, lines, memory = workload(method, ROUNDS), [], 0.0
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


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    turns: dict[str, list[Any]] = {"fedavg": [], "fedkper": [], "plain": [], "rate": []}
    memory = 0.0
    for _ in range(TURNS):
        turns["rate"].append(product_rate())
        with multiprocessing.get_context("spawn").Pool(1) as fresh:  # our settings must not help it
            turns["plain"].append(fresh.apply(plain))
        for method in ("fedavg", "fedkper"):
            lines, used = ours(method)
            turns[method] += lines
            memory = max(memory, used)
    seconds = {m: statistics.median(line["seconds"] for line in turns[m]) for m in ("fedavg", "fedkper")}
    seconds["plain"] = statistics.median(turns["plain"])
    rate = statistics.median(turns["rate"])
    training = statistics.median(line["train_seconds"] for line in turns["fedavg"])
    share = train_flop(2 * TRAIN * 5) / training / rate
    rows = [
        {
            "program": name,
            "s a round": f"{seconds[name]:.2f}",
            "training": ""
            if name == "plain"
            else f"{statistics.median(line['train_seconds'] for line in turns[name]):.2f}",
            "evaluation": ""
            if name == "plain"
            else f"{statistics.median(line['eval_seconds'] for line in turns[name]):.2f}",
            "plain loop's time / its": f"{seconds['plain'] / seconds[name]:.2f}",
        }
        for name in ("fedavg", "fedkper", "plain")
    ]
    results = {
        "seconds": seconds,
        "plain_over_fedavg": seconds["plain"] / seconds["fedavg"],
        "fedkper_over_fedavg": seconds["fedkper"] / seconds["fedavg"],
        "product_rate_gflops": rate / 1e9,
        "training_share_of_product_rate": share,
        "peak_memory_mb": memory,
    }
    show("One federated round", rows, results, options.json)
    print(f"\nplain loop / FedAvg           {results['plain_over_fedavg']:.2f}   (to reach: 1.8 or more)")
    print(f"FedKPer / FedAvg              {results['fedkper_over_fedavg']:.2f}   (to reach: 1.15 or less)")
    print(f"training / product rate       {share:.0%}   (to reach: 75 % or more of {rate / 1e9:.0f} GFLOP/s)")
    print(f"peak memory, all processes    {memory:.0f} MB   (to reach: below 1,500 MB)")


if __name__ == "__main__":
    main()
