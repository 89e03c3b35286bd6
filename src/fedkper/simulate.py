"""The federation in one process: sample, train, merge, evaluate, record; stop anywhere and go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedkper import checkpoint, evaluate, metrics
from fedkper.checkpoint import Restored
from fedkper.execute import Call, Executor, Here, Trained, Visit
from fedkper.forgetting import transfer
from fedkper.method import Update, falls_back, refusal
from fedkper.metrics import SCORES, Curves
from fedkper.record import Details, Record
from fedkper.sample import sampled_clients
from fedkper.scores import Answers, balanced_accuracy, macro_f1
from fedkper.site import Site, together
from fedkper.tree import Rows, Tree, nbytes, stack

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


@dataclass
class Member:
    """One of the runs that go through their rounds together."""

    site: Site
    record: Record
    on_round: OnRound | None = None
    """called with (rounds done, the line of rounds.csv) when a round is safe on the disk"""
    restored: Restored | None = None
    """the checkpoint, where it was read already"""


def simulate(
    site: Site,
    record: Record,
    workers: int = 1,
    device: str = "cpu",
    on_round: OnRound | None = None,
    lanes: int | None = None,
    restored: Restored | None = None,
) -> dict[str, Any]:
    """Runs the experiment's rounds from the record's last checkpoint on; writes and returns the summary.

    The numbers do not depend on `workers`, nor on how often the run was stopped. `lanes`: clients that train
    side by side; None takes one on a CPU and as many as fit into memory elsewhere.
    """
    return simulate_together([Member(site, record, on_round, restored)], workers, device, lanes)[0]


def simulate_together(
    members: Sequence[Member], workers: int = 1, device: str = "cpu", lanes: int | None = None
) -> list[dict[str, Any]]:
    """Runs that differ in their seed only, round by round, the sampled clients of all of them at once.

    Each has the numbers that it has alone. One that was stopped behind the others catches up first.
    """
    states = [_state(member) for member in members]
    try:
        if any(s.round < m.site.experiment.rounds for m, s in zip(members, states, strict=True)):
            pool = executor(together([m.site for m in members]), workers, device, lanes)
            try:
                _rounds(members, states, pool)
            finally:
                pool.close()
    finally:
        summaries = [metrics.summarise(state.curves) for state in states]
        for member, summary in zip(members, summaries, strict=True):
            member.record.write_json("summary.json", summary)
    return summaries


def _state(member: Member) -> State:
    """Where a run of the simulator stands."""
    site, record = member.site, member.record
    state = state_of(site, record, member.restored or record.restore())
    sizes = {k: len(part) for k, part in enumerate(site.test_index)}
    state.curves = replace(state.curves, local_n=sizes)
    return state


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


def executor(site: Site, workers: int, device: str, lanes: int | None) -> Executor:
    """This process for one worker, for an accelerator and for lanes, else a pool of processes."""
    if workers == 1 or device != "cpu" or (lanes or 1) > 1:
        return Here(site, device, lanes)
    from fedkper.pool import Pool

    return Pool(site, workers)


def _rounds(members: Sequence[Member], states: Sequence[State], pool: Executor) -> None:
    """The rounds that are left."""
    for rider, state in enumerate(states):
        pool.broadcast("receive", state.shared, state.differing, rider)
    rounds = members[0].site.experiment.rounds
    while (done := min(state.round for state in states)) < rounds:
        riding = {r: members[r] for r, state in enumerate(states) if state.round == done}
        answers = _train(riding, states, pool)
        for r, member in riding.items():
            line = _finish(member, states[r], pool, r, answers.pop(r))  # held no longer than needed
            if member.on_round:
                member.on_round(states[r].round, line)


class _Answers(NamedTuple):
    """What the clients sampled by a run gave in a round."""

    trained: dict[int, Trained]
    local: dict[int, Answers]
    untuned: dict[int, Answers]
    train_seconds: float
    eval_seconds: float


def _train(riding: dict[int, Member], states: Sequence[State], pool: Executor) -> dict[int, _Answers]:
    """A round's training, and the local models on their own test parts; all clients of all runs at once.

    The seconds of what is done for all are divided among the runs in equal parts, and between training and
    scoring as those who did it spent them.
    """
    site = next(iter(riding.values())).site
    e, count = site.experiment, len(site.train_index)
    paths: dict[int, tuple[Path | None, Path]] = {}
    for r, member in riding.items():
        t, visits, own = states[r].round, states[r].visits, member.record.own_path
        for k in sorted(sampled_clients(t, e.clients, e.fraction, e.sampling, member.site.experiment.seed)):
            paths[r * count + k] = (own(k, visits[k]) if k in visits else None, own(k, t + 1))
    start = time.perf_counter()
    groups = pool.plan(list(paths))
    calls = [Call("visit", (g, t, [paths[c][0] for c in g], [paths[c][1] for c in g])) for g in groups]
    of = {r: [c for c in paths if c // count == r] for r in riding}
    row = {c: at for mine in of.values() for at, c in enumerate(mine)}
    beside = {r: [Rows(len(mine)) for _ in range(3)] for r, mine in of.items()}
    trained: dict[int, Trained] = {}
    logits: dict[int, tuple[Tensor, Tensor | None]] = {}
    training = scoring = 0.0
    visit: Visit
    for at, visit in pool.each(calls):
        for c, one in zip(groups[at], visit.trained, strict=True):
            trained[c] = one._replace(update=_placed(one.update, beside[c // count], row[c]))
        logits |= dict(zip(groups[at], visit.logits, strict=True))
        training, scoring = training + visit.train_seconds, scoring + visit.eval_seconds
    local, untuned = evaluate.local_answers(site, logits)
    seconds = (time.perf_counter() - start) / len(riding)
    share = training / (training + scoring)
    return {
        r: _Answers(
            {c % count: trained[c] for c in mine},
            {c % count: local[c] for c in mine},
            {c % count: untuned[c] for c in mine if c in untuned},
            seconds * share,
            seconds * (1 - share),
        )
        for r, mine in of.items()
    }


def _placed(update: Update, beside: Sequence[Rows], row: int) -> Update:
    """An update of one lane where it will be merged: a hundred models are not held twice."""
    trees = (update.shared, update.own, update.sums)
    shared, own, sums = (rows.put(row, tree) for rows, tree in zip(beside, trees, strict=True))
    return update._replace(shared=shared, own=own, sums=sums)


def _finish(member: Member, state: State, pool: Executor, rider: int, answers: _Answers) -> dict[str, Any]:
    """The rest of a run's round: merge, score, record, checkpoint. Returns its line of rounds.csv."""
    site, record, t = member.site, member.record, state.round
    e, (found, local, untuned, *_) = site.experiment, answers
    clients = list(found)
    updates = {k: found[k].update for k in clients}
    down = nbytes(state.shared) * len(clients)
    clock = [time.perf_counter()]
    admitted = admit(updates, state.shared, record, t)
    shares = aggregate(site, pool, record, state, admitted, rider)
    clock.append(time.perf_counter())
    on_g, on_l = evaluate.global_model(pool, site, rider)
    clock.append(time.perf_counter())

    scores = global_scores(on_g)
    local_acc = {k: local[k].accuracy() if k in admitted else None for k in clients}
    on_l_acc = {k: answers.accuracy() for k, answers in on_l.items()}
    every = [on_l_acc.get(k) for k in range(e.clients)]
    state.curves = extended(state.curves, scores, clients, every, local_acc)
    keeps = {k: found[k].checksum for k in admitted if found[k].checksum}
    state.visits |= dict.fromkeys(keeps, t + 1)
    state.round = t + 1
    merge, evaluation = (b - a for a, b in pairwise(clock))
    line = {"round": t + 1} | metrics.last_round(state.curves, state.reference) | scores
    line |= {"train_seconds": answers.train_seconds, "merge_seconds": merge}
    line |= {"eval_seconds": answers.eval_seconds + evaluation}
    line |= {"down_bytes": down, "up_bytes": sum(site.method.payload(u) for u in updates.values())}
    detail = detailed(state.round)
    rows = []
    for k in sorted({*site.scored, *clients}):
        row: dict[str, Any] = {"round": t + 1, "client": k, "sampled": int(k in updates)}
        row |= {"samples": len(site.train_index[k]), "test_samples": len(site.test_index[k])}
        row |= {"weight": shares.get(k, 0.0) if k in updates else None}
        row |= {"local_acc": local_acc.get(k), "local_auc": local[k].auc() if k in admitted else None}
        row |= {"untuned_acc": untuned[k].accuracy() if k in untuned and k in admitted else None}
        row |= {"global_on_local_acc": on_l_acc.get(k)}
        rows.append(row | {"global_on_local_auc": on_l[k].auc() if detail and k in on_l else None})
    details = [Details("global", None, on_g.confusion())]
    details += [Details("local", k, local[k].confusion()) for k in admitted]
    if detail:
        details += [Details("global_on_local", k, answers.confusion()) for k, answers in on_l.items()]
    record.details(t + 1, details, on_g.bins() if detail else [])
    record.append(line, rows)
    record.save(t + 1, state.shared, state.differing, keeps, state.visits)
    return line


def detailed(round: int) -> bool:
    """Whether it is recorded what the global model says at every client: in the first ten rounds, then in
    every tenth. The last is no other than the rest, as a run may be made longer.
    """
    return round <= 10 or round % 10 == 0


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

    With fewer updates than `needed` the global model stays, and none has a share.
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
    state.shared = site.method.merge(state.shared, everyone)
    scored = site.method.global_model(site.model, state.shared, everyone)
    state.differing = {k: v for k, v in scored.items() if state.shared.get(k) is not v}
    pool.broadcast("receive", state.shared, state.differing, rider)
    return dict(zip(admitted, site.method.shares(everyone).tolist(), strict=True))


def global_scores(answers: Answers) -> dict[str, float | None]:
    """What is recorded of the global model on G every round, by column of rounds.csv."""
    confusion = answers.confusion()
    return {
        "global_acc": answers.accuracy(),
        "global_balanced_acc": balanced_accuracy(confusion),
        "global_f1": macro_f1(confusion),
        "global_auc": answers.auc(),
        "global_ece": answers.calibration_error(),
    }


def extended(
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
