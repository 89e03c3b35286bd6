"""Draws the pictures of the documentation from the runs in results/: python docs/pictures.py"""

from __future__ import annotations

from pathlib import Path

from fedkper import plots
from fedkper.methods import METHODS
from fedkper.record import read_curves

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"


def main() -> None:
    blood, short = ROOT / "results" / "paper-blood", ROOT / "results" / "methods-blood"
    arms = {
        "FedAvg": "fedavg-seed1",
        "FedKPer": "fedkper-seed1",
        "loss only": "fedkper-aggregation-false-seed1",
        "aggregation only": "fedkper-distillation-false-seed1",
    }
    runs = {name: read_curves(blood / folder) for name, folder in arms.items()}
    title = "BloodMNIST, 20 clients, Dirichlet 0.1, 2 clients a round, seed 1"
    pair = {name: runs[name] for name in ("FedAvg", "FedKPer")}
    plots.curves(pair, PICTURES / "blood.png", title)
    plots.curves(runs, PICTURES / "blood-arms.png", title)
    reference = read_curves(short / "fedavg-seed1")
    for name in METHODS:
        own = {} if name == "fedavg" else {name: read_curves(short / f"{name}-seed1")}
        plots.curves({"fedavg": reference, **own}, PICTURES / f"methods-{name}.png", title)


if __name__ == "__main__":
    main()
