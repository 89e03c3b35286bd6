"""Pictures: curves of runs, and who holds what. matplotlib is imported only where one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkper.metrics import Curves, per_round

# Okabe and Ito's palette: told apart with every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8B8000")
STYLES = ("-", "--", ":", "-.")
# Curves of so many rounds are shown with their mean over a window of rounds.
SMOOTHED, WINDOW = 40, 9


def running_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred mean over WINDOW rounds, of those that exist; undefined values are left out."""
    half = WINDOW // 2
    parts = (values[max(0, t - half) : t + half + 1] for t in range(len(values)))
    return np.array([np.nan if np.isnan(p).all() else np.nanmean(p) for p in parts])


def _figure(columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def curves(runs: Mapping[str, Curves], path: Path, title: str) -> None:
    """Global accuracy, local accuracy and backward transfer over rounds, a line a run."""
    figure, axes = _figure(3, 13, 3.8)
    panels = (
        ("global_acc", "global accuracy", "generalization: patients nobody has seen"),
        ("local_acc", "local accuracy (mean of sampled clients)", "personalization: the site's own patients"),
        ("global_bwt", "backward transfer", "forgetting: 0 is none"),
    )
    for ax, (key, label, heading) in zip(axes, panels, strict=True):
        for number, (name, run) in enumerate(runs.items()):
            values = np.array([row[key] for row in per_round(run)], dtype=float)
            rounds = np.arange(1, len(values) + 1)
            style = {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number // len(COLOURS) % 4]}
            if len(values) < SMOOTHED:
                ax.plot(rounds, values, marker=".", linewidth=1.6, label=name, **style)
            else:
                ax.plot(rounds, values, linewidth=0.8, alpha=0.35, **style)
                ax.plot(rounds, running_mean(values), linewidth=2, label=name, **style)
        ax.set_xlabel("round")
        ax.set_ylabel(label)
        ax.set_title(heading, fontsize=10, loc="left")
    for ax in axes:
        ax.xaxis.get_major_locator().set_params(integer=True)
    for ax in axes[:2]:
        ax.set_ylim(0, 1)
    axes[2].axhline(0, color="#888888", linewidth=0.8)
    axes[0].legend(frameon=False, fontsize=9)
    smoothed = any(len(run.global_acc) >= SMOOTHED for run in runs.values())
    note = f"   (thick: mean of {WINDOW} rounds)" if smoothed else ""
    figure.suptitle(title + note, fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def holdings(
    train: NDArray[np.int64], test: NDArray[np.int64], classes: Sequence[str], path: Path, title: str
) -> None:
    """Who holds what: a bar a client, stacked by class, local test part hatched; counts [K, C]."""
    clients = len(train)
    figure, (ax,) = _figure(1, min(4 + 0.32 * clients, 30), 4.6)
    base = np.zeros(clients)
    palette = [*COLOURS[:6], "#999999", "#882255", "#44AA99", "#DDCC77", "#332288"]
    for c, name in enumerate(classes):
        colour = palette[c % len(palette)]
        ax.bar(range(clients), train[:, c], bottom=base, color=colour, width=0.8, label=_short(name))
        base += train[:, c]
        ax.bar(
            range(clients),
            test[:, c],
            bottom=base,
            color=colour,
            width=0.8,
            hatch="////",
            edgecolor="white",
            linewidth=0,
        )
        base += test[:, c]
    ax.set_ylim(0, 1.04 * float(base.max()))
    ax.set_xlabel("client")
    ax.set_ylabel("samples (hatched: local test part)")
    if clients <= 60:
        ax.set_xticks(range(clients))
    ax.legend(frameon=False, fontsize=8, ncols=1, loc="upper left", bbox_to_anchor=(1, 1))
    ax.set_title(title, fontsize=10, loc="left")
    figure.savefig(path, dpi=130)


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else name[: most - 1].rstrip() + "…"
