"""What each method costs: a client's work a round relative to FedAvg's, its state and its traffic.

One client with 480 images of 28 x 28 x 3, 5 epochs in batches of 12, one thread. FedAvg is measured anew
between the methods, and each figure is the median of the ratios. "first" is a client's first round, "second"
its second (FedALA then learns its weights until they settle), "later" the rounds after that.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

from common import arguments, show, workload
from fedkper.execute import settle
from fedkper.method import client_round
from fedkper.methods import METHODS, parse
from fedkper.site import Site
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


def measure(name: str) -> dict[str, Any]:
    """In a new process: the rounds' CPU seconds over FedAvg's around them, bytes, and the peak memory."""
    settle()
    site = workload(name, 10)
    fedavg = replace(site, method=parse("fedavg"))
    before, found, after = visits(fedavg), visits(site), visits(fedavg)
    reference = statistics.median([*before["seconds"][1:], *after["seconds"][1:]])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**found, "ratios": [s / reference for s in found["seconds"]], "peak": peak}


def visits(site: Site) -> dict[str, Any]:
    """CPU seconds of a client's first rounds, and bytes of its state, upload and download."""
    method = site.method
    shared, own = method.init(site.model, site.model.init())
    down, seconds = nbytes(shared), []
    for visit in range(VISITS):
        start = time.process_time()
        update = client_round(method, site.task([0], visit), shared, own)
        seconds.append(time.process_time() - start)
        shared, own = method.merge(shared, update), update.own
    return {"seconds": seconds, "state": nbytes(own), "up": method.payload(update), "down": down}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows: list[dict[str, Any]] = []
    dense = 0
    for name in METHODS:
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            found = fresh.apply(measure, (name,))
        first, second, *rest = found["ratios"]
        dense = dense or found["up"] + found["down"]  # FedAvg comes first
        rows.append(
            {
                "method": name,
                "first": f"{first:.2f}",
                "second": f"{second:.2f}",
                "later": f"{statistics.median(rest):.2f}",
                "specification": f"{EXPECTED[name]:.2f}",
                "state MB": f"{found['state'] / 1e6:.2f}",
                "up MB": f"{found['up'] / 1e6:.3f}",
                "traffic / FedAvg's": f"{(found['up'] + found['down']) / dense:.4f}",
                "peak MB": f"{found['peak']:.0f}",
            }
        )
        print(f"{name}: {rows[-1]['later']}", file=sys.stderr)
    show("A client's work relative to FedAvg's", rows, {}, options.json)


if __name__ == "__main__":
    main()
