"""What each method costs: a client's work a round relative to FedAvg's, its state and its traffic.

One client with 480 images of 28 x 28 x 3, 5 epochs in batches of 12, one thread. FedAvg's round is measured
anew before and after each of the method's, in the same process. "first" is a client's first round, "second"
its second (FedALA then learns its weights until they settle), "later" the one after that.
"""

from __future__ import annotations

import multiprocessing
import resource
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
VISITS = 3


def measure(name: str) -> dict[str, Any]:
    """In a new process: the rounds' CPU seconds over FedAvg's around them, bytes, and the peak memory."""
    settle()
    site = workload(name, 10)
    fedavg = replace(site, method=parse("fedavg"))
    ours, theirs = Client(site), Client(fedavg)
    theirs.visit()  # warms up
    ratios, before = [], theirs.visit()
    for _ in range(VISITS):
        mine, after = ours.visit(), theirs.visit()
        ratios.append(2 * mine / (before + after))
        before = after
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ratios": ratios, "peak": peak, "state": nbytes(ours.own), "up": ours.up, "down": ours.down}


class Client:
    """A client that is alone in its federation, round by round."""

    def __init__(self, site: Site) -> None:
        self.site, self.round, self.up = site, 0, 0
        self.shared, self.own = site.method.init(site.model, site.model.init())
        self.down = nbytes(self.shared)

    def visit(self) -> float:
        """CPU seconds of the next round, without the merge."""
        method, task = self.site.method, self.site.task([0], self.round)
        start = time.process_time()
        update = client_round(method, task, self.shared, self.own)
        seconds = time.process_time() - start
        self.round, self.up = self.round + 1, method.payload(update)
        self.shared, self.own = method.merge(self.shared, update), update.own
        return seconds


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows: list[dict[str, Any]] = []
    dense = 0
    for name in METHODS:
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            found = fresh.apply(measure, (name,))
        first, second, later = found["ratios"]
        dense = dense or found["up"] + found["down"]  # FedAvg comes first
        rows.append(
            {
                "method": name,
                "first": f"{first:.2f}",
                "second": f"{second:.2f}",
                "later": f"{later:.2f}",
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
