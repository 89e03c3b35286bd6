"""Pictures as SVG: where lines, bands, bars and labels lie. The template draws them in the page's colours.

All coordinates are in a box of WIDTH x HEIGHT that the page scales; an undefined value leaves a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from fedkper.averages import Curve, defined
from fedkper.scores import Bin

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 10, 34
# Curves of so many rounds are drawn as their mean over a window of rounds.
SMOOTHED, WINDOW = 40, 9


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """A method's curve; `path` and `band` are the d of an SVG path."""

    name: str
    number: int
    path: str
    band: str
    shown: bool


@dataclass(frozen=True)
class LineChart:
    key: str
    title: str
    axis: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    zero: float | None
    rounds: int
    smoothed: bool
    values: Mapping[str, Sequence[float | None]]
    """by method, as drawn, for hovering"""


def line_chart(
    key: str,
    title: str,
    axis: str,
    curves: Mapping[str, tuple[Curve, Curve]],
    numbers: Mapping[str, int],
    shown: set[str],
) -> LineChart | None:
    """Curves over rounds with bands of one deviation; None where no method has a value."""
    smooth = {name: (smoothed(mean), smoothed(deviation)) for name, (mean, deviation) in curves.items()}
    floor, ceiling = (-1.0, 1.0) if key == "global_bwt" else (0.0, 1.0)  # no band beyond what can be
    extent = [
        min(max(v + sign * (d or 0), floor), ceiling)
        for mean, deviation in smooth.values()
        for v, d in zip(mean, deviation, strict=True)
        if v is not None
        for sign in (-1, 1)
    ]
    rounds = max((len(mean) for mean, _ in smooth.values()), default=0)
    if not extent:
        return None
    ticks = _ticks(min(extent), max(extent))
    low, high = ticks[0], ticks[-1]

    def x(t: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (t / (rounds - 1) if rounds > 1 else 0.5)

    def y(v: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - v) / (high - low)

    def joined(values: Sequence[float | None]) -> str:
        return _path([None if v is None else (x(t), y(v)) for t, v in enumerate(values)])

    def band(mean: Sequence[float | None], deviation: Sequence[float | None]) -> str:
        path = ""
        rows = enumerate(zip(mean, deviation, strict=True))
        for known, stretch in groupby(rows, key=lambda row: None not in row[1]):
            pairs = [(t, v or 0.0, d or 0.0) for t, (v, d) in stretch] if known else []
            there = [(x(t), y(min(v + d, ceiling))) for t, v, d in pairs]
            back = [(x(t), y(max(v - d, floor))) for t, v, d in reversed(pairs)]
            path += _path([*there, *back]) + "Z" if len(pairs) > 1 else ""
        return path

    lines = tuple(
        Line(name, numbers[name], joined(mean), band(mean, deviation), name in shown)
        for name, (mean, deviation) in smooth.items()
    )
    step = next(s * 10**e for e in range(7) for s in (1, 2, 5) if rounds / (s * 10**e) <= 5)
    steps = sorted({1, *range(step, rounds + 1, step)})
    return LineChart(
        key,
        title,
        axis,
        lines,
        tuple(Tick(x(t - 1), str(t)) for t in steps),
        tuple(Tick(y(v), _label(v, ticks)) for v in ticks),
        y(0) if low < 0 < high else None,
        rounds,
        rounds >= SMOOTHED,
        {name: [None if v is None else round(v, 4) for v in mean] for name, (mean, _) in smooth.items()},
    )


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Centred mean over WINDOW rounds, of the defined ones; a round without a value stays without.

    Curves of fewer than SMOOTHED rounds are left as they are.
    """
    finite = [v if v is not None and math.isfinite(v) else None for v in values]
    if len(finite) < SMOOTHED:
        return finite
    half = WINDOW // 2
    near = [defined(finite[max(0, t - half) : t + half + 1]) for t in range(len(finite))]
    return [None if v is None else fmean(part) for v, part in zip(finite, near, strict=True)]


def _path(at: Sequence[tuple[float, float] | None]) -> str:
    """Straight lines from point to point, a new start after each gap; a lone point is a dot."""
    parts: list[str] = []
    pen = False
    for number, point in enumerate(at):
        if point is None:
            pen = False
            continue
        parts.append(f"{'L' if pen else 'M'}{point[0]:.1f} {point[1]:.1f}")
        if not pen and (number + 1 == len(at) or at[number + 1] is None):
            parts.append("h.01")
        pen = True
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about five of them."""
    span = max(high - low, 0.02)
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(f for f in (1, 2, 2.5, 5, 10) if f * step >= span / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _label(value: float, ticks: Sequence[float]) -> str:
    digits = next(d for d in (2, 3, 4, 5) if d == 5 or all(abs(round(t, d) - t) < 1e-9 for t in ticks))
    return f"{value:.{digits}f}".replace("-", "−") if abs(value) > 1e-12 else "0"


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram in a square of 220: bars of accuracy at each confidence."""

    bars: tuple[tuple[float, float, float, float, str], ...]
    """(x, y, width, height, text)"""
    round: int
    ece: float | None
    samples: int
    rows: tuple[tuple[float, float, int], ...]
    """(confidence, accuracy, samples)"""


def reliability(bins: Sequence[Bin], of: int, round: int, ece: float | None) -> Reliability:
    """From the filled bins out of `of`."""
    side = 200.0
    made = tuple(
        (
            20 + side * number / of,
            10 + side * (1 - accuracy),
            side / of - 1,
            side * accuracy,
            f"confidence {confidence:.2f}, right {accuracy:.2f}, {count:,} samples",
        )
        for number, count, confidence, accuracy in bins
    )
    rows = tuple((confidence, accuracy, count) for _, count, confidence, accuracy in bins)
    return Reliability(made, round, ece, sum(b[1] for b in bins), rows)
