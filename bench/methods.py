"""What each method costs: a client's work a round relative to FedAvg's, its state and its traffic.

One client with 480 images of 28 x 28 x 3, 5 epochs in batches of 12, one thread. FedAvg is measured anew
between the methods, and each figure is the median of the ratios. "first" is a client's first round, "second"
its second (FedALA then learns its weights until they settle), "later" the rounds after that.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from typing import Any

from common import arguments, show, workload
from fedkper.execute import settle
from fedkper.method import client_round
from fedkper.methods import METHODS, parse
from fedkper.tree import nbytes

# Specification 4, "cached" where both are given: later rounds, and FedALA's second.
EXPECTED = {
    "fedavg": 1.0,
    "fedcurv": 1.2,
    "moon": 1.13,
    "fedprox": 1.0,
    "fedntd": 1.07,
    "fedas": 1.47,
    "fedala": 1.05,
    "ditto": 2.0,
    "fedper": 1.0,
    "fedkd": 2.0,
    "fedbabu": 1.0,
    "fedkper": 1.13,
}
VISITS = 4


def seconds(name: str) -> tuple[list[float], dict[str, int]]:
    """CPU seconds of the client's first rounds, and bytes of state, upload and download."""
    site = workload(name, 10)
    method = parse(name)
    shared, own = method.init(site.model, site.model.init())
    down, times = nbytes(shared), []
    for visit in range(VISITS):
        start = time.process_time()
        update = client_round(method, site.task([0], visit), shared, own)
        times.append(time.process_time() - start)
        shared, own = method.merge(shared, update), update.own
    return times, {"state": nbytes(own) if own else 0, "up": method.payload(update), "down": down}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    settle()
    rows: list[dict[str, Any]] = []
    _, fedavg = seconds("fedavg")
    for name in METHODS:
        before, _ = seconds("fedavg")
        times, size = seconds(name)
        after, _ = seconds("fedavg")
        reference = statistics.median([*before[1:], *after[1:]])
        first, second = times[0] / reference, times[1] / reference
        later = statistics.median(times[2:]) / reference
        rows.append(
            {
                "method": name,
                "first": f"{first:.2f}",
                "second": f"{second:.2f}",
                "later": f"{later:.2f}",
                "specification": f"{EXPECTED[name]:.2f}",
                "state MB": f"{size['state'] / 1e6:.2f}",
                "up MB": f"{size['up'] / 1e6:.3f}",
                "traffic / FedAvg's": f"{(size['up'] + size['down']) / (fedavg['up'] + fedavg['down']):.4f}",
            }
        )
        print(f"{name}: {later:.2f}", file=sys.stderr)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    show("A client's work relative to FedAvg's", rows, {"peak_memory_mb": peak}, options.json)
    print(f"peak memory of the process {peak:.0f} MB")


if __name__ == "__main__":
    main()
