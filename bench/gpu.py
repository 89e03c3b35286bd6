"""What fedkper does on an accelerator: first whether it is right, then how fast it is and what it needs.

    PYTHONPATH=src python bench/gpu.py --json gpu.json

Makes all its data, needs torch, numpy and safetensors only, and ends within --budget seconds: what no longer
fits in is left out with a note. Every section prints a table and is in the JSON file as soon as it is done.
Ends with 1 if a result is wrong or a section failed. `--device cpu --quick` is a dry run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import gpu_layers as layers
from common import machine
from fedkper import memory
from fedkper.experiment import PRESETS
from fedkper.method import client_round
from fedkper.methods import METHODS
from fedkper.methods.fedavg import FedAvg
from fedkper.site import Site
from gpu_runs import (
    ROUNDS,
    SEEDS,
    Shape,
    accuracy_gap,
    data,
    gap,
    group,
    largest,
    published,
    ride,
    sites,
    steps,
    without_graphs,
)

BLOOD_TARGET, TABLE_TARGET = 30.0, 600.0  # seconds
# Of one training step and of a whole small federation: how far the device may be from the CPU, as a share of
# how far the model moved (Euclidean norm), and in any accuracy. The sums are rounded in another order there.
STEP_LIMIT, RUN_LIMIT, ACCURACY_LIMIT = 2e-3, 5e-2, 0.03
# FedKD cuts at a rank, FedALA stops at a threshold: a rounding error can decide, and then much differs.
DECISIONS = ("fedkd", "fedala")


@dataclass
class Bench:
    """The options, the clock and what was found so far."""

    device: str
    quick: bool
    methods: tuple[str, ...]
    ends: float
    path: Path | None
    found: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def left(self) -> float:
        return self.ends - time.perf_counter()

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"

    def precisions(self) -> tuple[str, ...]:
        return layers.PRECISIONS if self.cuda else ("float32", "bf16")

    def tell(self, name: str, value: Any) -> None:
        """Keeps a result and writes all of them."""
        self.found[name] = value
        if self.path:
            self.path.write_text(json.dumps({**self.found, "faults": self.faults}, indent=2) + "\n")


def table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([str(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    print(f"\n{title}\n")
    for row in cells:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip(), flush=True)


def correctness(bench: Bench) -> None:
    """Each method, 3 seeds riding, on the device against one client after another on the CPU."""
    size = 8 if bench.quick else 28
    shape = Shape(size, 3, 8, 120 if bench.quick else 300, 200, 6, fraction=0.7, alpha=0.5)
    seeds = SEEDS[:2] if bench.quick else SEEDS
    whole = max(len(part) for part in data(shape)[1].train)
    rows: list[dict[str, Any]] = []
    for name in bench.methods:
        method = "fedala:most=12" if name == "fedala" else name
        one = {"method": method, "seeds": seeds, "rounds": 1, "epochs": 1, "batch": whole}
        two = {"method": method, "seeds": seeds, "rounds": 2, "epochs": 1}
        row: dict[str, Any] = {"method": name}
        for label, settings, limit in (("a step", one, STEP_LIMIT), ("2 rounds", two, RUN_LIMIT)):
            runs = sites(shape, **settings)
            initial = [run.model.init() for run in runs]
            right = ride(runs, "cpu", 1)
            found = {"": ride(runs, bench.device, 100)}
            if bench.cuda and label == "2 rounds":
                with without_graphs():
                    found[", no graphs"] = ride(runs, bench.device, 100)
            for kind, ridden in found.items():
                off, accuracy = gap(ridden.shared, right.shared, initial), accuracy_gap(ridden, right)
                row[label + kind] = f"{off:.1e}"
                if kind == "":
                    row[f"largest, {label}"] = f"{largest(ridden.shared, right.shared):.0e}"
                row[f"accuracy{kind}"] = round(max(accuracy, row.get(f"accuracy{kind}", 0)), 4)
                wrong = not off <= limit or not accuracy <= ACCURACY_LIMIT
                if wrong and not (name in DECISIONS and label == "2 rounds" and off < 0.5):
                    bench.faults.append(f"{name}, {label}{kind}: {off:.1e} of the way off, {accuracy:.3f}")
        if name in ("fedavg", "fedkper"):
            for precision in bench.precisions()[1:]:
                ridden = ride(sites(shape, **two, precision=precision), bench.device, 100)
                row[precision] = f"{gap(ridden.shared, right.shared, initial):.1e}"
                row[f"accuracy, {precision}"] = round(accuracy_gap(ridden, right), 4)
        rows.append(row)
        bench.tell("correctness", {"limits": [STEP_LIMIT, RUN_LIMIT, ACCURACY_LIMIT], "rows": rows})
        if bench.left() < 0:
            break
    table(
        "Device against CPU: distance of the parameters as a share of how far they moved "
        f"(limits {STEP_LIMIT:g} and {RUN_LIMIT:g}), largest difference, and of accuracies "
        f"(limit {ACCURACY_LIMIT:g})",
        rows,
    )


def rates(bench: Bench) -> None:
    rows = layers.product_rates(bench.device, bench.quick)
    table("Matrix products, TFLOP/s", rows)
    bench.tell("rates", rows)


def convolutions(bench: Bench) -> None:
    start = time.perf_counter()
    rows = layers.convolutions(
        bench.device, bench.quick, lambda: min(bench.left(), start + 60 - time.perf_counter())
    )
    table("A step of the paper's CNN (forward and backward, batch 12), by how lanes are convolved", rows)
    said = layers.winners(rows)
    print("\n" + "\n".join(said))
    bench.tell("convolutions", {"rows": rows, "said": said})


def seconds(bench: Bench, work: Callable[[], Any], times: int = 3) -> float:
    """Median of a few runs, after one."""
    taken = []
    for _ in range(1 if bench.quick else times + 1):
        layers.wait(bench.device)
        start = time.perf_counter()
        work()
        layers.wait(bench.device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:] or taken)


def profile(bench: Bench) -> None:
    """What a training step consists of, and what a fit costs beside its steps."""
    shape = Shape(8, 3, 4, 200, 20, 10, 0.2, 0.5) if bench.quick else published("paper-blood")
    rows, kernels = [], {}
    for method in ("fedavg", "fedkper"):
        for precision in bench.precisions():
            with layers.arithmetic(precision):
                ready = group(sites(shape, method, precision=precision), bench.device)
                longest = max(len(ready.site.train_part(c)) for c in ready.clients)
                per = -(-longest // ready.site.experiment.batch)
                few, many = (
                    seconds(bench, lambda g=ready: g.train(1)),
                    seconds(bench, lambda g=ready: g.train(3)),
                )
                step = (many - few) / (2 * per)
                row: dict[str, Any] = {"method": method, "precision": precision, "lanes": len(ready.clients)}
                row |= {"steps an epoch": per, "us a step": round(1e6 * step)}
                row["ms a fit beside them"] = round(1e3 * (few - per * step), 1)
                if bench.cuda:
                    with without_graphs():
                        one = seconds(bench, lambda g=ready: g.train(1), 1)
                        row["us a step, no graphs"] = round(1e6 * one / per)
                        names, busy = _kernels(lambda g=ready: g.train(1))
                    row["kernels a step"] = round(sum(n for n, _ in names.values()) / per)
                    row["us of kernels"] = round(1e6 * busy / per)
                    row["device busy, graphs"] = f"{busy / per / step:.0%}"
                    row["device busy, none"] = f"{busy / one:.0%}"
                    kernels[f"{method}, {precision}"] = names
                rows.append(row)
    table("A training step of round 1's clients, 3 seeds riding", rows)
    if not bench.cuda:
        print("\nkernels: skipped on a CPU")
    for label, names in kernels.items():
        top = sorted(names.items(), key=lambda item: -item[1][1])[:8]
        table(
            f"Kernels by time, {label}",
            [{"kernel": k[:90], "calls": n, "ms": round(1e3 * s, 2)} for k, (n, s) in top],
        )
    bench.tell(
        "profile", {"rows": rows, "kernels": {k: dict(list(v.items())[:40]) for k, v in kernels.items()}}
    )


def _kernels(work: Callable[[], Any]) -> tuple[dict[str, tuple[int, float]], float]:
    """Calls and seconds of each kernel, and the seconds of all of them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watch:
        work()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in watch.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            calls, taken = found.get(event.name, (0, 0.0))
            found[event.name] = calls + 1, taken + event.time_range.elapsed_us() / 1e6
    return found, sum(s for _, s in found.values())


def speed_of(bench: Bench, runs: Sequence[Site], limit: float, most: int = ROUNDS) -> dict[str, Any]:
    """Seconds a round after the first two, and of 100 rounds: training by its steps, the rest by rounds."""
    ridden = ride(runs, bench.device, most=most, until=time.perf_counter() + limit)
    skip = min(2, len(ridden.seconds) - 1)
    counted, e = ridden.seconds[skip:], runs[0].experiment
    by_round = [ridden.lines[i : i + len(runs)] for i in range(0, len(ridden.lines), len(runs))][skip:]
    parts = {
        p: [sum(line[f"{p}_seconds"] for line in r) for r in by_round] for p in ("train", "merge", "eval")
    }
    done = [steps(runs[0], t) for t in range(skip, skip + len(counted))]
    every = sum(steps(runs[0], t) for t in range(ROUNDS))
    total = sum(parts["train"]) * every / sum(done) + ROUNDS * (sum(counted) - sum(parts["train"])) / len(
        counted
    )
    mean = {p: round(statistics.mean(values), 4) for p, values in parts.items()}
    row = {"method": e.method, "precision": e.precision, "rounds": len(counted)}
    row |= {"s a round": round(statistics.mean(counted), 4), **mean}
    row["other"] = round(statistics.mean(counted) - sum(mean.values()), 4)
    row |= {
        "steps a round": round(sum(done) / len(done)),
        "us a step": round(1e6 * sum(parts["train"]) / sum(done)),
    }
    return row | {"s for 100 rounds": round(total, 1)}


def speed(bench: Bench) -> None:
    """The paper's blood cells, 3 seeds riding, the global model scored every round."""
    shape = Shape(8, 3, 4, 200, 20, 10, 0.2, 0.5) if bench.quick else published("paper-blood")
    rows = []
    for precision in bench.precisions():
        for method in ("fedavg", "fedkper"):
            runs = sites(shape, method, precision=precision)
            rows.append(speed_of(bench, runs, min(10, bench.left()), 3 if bench.quick else 40))
            bench.tell("speed", {"target": BLOOD_TARGET, "rows": rows})
    table(f"paper-blood, 3 seeds together; to reach: 100 rounds in {BLOOD_TARGET:g} s", rows)


def every_method(bench: Bench) -> None:
    """Table 1: twelve methods, three data sets, 3 seeds riding, a few rounds of each."""
    presets = {name: published(name) for name in PRESETS if name.startswith("paper-")}
    if bench.quick:
        presets = {"tiny": Shape(8, 1, 4, 120, 20, 6, 0.4)}
    left, rows = len(presets) * len(bench.methods), []
    for name, shape in presets.items():
        for method in bench.methods:
            share = max(0.0, min(6.0, (bench.left() - 60) / left))
            if share < 0.5 and not bench.quick:
                print(f"note: {name} {method} left out, the time is up")
                continue
            runs = sites(shape, method)
            rows.append({"data": name} | speed_of(bench, runs, share, 3 if bench.quick else 12))
            left -= 1
            _free(bench)
            bench.tell("methods", {"target": TABLE_TARGET, "rows": rows})
    table("Every method on the paper's three data sets, 3 seeds together", rows)
    total = sum(row["s for 100 rounds"] for row in rows)
    print(
        f"\nTable 1, {len(rows)} of {len(presets) * len(bench.methods)} combinations, one after another: "
        f"{total:.0f} s (to reach: {TABLE_TARGET:g} s)\nFedALA learns "
        "longer at a client's second visit: its 100 rounds depend on how many of those were measured."
    )
    bench.tell("methods", {"target": TABLE_TARGET, "total": total, "rows": rows})


def space(bench: Bench) -> None:
    """Memory a lane against what is reckoned with, and larger models."""
    shape = Shape(8, 3, 4, 200, 20, 10, 0.2, 0.5) if bench.quick else published("paper-blood")
    rows: list[dict[str, Any]] = []
    if bench.cuda:
        free, whole = torch.cuda.mem_get_info(bench.device)
        for method in ("fedavg", "fedkper", "fedkd"):
            rows += _doubling(bench, sites(shape, method, (1,))[0], method, free, whole)
        table("Memory of lanes: largest client of paper-blood", rows)
    else:
        print("\nmemory of lanes: skipped on a CPU")
    large = _large(bench)
    table("ResNet-18 with GroupNorm, 48 images a client, batch 12", large)
    bench.tell("space", {"lanes": rows, "resnet18": large})


def _doubling(bench: Bench, site: Site, method: str, free: int, whole: int) -> list[dict[str, Any]]:
    """Twice as many lanes, again and again, until half of the card is in use."""
    largest = max(range(len(site.train_index)), key=lambda k: len(site.train_index[k]))
    there = site.to(bench.device)
    fits, reckoned = memory.lanes_that_fit(there, bench.device, free), memory.lane_bytes(there)
    rows, lanes = [], 16
    while bench.left() > 30 and lanes <= fits:
        _free(bench)
        base = torch.cuda.memory_allocated()
        ready = group([site], bench.device, [largest] * lanes)
        torch.cuda.reset_peak_memory_stats()
        # A few steps, captured ones among them: memory does not grow with their number.
        cut = replace(ready.site, experiment=replace(site.experiment, epochs=1))
        start = time.perf_counter()
        client_round(cut.method, cut.task(ready.clients, 0), ready.shared, ready.own)
        layers.wait(bench.device)
        peak = torch.cuda.max_memory_allocated() - base
        row = {"method": method, "lanes": lanes, "s an epoch": round(time.perf_counter() - start, 2)}
        row |= {"peak MB": peak >> 20, "MB a lane": round(peak / lanes / 2**20, 1)}
        row |= {"reckoned MB a lane": round(reckoned / 2**20, 1), "lanes chosen": fits}
        rows.append(row | {"reserved MB": torch.cuda.max_memory_reserved() >> 20})
        del ready
        if 2 * peak > whole / 2 or rows[-1]["s an epoch"] > 4:
            break
        lanes *= 2
    return rows


def _large(bench: Bench) -> list[dict[str, Any]]:
    """Step time of larger images and a larger model, in as many lanes as are chosen, 6 at most."""
    rows = []
    for size in (16,) if bench.quick else (64, 224):
        for precision in bench.precisions() if not bench.quick else ("float32",):
            if bench.left() < 15:
                print(f"note: ResNet-18 at {size} pixels in {precision} left out, the time is up")
                continue
            _free(bench)
            shape = Shape(size, 3, 4, 240 if not bench.quick else 80, 8, 4, alpha=100.0)
            site = sites(shape, "fedavg", (1,), model="resnet18", precision=precision, epochs=1)[0]
            with layers.arithmetic(precision):
                chosen = memory.lanes_that_fit(
                    site.to(bench.device), bench.device, None if bench.cuda else 2**30
                )
                lanes = min(chosen, 2 if bench.quick else 6)
                ready = group([site], bench.device, [k % 4 for k in range(lanes)])
                if bench.cuda:
                    torch.cuda.reset_peak_memory_stats()
                taken = seconds(bench, lambda g=ready: g.train(1), 1)
            per = max(-(-len(site.train_part(c)) // 12) for c in ready.clients)
            row = {"pixels": size, "precision": precision, "lanes chosen": chosen, "lanes": lanes}
            row |= {"steps": per, "ms a step": round(1e3 * taken / per, 1)}
            if bench.cuda:
                row["peak MB"] = torch.cuda.max_memory_allocated() >> 20
            rows.append(row)
    return rows


class Waiting(FedAvg):
    """A loss that waits for the device in every step, as a user's own may."""

    def loss(self, *args: Any) -> Any:
        value = super().loss(*args)
        return value * 1.0 if float(value.detach().sum()) == 0 else value


def waiting(bench: Bench) -> None:
    """A step that cannot be captured must still train rightly; last, as it leaves a broken capture behind."""
    shape = Shape(8, 3, 4, 120, 20, 4, 0.5, 0.5)
    runs = sites(shape, "fedavg", (1,), rounds=2)
    right = ride(runs, "cpu", 1)
    found = ride([replace(runs[0], method=Waiting())], bench.device, 100)
    off = gap(found.shared, right.shared, [runs[0].model.init()])
    if not off <= RUN_LIMIT:
        bench.faults.append(f"a loss that waits for the device: {off:.1e} of the way off")
    print(f"\nA loss that waits for the device: {off:.1e} of the way off (limit {RUN_LIMIT:g})")
    bench.tell("waiting", off)


def _free(bench: Bench) -> None:
    gc.collect()
    if bench.cuda:
        torch.cuda.empty_cache()


SECTIONS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "correctness": (correctness, 30),
    "rates": (rates, 5),
    "convolutions": (convolutions, 10),
    "profile": (profile, 20),
    "speed": (speed, 30),
    "methods": (every_method, 60),
    "space": (space, 20),
    "waiting": (waiting, 5),
}
"""Each with the seconds that must be left for it to start."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = os.environ.get("OUT")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether all of it runs")
    parser.add_argument("--budget", type=float, default=480, help="seconds for everything")
    parser.add_argument("--only", default="", help=f"sections, by commas: {','.join(SECTIONS)}")
    parser.add_argument(
        "--methods", default=",".join(METHODS), help="for those that go through all, by commas"
    )
    parser.add_argument(
        "--json", type=Path, default=Path(out, "gpu.json") if out else None, help="write the results here too"
    )
    return parser.parse_args()


def main() -> None:
    options, start = arguments(), time.perf_counter()
    chosen = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := set(chosen) - set(SECTIONS):
        sys.exit(f"--only: no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no such device here; --device cpu --quick is a dry run")
    methods = tuple(options.methods.split(","))
    bench = Bench(options.device, options.quick, methods, start + options.budget, options.json)
    card = torch.cuda.get_device_name(options.device) if bench.cuda else "none"
    bench.tell("machine", machine() | {"device": card, "cuda": torch.version.cuda})
    print(", ".join(f"{k} {v}" for k, v in bench.found["machine"].items()))
    took: dict[str, Any] = {}
    for name in chosen:
        section, needs = SECTIONS[name]
        if bench.left() < needs and not bench.quick:
            print(f"\nnote: {name} left out, {bench.left():.0f} s are left")
            took[name] = "left out"
            continue
        begun = time.perf_counter()
        try:
            section(bench)
        except Exception as error:  # the other sections are still worth having
            traceback.print_exc()
            bench.faults.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
        _free(bench)
        took[name] = round(time.perf_counter() - begun, 1)
        bench.tell("seconds", took)
    print("\nseconds: " + ", ".join(f"{k} {v}" for k, v in took.items()))
    print("\n".join(["", *(f"WRONG: {fault}" for fault in bench.faults)]) if bench.faults else "\nall right")
    sys.exit(1 if bench.faults else 0)


if __name__ == "__main__":
    main()
