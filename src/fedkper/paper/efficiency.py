"""The paper's efficiency figure from runs: accuracy over seconds, at equal times (specification 6.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedkper import tables
from fedkper.paper.figures import axes, heading
from fedkper.paper.runs import Found, Setting, seconds
from fedkper.plots import COLOURS, STYLES, WINDOW, running_mean

# Shares of the baseline's time at which the figure is read.
QUARTERS = (0.25, 0.5, 0.75, 1.0)
# Which of the seconds of training, merging and scoring count.
CLOCKS = {"training and merging": 2, "training, merging and scoring": 3}


class Reading(NamedTuple):
    """Figure 5 at one moment: a method against the baseline that had the same time."""

    clock: str
    share: float
    seconds: float
    method: str
    acc: float | None
    baseline_acc: float | None
    smooth_points: float | None
    """The difference of means of 9 rounds, which one lucky round moves less"""

    @property
    def points(self) -> float | None:
        return None if self.acc is None or self.baseline_acc is None else self.acc - self.baseline_acc

    @property
    def relative(self) -> float | None:
        return self.points / self.baseline_acc if self.points is not None and self.baseline_acc else None


class _Timed(NamedTuple):
    """A run's rounds on a clock: when each was finished, its accuracy, and the accuracy smoothed."""

    finished: NDArray[np.float64]
    acc: NDArray[np.float64]
    smooth: NDArray[np.float64]

    def at(self, moments: NDArray[np.float64], smooth: bool = False) -> NDArray[np.float64]:
        """The accuracy of the last round finished by then; undefined before the first."""
        index = np.searchsorted(self.finished, moments, side="right") - 1
        values = self.smooth if smooth else self.acc
        return np.where(index >= 0, values[np.maximum(index, 0)], np.nan)


def quickest(found: Sequence[Found]) -> NDArray[np.float64]:
    """Seconds of training, merging and scoring of each round [T, 3], of the seed that was quickest in it.

    Whatever else a machine does only adds to them.
    """
    least: NDArray[np.float64] = np.min([seconds(one) for one in found], axis=0)
    return least


def _timed(found: Sequence[Found], parts: int) -> list[_Timed]:
    timed = []
    times = quickest(found)[:, :parts].sum(1).cumsum()
    for one in found:
        acc = np.array([np.nan if a is None else a for a in one.curves.global_acc])
        timed.append(_Timed(times, acc, running_mean(acc)))
    return timed


def _mean_at(runs: Sequence[_Timed], moments: NDArray[np.float64], smooth: bool) -> NDArray[np.float64]:
    """Mean over seeds; undefined while any has no round, so that no seed comes in later."""
    values: NDArray[np.float64] = np.mean([run.at(moments, smooth) for run in runs], axis=0)
    return values


def efficiency(setting: Setting, runs: Mapping[str, list[Found]]) -> Any:
    """Figure 5: global accuracy over seconds on both clocks, and where the seconds of a round go."""
    figure, panels = axes(1, 3, 2.9, width_ratios=(3, 3, 2))
    seeds = [r.experiment.seed for r in next(iter(runs.values()))]
    for ax, (clock, parts) in zip(panels[0], CLOCKS.items(), strict=False):
        for number, (name, found) in enumerate(runs.items()):
            timed = _timed(found, parts)
            moments = np.linspace(0, min(run.finished[-1] for run in timed), 2001)
            look = {"color": COLOURS[number % 8], "linestyle": STYLES[number % 4]}
            ax.step(moments, _mean_at(timed, moments, False), where="post", alpha=0.3, linewidth=0.7, **look)
            ax.plot(moments, _mean_at(timed, moments, True), label=tables.plain(name), **look)
        ax.set_ylim(0, 1)
        ax.set_xlim(left=0)
        ax.set_xlabel("seconds")
        ax.set_title(clock)
    panels[0, 0].set_ylabel("global accuracy")
    panels[0, 0].legend(loc="lower right", fontsize=7)
    _shares(panels[0, 2], runs)
    several = ", mean of seeds" if len(seeds) > 1 else ""
    note = f"accuracy{several}: thin after every round, thick as mean of {WINDOW} rounds"
    figure.supxlabel(note, fontsize=7.5, x=0.01, ha="left")
    figure.suptitle(heading(setting, seeds), fontsize=9, x=0.01, ha="left")
    return figure


def _shares(ax: Any, runs: Mapping[str, list[Found]]) -> None:
    """Seconds a round, after the first, which also warms up."""
    looks = (("train", "", COLOURS[5]), ("merge", "", COLOURS[6]), ("score", "////", "#DDDDDD"))
    rates = [seconds_a_round(found) for found in runs.values()]
    base = np.zeros(len(runs))
    for part, (label, hatch, colour) in enumerate(looks):
        values = np.array([rate[part] for rate in rates])
        look = {"color": colour, "hatch": hatch, "edgecolor": "#888888", "linewidth": 0}
        ax.barh(range(len(runs)), values, 0.55, left=base, label=label, **look)
        base += values
    for at, total in enumerate(base):
        ax.text(total, at, f" {total:.2f}", va="center", fontsize=7)
    names = [
        f"{tables.plain(name)}\n{t:.2f} + {m:.2f} + {s:.2f}"
        for name, (t, m, s) in zip(runs, rates, strict=True)
    ]
    ax.set_yticks(range(len(runs)), names, fontsize=6.5)
    ax.set_ylim(len(runs) - 0.5, -0.5 - 0.3 * len(runs))  # room for the legend
    ax.set_xlim(0, 1.3 * float(base.max()) or 1)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("seconds a round")
    ax.set_title("where they go")
    look = {"handlelength": 1.0, "handletextpad": 0.4, "columnspacing": 0.8}
    ax.legend(loc="upper left", ncols=3, fontsize=6.5, borderaxespad=0, **look)


def seconds_a_round(found: Sequence[Found]) -> tuple[float, float, float]:
    """Mean seconds of training, merging and scoring over the rounds after the first."""
    times = quickest(found)
    train, merge, score = np.mean(times[1:] if len(times) > 1 else times, axis=0)
    return float(train), float(merge), float(score)


def readings(runs: Mapping[str, list[Found]]) -> list[Reading]:
    """Each method against the first at quarters of the first one's time, on both clocks."""
    baseline, *others = runs
    found = []
    for clock, parts in CLOCKS.items():
        base = _timed(runs[baseline], parts)
        end = float(min(run.finished[-1] for run in base))
        for name in others:
            timed = _timed(runs[name], parts)
            for share in QUARTERS:
                moment = np.array([share * end])
                theirs, own = (float(_mean_at(r, moment, False)[0]) for r in (base, timed))
                smooth = float((_mean_at(timed, moment, True) - _mean_at(base, moment, True))[0])
                accs = (_defined(own), _defined(theirs), _defined(smooth))
                found.append(Reading(clock, share, share * end, name, *accs))
    return found


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else value
