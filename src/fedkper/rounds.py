"""A round's second half, in the simulator and between real sites: what is admitted, merged, written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fedkper import checkpoint, metrics
from fedkper.checkpoint import Restored
from fedkper.execute import Executor
from fedkper.forgetting import transfer
from fedkper.method import Update, falls_back, refusal
from fedkper.metrics import SCORES, Curves
from fedkper.record import Details, Record
from fedkper.scores import Answers, balanced_accuracy, macro_f1
from fedkper.site import Site
from fedkper.tree import Tree, finite, stack


@dataclass
class State:
    """Where a federation stands between two rounds."""

    round: int
    """rounds done"""
    shared: Tree
    visits: dict[int, int]
    """for each client that has state of its own, the round that it is of"""
    curves: Curves
    differing: Tree
    """leaves in which the model last scored as global differs from `shared`"""
    reference: dict[int, float | None]
    """for backward transfer: the global model's accuracy on a client at the end of its last visit"""


def state_of(site: Site, record: Record, found: Restored) -> State:
    """Where a run stands, from its record and its last valid checkpoint."""
    done, shared, visits, notice = found
    if notice:
        record.event("checkpoint", round=done, reason=notice)
    initial = site.model.init()
    first, _ = site.method.init(site.model, initial)
    curves = record.curves()
    reference: dict[int, float | None] = {}
    for row, clients in zip(curves.global_on_local, curves.sampled, strict=True):
        transfer(reference, [*row, *[None] * (site.experiment.clients - len(row))], clients)
    shared = shared or first
    differing = checkpoint.differing(record.checkpoints, done)
    if differing is None:
        differing = {k: v for k, v in initial.items() if k not in shared}
    return State(done, shared, visits, curves, differing, reference)


def admit(updates: dict[int, Update], template: Tree, record: Record, t: int) -> dict[int, Update]:
    """The updates that may be merged; each of the others is named in the events, with its reason."""
    admitted = {}
    for client, update in updates.items():
        reason = refusal(update, template)
        if reason:
            record.event("rejected", round=t + 1, client=client, reason=reason)
        else:
            admitted[client] = update
    return admitted


def aggregate(
    site: Site,
    pool: Executor,
    record: Record,
    state: State,
    admitted: dict[int, Update],
    rider: int = 0,
    needed: int = 1,
) -> dict[int, float]:
    """Moves `state.shared` on and broadcasts it with the model to be scored. Returns each client's share.

    With fewer updates than `needed`, or a merged model that is not finite, the global model stays, and none
    has a share.
    """
    if len(admitted) < needed:
        which = f", of client {', '.join(map(str, admitted))}" if admitted else ""
        reason = f"{len(admitted)} of {needed} needed updates could be used{which}: the global model stays"
        record.event("kept", round=state.round + 1, reason=reason)
        pool.broadcast("receive", state.shared, state.differing, rider)
        return {}
    ups = list(admitted.values())
    everyone = Update(
        shared=stack([u.shared for u in ups]),
        weight=torch.cat([u.weight for u in ups]),
        own=stack([u.own for u in ups]),
        samples=torch.cat([u.samples for u in ups]),
        sums=stack([u.sums for u in ups]),
    )
    if falls_back(everyone):
        reason = "no client's weight is usable: the method's fall-back is used"
        record.event("fallback", round=state.round + 1, reason=reason)
    merged = site.method.merge(state.shared, everyone)
    if not bool(finite(merged).all()):
        reason = f"what {type(site.method).__name__}.merge made of finite updates is not finite"
        record.event("kept", round=state.round + 1, reason=f"{reason}: the global model stays")
        pool.broadcast("receive", state.shared, state.differing, rider)
        return {}
    state.shared = merged
    scored = site.method.global_model(site.model, state.shared, everyone)
    state.differing = {k: v for k, v in scored.items() if state.shared.get(k) is not v}
    pool.broadcast("receive", state.shared, state.differing, rider)
    return dict(zip(admitted, site.method.shares(everyone).tolist(), strict=True))


class Part(NamedTuple):
    """A client's line of a round, in the columns of clients.csv; None for what is not known."""

    sampled: int
    """1 or 0"""
    samples: int
    test_samples: int
    weight: float | None
    """its share in the merged model; None if it sent no update"""
    local_acc: float | None
    local_auc: float | None
    untuned_acc: float | None
    global_on_local_acc: float | None
    global_on_local_auc: float | None


class Spent(NamedTuple):
    """What a round took, in the columns of rounds.csv."""

    train_seconds: float
    merge_seconds: float
    eval_seconds: float
    down_bytes: int
    up_bytes: int


def close_round(
    site: Site,
    record: Record,
    state: State,
    parts: Mapping[int, Part],
    spent: Spent,
    on_g: Answers,
    details: Sequence[Details] = (),
    keeps: Mapping[int, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Moves `state` on by a round that was trained, merged and scored, and writes it down with a checkpoint.

    `on_g`: the global model's answers; `keeps`: checksums of the clients' own states that lie in the
    checkpoint. Returns the line of rounds.csv.
    """
    scores = _scores(on_g)
    sampled = [k for k, part in sorted(parts.items()) if part.sampled]
    every = [parts[k].global_on_local_acc if k in parts else None for k in range(site.experiment.clients)]
    local_acc = {k: parts[k].local_acc for k in sampled}
    state.curves = _extended(state.curves, scores, sampled, every, local_acc)
    state.round += 1
    line = {"round": state.round} | metrics.last_round(state.curves, state.reference) | scores
    line |= spent._asdict()
    rows = [{"round": state.round, "client": k} | part._asdict() for k, part in sorted(parts.items())]
    of_g = [Details("global", None, on_g.confusion())] if len(on_g.y) else []
    record.details(state.round, [*of_g, *details], on_g.bins() if detailed(state.round) else [])
    record.append(line, rows)
    record.save(state.round, state.shared, state.differing, keeps, state.visits)
    return line


def detailed(round: int) -> bool:
    """Whether it is recorded what the global model says at every client: in the first ten rounds, then in
    every tenth. The last is no other than the rest, as a run may be made longer.
    """
    return round <= 10 or round % 10 == 0


def _scores(answers: Answers) -> dict[str, float | None]:
    """What is recorded of the global model on G every round, by column of rounds.csv."""
    confusion = answers.confusion()
    return {
        "global_acc": answers.accuracy(),
        "global_balanced_acc": balanced_accuracy(confusion),
        "global_f1": macro_f1(confusion),
        "global_auc": answers.auc(),
        "global_ece": answers.calibration_error(),
    }


def _extended(
    curves: Curves,
    scores: dict[str, float | None],
    sampled: list[int],
    global_on_local: list[float | None],
    local_acc: dict[int, float | None],
) -> Curves:
    """The curves with one more round."""
    return Curves(
        [*curves.global_acc, scores["global_acc"]],
        [*curves.sampled, sampled],
        [*curves.global_on_local, global_on_local],
        [*curves.local_acc, local_acc],
        curves.local_n,
        {name: [*curves.scores.get(name, []), scores[name]] for name in SCORES},
    )
