"""One round of fedkper beside other federated-learning systems: the same arrays, weights and clients.

Every system runs in its own environment (made below --envs, taken as it is where it is there) and in
processes of its own. They take turns, --repeats times; the first round of a turn warms up and is not counted.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common import CLIENTS, GLOBAL, SHAPE, TEST, TRAIN, arguments, show
from fedkper import models
from fedkper.data import synthetic
from fedkper.sample import sampled_clients
from peers_measure import Turn, adopt_orphans, measure

HERE = Path(__file__).parent / "peers"
TORCH = "torch==2.13.0"
ALPHA = 0.1
QUIET = 0.05  # a round counts as undisturbed while other programs take less than this share of the machine
EPOCHS, BATCH = 5, 12
TARGETS = {"fedavg": 1.4, "fedkper": 1.7, "fedavg-bf16": 2.0, "fedkper-bf16": 2.5}


class Unusable(Exception):
    """Why a system is not measured, in one sentence."""


@dataclass(frozen=True)
class Peer:
    """How a system is installed and started."""

    packages: tuple[str, ...]
    command: tuple[str, ...]
    processes: str
    environment: dict[str, str] = field(default_factory=dict)


CORES = len(os.sched_getaffinity(0))
PEERS = {
    "pfl": Peer(
        ("pfl==0.6.0",),
        ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={CORES}", "run_pfl.py"),
        "torchrun, a process a core",
        {"OMP_NUM_THREADS": "1"},
    ),
    "fluke": Peer(("fluke-fl==0.8.1",), ("run_fluke.py",), "one process"),
    "flower": Peer(
        ("flwr[simulation]==1.42.0", "ray==2.55.1"),
        ("run_flower.py",),
        "Ray, an actor a core",
        {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"},
    ),
}


class Entry(NamedTuple):
    """A row of the table: one system, method and kind of settings."""

    system: str
    method: str
    settings: str


def main() -> None:
    options = _options()
    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the programs in progress, too
    entries = [Entry("fedkper", method, "") for method in TARGETS]
    skipped = {"blazefl": "needs Python 3.14"}
    with tempfile.TemporaryDirectory() as folder:
        envs = options.envs or Path(folder)
        pythons = {"fedkper": Path(sys.executable)}
        for name in options.peers:
            try:
                pythons[name] = _environment(envs.resolve() / name, PEERS[name])
            except Unusable as error:
                skipped[name] = str(error)
                continue
            for settings in options.settings:
                entries += [Entry(name, method, settings) for method in ("fedavg", "distilling")]
        data = Path(folder) / "peers.npz"
        np.savez(data, **workload(options.rounds))
        turns: dict[Entry, list[Turn]] = {entry: [] for entry in entries}
        try:
            for repeat in range(options.repeats):
                for entry in entries:
                    turns[entry].append(_turn(entry, pythons[entry.system], data, options.rounds))
                    _progress(repeat, entry, turns[entry][-1])
        except KeyboardInterrupt:
            print("interrupted: the table has what was done until then")
        versions = {name: _versions(python) for name, python in pythons.items()}
    _results(turns, skipped, versions, options)


def _options() -> Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, help="rounds a turn, the first not counted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--settings", nargs="+", choices=["default", "tuned"], default=["default", "tuned"])
    parser.add_argument(
        "--envs", type=Path, help="folder of the peers' environments, kept (else thrown away)"
    )
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: at least 2, since the first is not counted")
    return options


def workload(rounds: int) -> dict[str, NDArray[Any]]:
    """Everything that decides the work: drawings of cells, clients of one size with a Dirichlet mix of
    classes, the clients of each round and the initial weights.
    """
    drawn = synthetic.load(seed=1, train=CLIENTS * (TRAIN + TEST), test=GLOBAL)
    random = np.random.default_rng(1)
    classes = len(drawn.classes)
    left = [list(random.permutation(np.flatnonzero(drawn.train_y == c))) for c in range(classes)]
    parts = np.empty((CLIENTS, TRAIN + TEST), np.int64)
    for part in parts:
        mix = random.dirichlet(np.full(classes, ALPHA))
        for place in range(len(part)):
            odds = np.where([bool(pool) for pool in left], mix + 1e-9, 0)  # of the classes that are left
            part[place] = left[random.choice(classes, p=odds / odds.sum())].pop()
    weights = models.build("cnn", SHAPE, classes, 1).init()
    return {
        "train_x": drawn.train_x,
        "train_y": drawn.train_y,
        "test_x": drawn.test_x,
        "test_y": drawn.test_y,
        "train_parts": parts[:, :TRAIN],
        "test_parts": parts[:, TRAIN:],
        "schedule": np.array([sorted(sampled_clients(t, CLIENTS, 0.1)) for t in range(rounds)]),
        **{f"init/{name}": leaf[0].numpy() for name, leaf in weights.items()},
    }


def _environment(folder: Path, peer: Peer) -> Path:
    """The Python of a peer's environment, made if need be. Raises Unusable."""
    python = folder / "bin" / "python"
    wanted = [p.split("[")[0].split("==")[0] for p in peer.packages]
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if not set(wanted) <= _versions(python).keys():
        print(f"installing {', '.join(peer.packages)} into {folder}", flush=True)
        plan = json.loads(_pip(python, "--dry-run", "--report", "-", TORCH) or "{}")
        names = [item["metadata"]["name"] for item in plan.get("install", [])]
        if any(name.startswith("nvidia") for name in names):
            raise Unusable(f"pip would take a CUDA build of {TORCH}; let it find the CPU build")
        _pip(python, TORCH)
        _pip(python, *peer.packages, TORCH)
    return python


def _pip(python: Path, *args: str) -> str:
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *args], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unusable(f"pip install {args[0]}: {(lines or ['failed'])[-1]}")
    return done.stdout


def _versions(python: Path) -> dict[str, str]:
    command = [python, "-m", "pip", "list", "--format", "json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {item["name"]: item["version"] for item in json.loads(found)}


def _turn(entry: Entry, python: Path, data: Path, rounds: int) -> Turn:
    """One start of a system with some rounds of one method."""
    ours = entry.system == "fedkper"
    peer = Peer((), ("run_fedkper.py",), "a process a core") if ours else PEERS[entry.system]
    given = {
        "PEERS_DATA": str(data),
        "PEERS_METHOD": entry.method,
        "PEERS_SETTINGS": entry.settings,
        "PEERS_ROUNDS": str(rounds),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    return measure([str(python), *peer.command], os.environ | peer.environment | given, HERE)


def _progress(repeat: int, entry: Entry, turn: Turn) -> None:
    found = turn.failure or ", ".join(
        f"{s:.2f} s (others {o:.0%})" for s, o in zip(turn.seconds[1:], turn.others[1:], strict=True)
    )
    print(f"{repeat + 1}: {entry.system:8} {entry.method:13} {entry.settings:8} {found}", flush=True)


def _row(entry: Entry, turns: list[Turn]) -> dict[str, Any]:
    """Medians over the counted rounds of all turns; over the undisturbed ones, if there are any."""
    done = [turn for turn in turns if not turn.failure]
    if not done:
        return {"failure": turns[0].failure if turns else "not reached"}
    counted = [
        round for turn in done for round in list(zip(turn.seconds, turn.cpu, turn.others, strict=True))[1:]
    ]
    quiet = [round for round in counted if round[2] < QUIET]
    seconds, cpu, others = zip(*(quiet or counted), strict=True)
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "cpu_seconds": statistics.median(cpu),
        "rounds_counted": len(seconds),
        "rounds_disturbed": len(counted) - len(quiet),
        "others_share": max(others),
        "peak_pss_mb": max(turn.peak_mb for turn in done),
        "start_seconds": statistics.median(t.first_end - statistics.median(t.seconds[1:]) for t in done),
        "accuracy": [round(statistics.mean(a), 3) for a in zip(*(t.accuracy[1:] for t in done), strict=True)],
        "weights_moved": statistics.mean(t.moved for t in done),
        "steps_a_round": statistics.median(t.steps for t in done),
        "all_rounds": [{"seconds": s, "cpu_seconds": c, "others_share": o} for s, c, o in counted],
    }


def _results(
    turns: dict[Entry, list[Turn]],
    skipped: dict[str, str],
    versions: dict[str, dict[str, str]],
    options: Namespace,
) -> None:
    found = {entry: _row(entry, list_) for entry, list_ in turns.items()}
    rows = []
    for entry, row in found.items():
        if "failure" in row:
            skipped[" ".join(entry)] = row["failure"]
            continue
        ours = found[Entry("fedkper", "fedavg" if entry.method.startswith("fedavg") else "fedkper", "")]
        rows.append(
            {
                "system": entry.system,
                "method": entry.method,
                "settings": entry.settings,
                "s a round": f"{row['seconds']:.2f}",
                "spread": f"{row['fastest']:.2f}-{row['slowest']:.2f}",
                "its time / ours": f"{row['seconds'] / ours['seconds']:.2f}" if "seconds" in ours else "",
                "CPU s": f"{row['cpu_seconds']:.1f}",
                "others": f"{row['others_share']:.0%}",
                "peak MB": f"{row['peak_pss_mb']:.0f}",
                "start s": f"{row['start_seconds']:.1f}",
                "steps": f"{row['steps_a_round']:.0f}" if entry.system != "fedkper" else "",
                "moved": f"{row['weights_moved']:.2f}",
                "accuracy": f"{row['accuracy'][-1]:.3f}",
            }
        )
    ratios = _ratios(found)
    kept = {"torch", "numpy", "pfl", "fluke-fl", "flwr", "ray", "torchmetrics", "fedkper"}
    details = {
        "results": [entry._asdict() | row for entry, row in found.items()],
        "ratios": ratios,
        "not_measured": skipped,
        "versions": {name: {k: v for k, v in all_.items() if k in kept} for name, all_ in versions.items()},
        "settings": {
            "rounds": options.rounds,
            "repeats": options.repeats,
            "clients": CLIENTS,
            "sampled": 2,
            "train_images": TRAIN,
            "test_images": GLOBAL,
            "local_test_images": CLIENTS * TEST,
            "epochs": EPOCHS,
            "batch": BATCH,
            "alpha": ALPHA,
            "processes": {name: peer.processes for name, peer in PEERS.items()},
        },
    }
    show("One round beside other systems", rows, details, options.json)
    for name, reason in skipped.items():
        print(f"not measured: {name}: {reason}")
    for line in ratios:
        verdict = "reached" if line["ratio"] >= line["target"] else "missed"
        print(
            f"best peer ({line['peer']}, {line['settings']}) / {line['ours']:13} {line['ratio']:.2f}   "
            f"(to reach: {line['target']} or more; {verdict})"
        )


def _ratios(found: dict[Entry, dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of our methods, the fastest peer with each kind of settings over it."""
    lines = []
    for settings in ("default", "tuned"):
        for ours, target in TARGETS.items():
            theirs = "fedavg" if ours.startswith("fedavg") else "distilling"
            peers = {
                entry.system: row["seconds"]
                for entry, row in found.items()
                if entry.method == theirs and entry.settings == settings and "seconds" in row
            }
            mine = found[Entry("fedkper", ours, "")].get("seconds")
            if peers and mine:
                best = min(peers, key=lambda name: peers[name])
                line = {"ours": ours, "peer": best, "settings": settings, "target": target}
                lines.append(line | {"ratio": peers[best] / mine})
    return lines


if __name__ == "__main__":
    main()
