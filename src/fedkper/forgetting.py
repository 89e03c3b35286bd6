"""Forgetting: the consistency of an accuracy curve, and backward transfer. Rounds count from 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fedkper.averages import NO_ROUND, Curve, Number, Row, defined, mean


@dataclass(frozen=True)
class Consistency:
    """Consistency C = 1 - AIPFR of a curve and its variants (specification 2.3; paper, IPFR and Fig. 3)."""

    peaks: tuple[int, ...]
    """Rounds at which the curve reaches or beats everything before; ties count, so the first round is one."""
    windows: tuple[tuple[int, int], ...]
    """Consecutive peaks (first and last round, both inside the window) that went into C."""
    skipped: tuple[tuple[int, int], ...]
    """Windows that start from an accuracy of 0: their relative drop does not exist."""
    ipfr: tuple[float, ...]
    """Mean relative distance from the peak, per window, upper end included, over the window's steps."""
    aipfr: Number
    c: Number
    """The headline. Every window has equal weight; can be negative after a fast rise."""
    drop_only: Number
    """Only values below the peak count: the rise at the end of a window is no longer forgetting."""
    with_tail: Number
    """One more window from the last peak to the last round, so that a collapse at the end is seen."""
    drop_only_with_tail: Number


def consistency(acc: Row) -> Consistency:
    """Consistency of the accuracy curve `acc` [T], all four variants (specification 2.3).

    Undefined rounds are left out of the series before anything is computed: their neighbours become adjacent
    and a window's length counts defined rounds only. Peaks and windows are given as rounds of the full curve.
    C is undefined, not 1, without a complete window: a curve that only falls would otherwise score perfect.
    """
    rounds = [t for t, a in enumerate(acc) if a is not None and math.isfinite(a)]
    a = defined(acc)
    peaks = [i for i, best in enumerate(accumulate(a, max)) if a[i] == best]
    windows = list(pairwise(peaks))
    used = [w for w in windows if a[w[0]] > 0]
    tail = [(peaks[-1], len(a) - 1)] if peaks and peaks[-1] < len(a) - 1 and a[peaks[-1]] > 0 else []
    if windows:
        reason = "every window between two record highs starts from an accuracy of 0"
    elif a:
        reason = "no window: the curve has no second record high"
    else:
        reason = NO_ROUND

    def one_minus(ws: list[tuple[int, int]], drop_only: bool) -> Number:
        rate = mean((_relative_drop(a[i : j + 1], drop_only) for i, j in ws), reason)
        return rate if rate.value is None else Number(1 - rate.value, "", rate.used)

    def in_rounds(ws: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((rounds[i], rounds[j]) for i, j in ws)

    ipfr = tuple(_relative_drop(a[i : j + 1], False) for i, j in used)
    return Consistency(
        peaks=tuple(rounds[i] for i in peaks),
        windows=in_rounds(used),
        skipped=in_rounds([w for w in windows if a[w[0]] <= 0]),
        ipfr=ipfr,
        aipfr=mean(ipfr, reason),
        c=one_minus(used, False),
        drop_only=one_minus(used, True),
        with_tail=one_minus(used + tail, False),
        drop_only_with_tail=one_minus(used + tail, True),
    )


def _relative_drop(window: list[float], drop_only: bool) -> float:
    """IPFR of one window [peak, ..., end]: distances from the peak, over the peak and the number of steps."""
    peak = window[0]
    drops = [max(peak - a, 0.0) if drop_only else abs(peak - a) for a in window]
    return math.fsum(drops) / peak / (len(window) - 1)


@dataclass(frozen=True)
class BackwardTransfer:
    """Backward transfer; negative is forgetting, closer to 0 is better (specification 2.2)."""

    per_round: Curve
    """Mean over the clients of an earlier round; None while there is none (round 0)."""
    clients: tuple[int, ...]
    """How many clients are in each round's mean."""
    mean: Number
    """Mean over the rounds where it is defined."""
    undefined_as_zero: Number
    """The official code's: an undefined round counts as 0. Undefined if nothing was ever evaluated."""
    final: Number
    """The last round's value."""
    never_sampled: tuple[int, ...]
    """Clients that took part in no round and are therefore in no mean."""


def transfer(reference: dict[int, float | None], row: Row, clients: Sequence[int]) -> Number:
    """One round of `backward_transfer`: its value. `reference` {client: accuracy then} is moved on."""
    pairs = [defined((row[k], then)) for k, then in reference.items()]
    reference.update({k: row[k] for k in clients})
    return mean(pair[0] - pair[1] for pair in pairs if len(pair) == 2)


def backward_transfer(acc: Sequence[Row], sampled: Sequence[Sequence[int]]) -> BackwardTransfer:
    """How much the global model has lost on clients that it saw before (specification 2.2).

    `acc` [T][K]: accuracy of round t's aggregated model on client k's local test set, None where the client
    has none or was not evaluated. `sampled` [T]: the clients that trained in round t. A client's reference is
    the accuracy at the end of its last earlier visit, replaced after the difference is taken: a returning
    client is compared with its previous visit. A client without a value now or without one at its last visit
    is left out of the round's mean.
    """
    reference: dict[int, float | None] = {}
    rounds: list[Number] = []
    for row, clients in zip(acc, sampled, strict=True):
        rounds.append(transfer(reference, row, clients))
    values = [r.value for r in rounds]
    nothing = "no client that was sampled before has a local test accuracy"
    seen = any(defined(row) for row in acc)
    return BackwardTransfer(
        per_round=tuple(values),
        clients=tuple(r.used for r in rounds),
        mean=mean(values, nothing),
        undefined_as_zero=mean([v or 0.0 for v in values] if seen else [], nothing),
        final=mean(values[-1:], nothing),
        never_sampled=tuple(k for k in range(len(acc[0]) if len(acc) else 0) if k not in reference),
    )
