"""The paper's Figures 3 and 4 from runs (specification 6.1 and 6.2), and how figures are written.

matplotlib is imported only where one is drawn. The same runs give the same bytes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkper import tables, tree
from fedkper.averages import over_seeds
from fedkper.errors import InputError, RunError
from fedkper.forgetting import consistency
from fedkper.metrics import summarise
from fedkper.paper.runs import Found, Setting
from fedkper.paper.table import block, listing
from fedkper.plots import COLOURS

# The arms of Figure 4 by the names of their rows, with what of FedKPer is in them.
ARMS = {
    "FedAvg": "FedAvg",
    "FedKPer: aggregation=false": "loss only\n(Eq. 3)",
    "FedKPer: distillation=false": "aggregation\nonly (Eq. 6)",
    "FedKPer": "FedKPer",
}
WIDTH = 7.0
_STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "text.parse_math": False,  # a name with dollars is no formula
    "svg.hashsalt": "fedkper",  # else every picture has other ids
    "pdf.fonttype": 42,
}
_PRINTED: Any = {"color": "black", "linestyle": "--", "linewidth": 1.2}
_ARM_COLOURS = (COLOURS[0], COLOURS[4], COLOURS[2], COLOURS[1])
_DROP, _LOST, _RECORD = "#E69F00", "#BBBBBB", "#555555"
Draw = Callable[[], Any]


def write(draw: Draw, stem: Path) -> list[Path]:
    """Draws and writes STEM.svg and STEM.pdf. Raises RunError that names the file if it cannot be."""
    import matplotlib

    written = []
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name may have any letters
        figure = draw()
        for kind, no_date in (("svg", {"Date": None}), ("pdf", {"CreationDate": None})):
            data, path = io.BytesIO(), stem.with_name(f"{stem.name}.{kind}")
            figure.savefig(data, format=kind, metadata=no_date)
            try:
                tree.write(path, data.getvalue())
            except OSError as error:
                raise RunError(f"{path}: cannot be written ({error.strerror})") from error
            written.append(path)
    return written


def chosen(setting: Setting, methods: Sequence[str], figure: str) -> dict[str, list[Found]]:
    """The finished runs of these methods, of the seeds that all have, on the partition with the most runs.

    Raises InputError that says which method is missing.
    """
    there = setting.finished(setting.partitions()[0])
    missing = [m for m in methods if m not in there]
    if missing:
        raise InputError(f"{figure} of {setting.title}: no finished run of {', '.join(missing)}")
    common = set.intersection(*({r.experiment.seed for r in there[m]} for m in methods))
    if not common:
        raise InputError(f"{figure} of {setting.title}: no seed that {', '.join(methods)} have in common")
    return {m: [r for r in there[m] if r.experiment.seed in common] for m in methods}


def axes(rows: int, columns: int, height: float, **shared: Any) -> tuple[Any, Any]:
    """A figure as wide as a page's text, and its panels [rows, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def heading(setting: Setting, seeds: Sequence[int]) -> str:
    """What a figure is about."""
    e = setting.experiment
    name = tables.short(tables.plain(setting.dataset), 40)
    dealt = f"Dirichlet {e.alpha:g}" if e.partition == "dirichlet" else f"partition {e.partition}"
    which = f"seed{'s' if len(seeds) > 1 else ''} {listing(seeds)}"
    return f"{name}, {e.clients:,} clients, {e.rounds:,} rounds, {dealt}, {which}"


# --- Figure 3 -----------------------------------------------------------------------------------------


def peaks_and_drops(setting: Setting, runs: Mapping[str, list[Found]]) -> Any:
    """Figure 3: global accuracy of the first seed of each method, its peaks and what is lost in between."""
    figure, panels = axes(len(runs), 1, 0.7 + 2.0 * len(runs), sharex=True, sharey=True)
    for number, (ax, (name, found)) in enumerate(zip(panels[:, 0], runs.items(), strict=True)):
        acc = found[0].curves.global_acc
        values = np.array([np.nan if a is None else a for a in acc])
        rounds = np.arange(1, len(values) + 1)
        c = consistency(acc)
        for i, j in c.windows:
            _drop(ax, values, i, j, facecolor=_DROP, alpha=0.45, linewidth=0)
        if c.peaks and c.peaks[-1] < len(acc) - 1:
            last = c.peaks[-1]
            _drop(
                ax, values, last, len(acc) - 1, facecolor="none", edgecolor=_LOST, hatch="////", linewidth=0
            )
        record = list(accumulate(np.nan_to_num(values, nan=-1.0), max))
        ax.step(rounds, record, where="post", color=_RECORD, linewidth=0.8, linestyle=":")
        ax.plot(rounds, values, color=COLOURS[number % 2], marker="." if len(values) < 40 else "")
        peaks = list(c.peaks)
        ax.plot(rounds[peaks], values[peaks], "^", color="black", markersize=3.5)
        _largest(ax, values, c.windows)
        ax.set_title(f"{tables.plain(name)}: {_in_words(c)}")
        ax.set_ylabel("global accuracy")
        ax.set_ylim(0, 1.12)  # room for the note on the largest drop
        ax.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    panels[-1, 0].set_xlabel("round")
    panels[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    _legend_of_drops(figure, setting, [r[0].experiment.seed for r in runs.values()][:1])
    return figure


def _in_words(c: Any) -> str:
    if c.c.value is None:
        return f"consistency undefined ({c.c.reason})"
    windows = f"{c.c.used} window{'s' if c.c.used > 1 else ''} between peaks"
    return f"consistency {c.c.value:.3f} over {windows}; drops alone {c.drop_only.value:.3f}"


def _drop(ax: Any, values: NDArray[np.float64], first: int, last: int, **look: Any) -> None:
    """What is below the peak at `first` until the round `last`, both counted from 0."""
    rounds = np.arange(first, last + 1)
    there = rounds[~np.isnan(values[rounds])]
    below = values[there] <= values[first]
    ax.fill_between(there + 1, values[there], values[first], where=below, interpolate=True, **look)


def _largest(ax: Any, values: NDArray[np.float64], windows: Sequence[tuple[int, int]]) -> None:
    """Marks the window with the largest mean relative drop: the paper's example."""
    rates = [consistency(list(values[i : j + 1])).drop_only.value for i, j in windows]
    lost = [0.0 if rate is None else 1 - rate for rate in rates]
    if not lost or max(lost) <= 0:
        return
    i, j = windows[lost.index(max(lost))]
    ax.axvspan(i + 1, j + 1, color="#56B4E9", alpha=0.18, linewidth=0)
    ax.annotate(
        f"rounds {i + 1} to {j + 1}: {100 * max(lost):.0f} % below the peak on average",
        (i + 1.3, 1.105) if i < len(values) / 2 else (j + 0.7, 1.105),
        ha="left" if i < len(values) / 2 else "right",
        va="top",
        fontsize=7,
    )


def _legend_of_drops(figure: Any, setting: Setting, seeds: Sequence[int]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Line2D([], [], color="black", marker="^", linestyle="", markersize=4, label="peak: a record high"),
        Line2D([], [], color=_RECORD, linestyle=":", label="record so far"),
        Patch(facecolor=_DROP, alpha=0.45, label="drop until it recovers"),
        Patch(facecolor="#56B4E9", alpha=0.18, label="largest drop"),
        Patch(facecolor="none", edgecolor=_LOST, hatch="////", label="not recovered, not counted"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=7, handlelength=1.6)
    figure.suptitle(heading(setting, seeds), fontsize=9, x=0.01, ha="left")


# --- Figure 4 -----------------------------------------------------------------------------------------


def ablation(setting: Setting, runs: Mapping[str, list[Found]]) -> Any:
    """Figure 4: global and local accuracy of the four arms: mean and deviation over seeds, a dot a seed."""
    from matplotlib.lines import Line2D

    figure, panels = axes(1, 2, 2.9, sharey=True)
    published = {row.method: row.published for row in block(setting, list(ARMS)).rows if row.published}
    for ax, column, title in (
        (panels[0, 0], "global_acc", "global accuracy"),
        (panels[0, 1], "local_acc", "local accuracy"),
    ):
        for at, (name, found) in enumerate(runs.items()):
            _bar(ax, at, [summarise(r.curves)[column]["mean"] for r in found])
            if name in published:
                ax.plot([at - 0.4, at + 0.4], [published[name][column].mean] * 2, **_PRINTED)
        ax.set_xticks(range(len(runs)), [ARMS[name] for name in runs], fontsize=7.5)
        ax.grid(axis="x", visible=False)
        ax.set_title(f"{title}, mean over rounds")
    panels[0, 0].set_ylim(0, 1)
    seeds = [r.experiment.seed for r in next(iter(runs.values()))]
    several = len(seeds) > 1
    handles = [Line2D([], [], label="published in Table 1", **_PRINTED)] if published else []
    if several:
        handles.append(Line2D([], [], color="black", marker="o", linestyle="", markersize=3, label="a seed"))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=7.5)
    note = " (mean ± deviation over seeds)" if several else ""
    figure.suptitle(heading(setting, seeds) + note, fontsize=9, x=0.01, ha="left")
    return figure


def _bar(ax: Any, at: int, values: Sequence[float | None]) -> None:
    """A bar as high as the mean, with the number at its foot, where no line crosses it."""
    over = over_seeds(values)
    if over.mean.value is None:
        ax.text(at, 0.03, "undefined", ha="center", fontsize=7.5)
        return
    ax.bar(at, over.mean.value, 0.66, color=_ARM_COLOURS[at], alpha=0.75)
    ax.text(at, 0.03, f"{over.mean.value:.3f}", ha="center", fontsize=8.5, fontweight="bold")
    if over.std_sample.value is not None:
        ax.errorbar(at, over.mean.value, over.std_sample.value, color="black", capsize=3, linewidth=1)
        ax.plot([at + 0.22] * len(values), values, "o", color="black", markersize=2.2)
