"""The federation in one process: sample, train, merge, evaluate, record; stop anywhere and go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from fedkper import evaluate, metrics
from fedkper.checkpoint import Restored
from fedkper.execute import Call, Executor, Here, Trained
from fedkper.forgetting import transfer
from fedkper.method import Update, falls_back, refusal
from fedkper.metrics import Curves
from fedkper.record import Record
from fedkper.sample import sampled_clients
from fedkper.site import Site
from fedkper.tree import Tree, nbytes, stack

OnRound = Callable[[int, dict[str, Any]], None]


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


def simulate(
    site: Site,
    record: Record,
    workers: int = 1,
    device: str = "cpu",
    on_round: OnRound | None = None,
    lanes: int = 1,
    restored: Restored | None = None,
) -> dict[str, Any]:
    """Runs the experiment's rounds from the record's last checkpoint on; writes and returns the summary.

    `on_round(rounds done, the line of rounds.csv)` is called when a round is safe on the disk.
    The numbers do not depend on `workers`, nor on how often the run was stopped. `restored`: the checkpoint,
    where it was read already.
    """
    done, shared, visits, notice = restored or record.restore()
    if notice:
        record.event("checkpoint", round=done, reason=notice)
    initial = site.model.init()
    first, _ = site.method.init(site.model, initial)
    curves = replace(record.curves(), local_n={k: len(part) for k, part in enumerate(site.test_index)})
    reference: dict[int, float | None] = {}
    for row, clients in zip(curves.global_on_local, curves.sampled, strict=True):
        transfer(reference, row, clients)
    shared = shared or first
    differing = {k: v for k, v in initial.items() if k not in shared}
    state = State(done, shared, visits, curves, differing, reference)
    try:
        if done < site.experiment.rounds:
            _rounds(site, record, state, executor(site, workers, device, lanes), on_round)
    finally:
        summary = metrics.summarise(state.curves)
        record.write_json("summary.json", summary)
    return summary


def _rounds(site: Site, record: Record, state: State, pool: Executor, on_round: OnRound | None) -> None:
    """The rounds that are left."""
    try:
        pool.broadcast("receive", state.shared, state.differing)
        while state.round < site.experiment.rounds:
            line = _round(site, pool, record, state)
            if on_round:
                on_round(state.round, line)
    finally:
        pool.close()


def executor(site: Site, workers: int, device: str, lanes: int) -> Executor:
    """This process for one worker, for an accelerator and for lanes, else a pool of processes."""
    if workers == 1 or device != "cpu" or lanes > 1:
        return Here(site, device, lanes)
    from fedkper.pool import Pool

    return Pool(site, workers)


def _round(site: Site, pool: Executor, record: Record, state: State) -> dict[str, Any]:
    """One round, from sampling to the checkpoint. Returns its line of rounds.csv."""
    e, t = site.experiment, state.round
    clients = sorted(sampled_clients(t, e.clients, e.fraction, e.sampling, e.seed))
    clock = [time.perf_counter()]
    kept = {k: record.own_path(k, state.visits[k]) if k in state.visits else None for k in clients}
    groups = pool.plan(clients)
    calls = [
        Call("train", (g, t, [kept[k] for k in g], [record.own_path(k, t + 1) for k in g])) for g in groups
    ]
    trained = pool.run(calls)
    clock.append(time.perf_counter())
    local, untuned = evaluate.local_models(pool, site, groups, [done.worker for done in trained])
    clock.append(time.perf_counter())
    found: dict[int, Trained] = {}
    for group, done in zip(groups, trained, strict=True):
        found |= zip(group, done.value, strict=True)
    updates = {k: found[k].update for k in clients}
    down = nbytes(state.shared) * len(clients)
    admitted = admit(updates, state.shared, record, t)
    shares = _merge(site, pool, record, state, admitted)
    clock.append(time.perf_counter())
    on_g, on_l = evaluate.global_model(pool, site)
    clock.append(time.perf_counter())

    local = {k: local[k] if k in admitted else None for k in clients}
    state.curves = extended(state.curves, on_g, clients, [on_l.get(k) for k in range(e.clients)], local)
    keeps = {k: found[k].checksum for k in admitted if found[k].checksum}
    state.visits |= dict.fromkeys(keeps, t + 1)
    state.round = t + 1
    train, local_eval, merge, global_eval = (b - a for a, b in pairwise(clock))
    line = {"round": t + 1} | metrics.last_round(state.curves, state.reference)
    line |= {"train_seconds": train, "merge_seconds": merge, "eval_seconds": local_eval + global_eval}
    line |= {"down_bytes": down, "up_bytes": sum(site.method.payload(u) for u in updates.values())}
    rows = []
    for k in sorted({*site.scored, *clients}):
        row: dict[str, Any] = {"round": t + 1, "client": k, "sampled": int(k in updates)}
        row |= {"samples": len(site.train_index[k]), "test_samples": len(site.test_index[k])}
        row |= {"weight": shares.get(k, 0.0) if k in updates else None}
        row |= {"local_acc": local.get(k), "untuned_acc": untuned.get(k)}
        rows.append(row | {"global_on_local_acc": on_l.get(k)})
    record.append(line, rows)
    record.save(t + 1, state.shared, keeps, state.visits)
    return line


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


def _merge(
    site: Site, pool: Executor, record: Record, state: State, admitted: dict[int, Update]
) -> dict[int, float]:
    """Moves `state.shared` on and broadcasts it with the model to be scored. Returns each client's share."""
    if not admitted:
        record.event("kept", round=state.round + 1, reason="no update was admitted: the global model stays")
        pool.broadcast("receive", state.shared, state.differing)
        return {}
    ups = list(admitted.values())
    together = Update(
        shared=stack([u.shared for u in ups]),
        weight=torch.cat([u.weight for u in ups]),
        own=stack([u.own for u in ups]),
        samples=torch.cat([u.samples for u in ups]),
        sums=stack([u.sums for u in ups]),
    )
    if falls_back(together):
        reason = "no client's weight is usable: the method's fall-back is used"
        record.event("fallback", round=state.round + 1, reason=reason)
    state.shared = site.method.merge(state.shared, together)
    scored = site.method.global_model(site.model, state.shared, together)
    state.differing = {k: v for k, v in scored.items() if state.shared.get(k) is not v}
    pool.broadcast("receive", state.shared, state.differing)
    return dict(zip(admitted, site.method.shares(together).tolist(), strict=True))


def extended(
    curves: Curves,
    global_acc: float | None,
    sampled: list[int],
    global_on_local: list[float | None],
    local_acc: dict[int, float | None],
) -> Curves:
    """The curves with one more round."""
    return Curves(
        [*curves.global_acc, global_acc],
        [*curves.sampled, sampled],
        [*curves.global_on_local, global_on_local],
        [*curves.local_acc, local_acc],
        curves.local_n,
    )
