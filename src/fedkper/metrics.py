"""The metrics of FedKPer: accuracy, forgetting and balance, from the raw per-round curves of a run.

Numbers in, numbers out. What is undefined is None with a reason, never 0 and never NaN. Accuracies are shares
of 1 and are not rounded. Rounds count from 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedkper.averages import Curve, Number, Row, defined, mean, mean_curve, over_seeds, std
from fedkper.errors import InputError
from fedkper.forgetting import Consistency, backward_transfer, consistency, transfer

ONE_PER_RUN = "one number per run, so there is no deviation over rounds"
NO_LOCAL = (
    "no client's own model was scored: no local test part, no update that could be used, or no round yet"
)
# Of the global model on the global test set, beside its accuracy (scores.py).
SCORES = ("global_balanced_acc", "global_f1", "global_auc", "global_ece")


@dataclass(frozen=True)
class LocalCurves:
    """Accuracy of the sampled clients' own models on their own test sets (specification 2.4, 2.5)."""

    mean: Curve
    """Every client counts the same."""
    over_samples: Curve
    """Every test sample counts the same; None where the sizes are unknown."""
    worst: Curve
    clients: tuple[int, ...]
    """How many clients are in each round's values; a client without a local test set is not."""
    worst_last_visit: Number
    """Minimum over all clients seen of the accuracy at their last visit: what matters clinically."""
    consistency: Consistency
    """Of `mean`. It mixes different clients, so part of the movement is sampling, not forgetting."""
    consistency_per_client: Number
    """Mean over clients of the consistency of each one's own visits; `used` counts those that have one."""


def local_curves(local_acc: Sequence[Mapping[int, float | None]], local_n: Mapping[int, int]) -> LocalCurves:
    """Local accuracy curves of a run (specification 2.4 and 2.5).

    `local_acc` [T]: {client: accuracy right after its training in that round} for the sampled clients, None
    for a client without a local test set. `local_n`: {client: number of local test samples}.
    """
    visits: dict[int, list[float]] = {}
    over_samples: list[float | None] = []
    for row in local_acc:
        kept = {k: v for k, value in row.items() for v in defined((value,))}
        for k, v in kept.items():
            visits.setdefault(k, []).append(v)
        total = sum(local_n.get(k, 0) for k in kept)
        over_samples.append(
            math.fsum(local_n.get(k, 0) * v for k, v in kept.items()) / total if total else None
        )
    means = [mean(row.values()) for row in local_acc]
    per_client = [consistency(series).c.value for series in visits.values()]
    last = [series[-1] for series in visits.values()]
    return LocalCurves(
        mean=tuple(m.value for m in means),
        over_samples=tuple(over_samples),
        worst=tuple(min(defined(row.values()), default=None) for row in local_acc),
        clients=tuple(m.used for m in means),
        worst_last_visit=Number(min(last), "", len(last)) if last else Number(None, NO_LOCAL),
        consistency=consistency([m.value for m in means]),
        consistency_per_client=mean(per_client, "no client reached a second record high over its own visits"),
    )


def balance(global_acc: float | None, local_acc: float | None) -> Number:
    """Mean of a run's average global and average local accuracy (specification 2.6); needs both."""
    both = mean((global_acc, local_acc))
    return both if both.used == 2 else Number(None, "needs both the global and the local accuracy")


@dataclass(frozen=True)
class Curves:
    """The raw curves of one run with T rounds and K clients; every metric is computed from these."""

    global_acc: Row
    """[T] accuracy of the aggregated model of each round on the global test set"""
    sampled: Sequence[Sequence[int]]
    """[T] clients that trained in each round, 0 to K - 1"""
    global_on_local: Sequence[Row]
    """[T][K] accuracy of the aggregated model on each client's local test set, None where not evaluated"""
    local_acc: Sequence[Mapping[int, float | None]]
    """[T] {client: accuracy of its own model after training, on its local test set, or None}"""
    local_n: Mapping[int, int]
    """{client: number of local test samples}"""
    scores: Mapping[str, Row] = field(default_factory=dict)
    """{one of SCORES: [T]}, empty where not recorded"""

    def __post_init__(self) -> None:
        lengths = {len(self.global_acc), len(self.sampled), len(self.global_on_local), len(self.local_acc)}
        if len(lengths) != 1:
            raise ValueError(f"the curves of a run need one length, got {sorted(lengths)} rounds")


class _Measured(NamedTuple):
    curves: dict[str, Curve]
    metrics: dict[str, Number]
    variants: dict[str, Number]
    local: LocalCurves


def _measure(run: Curves) -> _Measured:
    """All metrics of one run: the curves of those with a value per round, the headlines, the variants."""
    acc = tuple(run.global_acc)
    bwt = backward_transfer(run.global_on_local, run.sampled)
    rows = [{k: row.get(k) for k in s} for row, s in zip(run.local_acc, run.sampled, strict=True)]
    local = local_curves(rows, run.local_n)
    whole, own = consistency(acc), local.consistency
    curves = {"global_acc": acc, "global_bwt": bwt.per_round, "local_acc": local.mean}
    curves |= {"local_acc_over_samples": local.over_samples, "worst_client_acc": local.worst}
    metrics = {
        "global_acc": mean(acc),
        "global_bwt": bwt.mean,
        "global_consistency": whole.c,
        "local_acc": mean(local.mean, NO_LOCAL),
        "worst_client_acc": mean(local.worst, NO_LOCAL),
        "local_consistency": own.c,
    }
    metrics["balance"] = balance(metrics["global_acc"].value, metrics["local_acc"].value)
    variants = {
        "global_acc_final": mean(acc[-1:], "the last round has no value"),
        "global_acc_last10": mean(acc[-10:]),
        "global_acc_best": mean([max(defined(acc), default=None)]),
        "global_bwt_undefined_as_zero": bwt.undefined_as_zero,
        "global_bwt_final": bwt.final,
        "global_consistency_drop_only": whole.drop_only,
        "global_consistency_with_tail": whole.with_tail,
        "global_consistency_drop_only_with_tail": whole.drop_only_with_tail,
        "local_acc_over_samples": mean(local.over_samples, NO_LOCAL),
        "worst_over_all_clients_last_visit": local.worst_last_visit,
        "local_consistency_drop_only": own.drop_only,
        "local_consistency_with_tail": own.with_tail,
        "local_consistency_drop_only_with_tail": own.drop_only_with_tail,
        "local_consistency_per_client": local.consistency_per_client,
    }
    return _Measured(curves, metrics, variants, local)


def last_round(run: Curves, reference: dict[int, float | None]) -> dict[str, float | None]:
    """The last row of `per_round`, without going through the rounds before.

    `reference` is that of `forgetting.transfer` and is moved on.
    """
    sampled, acc = run.sampled[-1], mean(run.global_acc[-1:]).value
    local = local_curves([{k: run.local_acc[-1].get(k) for k in sampled}], run.local_n)
    bwt = transfer(reference, run.global_on_local[-1], sampled).value
    row = {"global_acc": acc, "global_bwt": bwt, "local_acc": local.mean[0]}
    return row | {"local_acc_over_samples": local.over_samples[0], "worst_client_acc": local.worst[0]}


def per_round(run: Curves) -> list[dict[str, float | None]]:
    """One row per round: global_acc, global_bwt, local_acc, local_acc_over_samples, worst_client_acc."""
    curves = {name: mean_curve([curve]) for name, curve in _measure(run).curves.items()}
    return [dict(zip(curves, row, strict=True)) for row in zip(*curves.values(), strict=True)]


def summarise(run: Curves) -> dict[str, Any]:
    """The JSON summary of one run (specification 2; no NaN in it).

    Each of the seven metrics of the paper's Table 1 has "mean" and "std_rounds" (population, over the rounds
    of this run), a null with "reason" or "std_rounds_reason". "variants" holds the other readings as
    {"value", "reason"}, "scores" the other measures of the global model, also after the last round ("final"),
    "spread" how far the clients lie apart, "counts" what went in: rounds, distinct clients, and per metric
    the number of rounds or windows used.
    """
    m = _measure(run)
    out: dict[str, Any] = {
        name: _entry(mean=number) | _entry(std_rounds=_over_rounds(m.curves.get(name)))
        for name, number in m.metrics.items()
    }
    out["variants"] = {name: _entry(value=number) for name, number in m.variants.items()}
    out["scores"] = {name: _score(run.scores.get(name, ())) for name in SCORES}
    out["spread"] = {name: _spread(values) for name, values in by_client(run).items()}
    out["counts"] = {
        "rounds": len(run.global_acc),
        "clients_sampled": len({k for s in run.sampled for k in s}),
        "clients_with_local_test": sum(n > 0 for n in run.local_n.values()),
        "local_evaluations": sum(m.local.clients),
        "values": {name: number.used for name, number in (m.metrics | m.variants).items()},
    }
    return out


def by_client(run: Curves) -> dict[str, dict[int, float]]:
    """What each client has in the end: its own model at its last visit, and the last global model.

    {"local_acc": {client: accuracy}, "global_on_local_acc": {client: accuracy}} on the clients' own test
    parts, without those that have none or were never scored.
    """
    local: dict[int, float] = {}
    for row in run.local_acc:
        local |= {k: v for k, value in row.items() for v in defined((value,))}
    last = run.global_on_local[-1] if run.global_on_local else ()
    on_local = {k: v for k, value in enumerate(last) for v in defined((value,))}
    return {"local_acc": dict(sorted(local.items())), "global_on_local_acc": on_local}


def _spread(values: Mapping[int, float]) -> dict[str, Any]:
    """Mean, population deviation, 10th percentile (linear between ranks) and minimum over clients."""
    reason = "no client has a value"
    v = list(values.values())
    tenth = Number(float(np.quantile(v, 0.1))) if v else Number(None, reason)
    lowest = Number(min(v)) if v else Number(None, reason)
    out = _entry(mean=mean(v, reason)) | _entry(std_clients=std(v, reason=reason))
    return out | _entry(percentile10=tenth) | _entry(worst=lowest) | {"clients": len(v)}


def _score(values: Row) -> dict[str, Any]:
    reason = "not recorded, or undefined in every round"
    last = mean(values[-1:], "not recorded, or undefined in the last round")
    return (
        _entry(mean=mean(values, reason)) | _entry(std_rounds=std(values, reason=reason)) | _entry(final=last)
    )


def over_runs(runs: Sequence[Curves]) -> dict[str, Any]:
    """The JSON summary of runs that differ in their seed only (specification 2.7).

    Per metric: "mean" and "std_seeds" (sample, ddof 1) of the runs' numbers, "std_rounds" (population) of the
    seed-mean curve, "runs" that have a value. "variants" alike, without rounds. Undefined: null and a reason.
    Raises InputError without a run, and for runs of different lengths: their means over rounds are not
    comparable.
    """
    lengths = sorted({len(run.global_acc) for run in runs})
    if len(lengths) != 1:
        raise InputError(f"runs to be averaged need the same number of rounds, got {lengths or 'no run'}")
    measured = [_measure(run) for run in runs]
    out: dict[str, Any] = {}
    for name in measured[0].metrics:
        curves = [m.curves[name] for m in measured if name in m.curves]
        rounds = _over_rounds(mean_curve(curves) if curves else None)
        out[name] = _seeds([m.metrics[name] for m in measured]) | _entry(std_rounds=rounds)
    out["variants"] = {name: _seeds([m.variants[name] for m in measured]) for name in measured[0].variants}
    out["scores"] = {
        name: _seeds([mean(run.scores.get(name, ()), "not recorded, or undefined") for run in runs])
        for name in SCORES
    }
    out["counts"] = {"runs": len(runs), "rounds": lengths[0]}
    return out


def _over_rounds(curve: Curve | None) -> Number:
    return Number(None, ONE_PER_RUN) if curve is None else std(curve)


def _seeds(numbers: Sequence[Number]) -> dict[str, Any]:
    seeds = over_seeds(number.value for number in numbers)
    average = seeds.mean._replace(reason=numbers[0].reason) if seeds.mean.value is None else seeds.mean
    return {**_entry(mean=average), **_entry(std_seeds=seeds.std_sample), "runs": average.used}


def _entry(**named: Number) -> dict[str, Any]:
    """{"mean": x} or {"mean": None, "reason": ...}; for other names "NAME_reason"."""
    ((name, number),) = named.items()
    if number.value is not None:
        return {name: number.value}
    return {name: None, "reason" if name in ("mean", "value") else f"{name}_reason": number.reason}
