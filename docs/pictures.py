"""Draws the pictures of the documentation, from the runs in results/ and docs/benchmarks/scale.json:

python docs/pictures.py
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedkper import plots
from fedkper.methods import METHODS
from fedkper.paper import efficiency, figures, runs
from fedkper.runfiles import read_curves

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
SERIES = {
    "clients": "clients, 10 of them sampled",
    "sampled": "sampled clients, of 1,000",
    "images": "images of a client",
    "model": "model, MB",
}


def scale(series: dict[str, dict[str, Any]], path: Path) -> None:
    """Seconds and memory of a round over what grows, both axes logarithmic, with the fitted slopes."""
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    rows = (("seconds", "slope", "s a round", "#0072B2"), ("mb", "memory_slope", "MB needed", "#D55E00"))
    for column, (name, label) in enumerate(SERIES.items()):
        one = series[name]
        for row, (key, slope, unit, colour) in enumerate(rows):
            ax = figure.add_subplot(2, len(SERIES), 1 + column + row * len(SERIES))
            ax.loglog(one["x"], one[key], marker="o", color=colour)
            ax.set_ylim(min(one[key]) / 3, max(one[key]) * 3)
            ax.minorticks_off()
            ax.set_xticks(one["x"], [f"{v:,.3g}" if v < 1000 else f"{v:,.0f}" for v in one["x"]])
            ax.set_yticks([])
            for x, y in zip(one["x"], one[key], strict=True):
                said = f"{y:.2f}" if y < 10 else f"{y:,.0f}"
                ax.annotate(said, (x, y), (0, 8), textcoords="offset points", ha="center", fontsize=9)
            ax.margins(x=0.12)
            ax.set_title(f"slope {one[slope]:.2f}", fontsize=10, loc="left")
            ax.set_xlabel(label if row else "")
            ax.set_ylabel("" if column else unit)
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.25, linewidth=0.6)
    figure.suptitle("The cost of a round (slope 0 is flat, 1 is linear)", fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def of_the_paper() -> None:
    """The paper's Figures 3 to 5 from our runs."""
    found, _ = runs.find([ROOT / "results" / "blood", ROOT / "results" / "efficiency"])
    setting = runs.settings(found)[0][0]
    pair = ("FedAvg", "FedKPer")
    for name, methods, draw in (
        ("fig3", pair, figures.peaks_and_drops),
        ("fig4", tuple(figures.ARMS), figures.ablation),
        ("fig5", (*pair, "FedKPer: cached=false"), efficiency.efficiency),
    ):
        chosen = figures.chosen(setting, methods, name)
        for path in figures.write(partial(draw, setting, chosen), PICTURES / f"blood-{name}"):
            if path.suffix == ".pdf":
                path.unlink()


def main() -> None:
    blood = ROOT / "results" / "blood"
    arms = {
        "FedAvg": "methods/bloodmnist_fedavg_seed1",
        "FedKPer": "methods/bloodmnist_fedkper_seed1",
        "loss only": "arms/bloodmnist_fedkper-aggregation-false_seed1",
        "aggregation only": "arms/bloodmnist_fedkper-distillation-false_seed1",
    }
    curves = {name: read_curves(blood / folder) for name, folder in arms.items()}
    title = "BloodMNIST, 20 clients, Dirichlet 0.1, 2 clients a round, seed 1"
    pair = {name: curves[name] for name in ("FedAvg", "FedKPer")}
    plots.curves(pair, PICTURES / "blood.png", title)
    plots.curves(curves, PICTURES / "blood-arms.png", title)
    for name, method in METHODS.items():
        own = {method.__name__: read_curves(blood / f"methods/bloodmnist_{name}_seed1")}
        plots.curves({"FedAvg": curves["FedAvg"], **own}, PICTURES / f"methods-{name}.png", title)
    of_the_paper()
    measured = json.loads((ROOT / "docs" / "benchmarks" / "scale.json").read_text())
    scale(measured["series"], PICTURES / "scale.png")


if __name__ == "__main__":
    main()
