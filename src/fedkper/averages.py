"""Averages of values that may be undefined.

What is undefined is None with a reason, never 0 and never NaN; a value that is None, NaN or infinite counts
as undefined and is left out of every mean, and each mean says how many values it used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Row = Sequence[float | None]
Curve = tuple[float | None, ...]

NO_ROUND = "no round has a value"


class Number(NamedTuple):
    """A result: `value` is None where undefined, then `reason` says why. `used` counts the values in it."""

    value: float | None
    reason: str = ""
    used: int = 0


def defined(values: Iterable[float | None]) -> list[float]:
    """The defined values, in order: without None, NaN and infinities."""
    return [float(v) for v in values if v is not None and math.isfinite(v)]


def mean(values: Iterable[float | None], reason: str = NO_ROUND) -> Number:
    """Unweighted mean of the defined values; `reason` is given when there is none.

    The sum is exact (fsum), so the order of clients or rounds never changes the result.
    """
    v = defined(values)
    return Number(math.fsum(v) / len(v), "", len(v)) if v else Number(None, reason)


def std(values: Iterable[float | None], ddof: int = 0, reason: str = NO_ROUND) -> Number:
    """Standard deviation of the defined values: population (ddof 0) or sample (ddof 1)."""
    v = defined(values)
    if len(v) <= ddof:
        return Number(None, reason)
    centre = math.fsum(v) / len(v)
    return Number(math.sqrt(math.fsum((x - centre) ** 2 for x in v) / (len(v) - ddof)), "", len(v))


def mean_curve(curves: Sequence[Row]) -> Curve:
    """Mean over runs, round by round; a round's mean is over the runs where it is defined."""
    return tuple(mean(values).value for values in zip(*curves, strict=True))


class OverSeeds(NamedTuple):
    """Mean over seeds; `std_sample` (ddof 1) is undefined for one seed, `std_population` is then 0."""

    mean: Number
    std_sample: Number
    std_population: Number


def over_seeds(values: Iterable[float | None]) -> OverSeeds:
    """Mean and deviations of one number per seed (specification 2.7); seeds without a value are left out."""
    v = defined(values)
    reason = "no seed has a value"
    few = "one seed has no deviation: run at least 2" if v else reason
    return OverSeeds(mean(v, reason), std(v, 1, few), std(v, 0, reason))
