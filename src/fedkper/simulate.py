"""The federation in one process: sample, train, merge, evaluate, record; stop anywhere and go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedkper import evaluate, metrics
from fedkper.checkpoint import Restored
from fedkper.execute import Call, Executor, Here, Trained, Visit
from fedkper.method import Update
from fedkper.record import Details, Record
from fedkper.rounds import Part, Spent, State, admit, aggregate, close_round, detailed, state_of
from fedkper.sample import sampled_clients
from fedkper.scores import Answers
from fedkper.site import Site, together
from fedkper.tree import Rows, nbytes

OnRound = Callable[[int, dict[str, Any]], None]


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
    found, local, untuned, *_ = answers
    updates = {k: one.update for k, one in found.items()}
    down = nbytes(state.shared) * len(updates)
    clock = [time.perf_counter()]
    admitted = admit(updates, state.shared, record, t)
    shares = aggregate(site, pool, record, state, admitted, rider)
    clock.append(time.perf_counter())
    on_g, on_l = evaluate.global_model(pool, site, rider)
    clock.append(time.perf_counter())
    merging, evaluation = (b - a for a, b in pairwise(clock))
    up = sum(site.method.payload(update) for update in updates.values())
    spent = Spent(answers.train_seconds, merging, answers.eval_seconds + evaluation, down, up)
    detail = detailed(t + 1)

    def part(k: int) -> Part:
        own, before = (table.get(k) if k in admitted else None for table in (local, untuned))
        now = on_l.get(k)
        return Part(
            sampled=int(k in updates),
            samples=len(site.train_index[k]),
            test_samples=len(site.test_index[k]),
            weight=shares.get(k, 0.0) if k in updates else None,
            local_acc=own.accuracy() if own else None,
            local_auc=own.auc() if own else None,
            untuned_acc=before.accuracy() if before else None,
            global_on_local_acc=now.accuracy() if now else None,
            global_on_local_auc=now.auc() if now and detail else None,
        )

    parts = {k: part(k) for k in sorted({*site.scored, *updates})}
    details = [Details("local", k, local[k].confusion()) for k in admitted]
    if detail:
        details += [Details("global_on_local", k, found.confusion()) for k, found in on_l.items()]
    keeps = {k: found[k].checksum for k in admitted if found[k].checksum}
    state.visits |= dict.fromkeys(keeps, t + 1)
    return close_round(site, record, state, parts, spent, on_g, details, keeps)
