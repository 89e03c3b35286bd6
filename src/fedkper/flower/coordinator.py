"""The coordinator: joins the sites, runs the rounds over them, and records an ordinary run.

Its parts are the simulator's: who is sampled, which updates are admitted, how they are merged, what is
written down. What differs is that answers may fail to come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedkper import data, evaluate, metrics
from fedkper.errors import InputError, RunError
from fedkper.execute import Here
from fedkper.flower.contract import Plan
from fedkper.flower.describe import description
from fedkper.flower.members import Line, Members, code_of
from fedkper.flower.parcel import Code, Parcel
from fedkper.flower.settings import Federation
from fedkper.method import Update
from fedkper.record import Record
from fedkper.rounds import Part, Spent, State, admit, aggregate, close_round, detailed, state_of
from fedkper.runfiles import read_json
from fedkper.sample import sampled_clients
from fedkper.site import Site
from fedkper.tree import nbytes, rest


class Answer(NamedTuple):
    """A site's part of a round."""

    update: Update
    words: dict[str, Any]
    nbytes: int


class Coordinator:
    """A federation's rounds. `say` gets a line for a person, `note` the same as values (status.json)."""

    def __init__(
        self,
        federation: Federation,
        folder: Path,
        line: Line,
        say: Callable[[str], None] = lambda text: None,
        note: Callable[[dict[str, Any]], None] = lambda values: None,
    ) -> None:
        self.federation = federation
        self.folder = folder
        self.line = line
        self.say = say
        self.note = note
        self.plan = Plan(federation)
        self.members = Members(self.plan, line, say)
        self.site = self._site()
        self.pool = Here(self.site)

    def _site(self) -> Site:
        """The coordinator's own test set G, and otherwise no data."""
        if not self.federation.test:
            return self.plan.site()
        found = data.load(self.federation.test, self.federation.shape[0])
        if (found.shape, found.classes) != (self.federation.shape, self.federation.classes):
            raise InputError(f"test {self.federation.test}: other images or classes than the federation's")
        return self.plan.site(test_x=torch.from_numpy(found.test_x), test_y=torch.from_numpy(found.test_y))

    def run(self) -> dict[str, Any]:
        """All rounds that are left. Returns the summary. Raises RunError if the sites do not suffice."""
        self._require_fitting()
        new = not (self.folder / "run.json").exists()
        record = Record.create(self.folder) if new else Record.open(self.folder)
        record.on_event = self._told
        try:
            if not new:
                self._require_same()
            state = state_of(self.site, record, record.restore())
            if state.round:
                self.say(f"goes on after round {state.round}")
            self.members.gather(lambda: self._tell("waiting", state.round))
            if new:
                held, test = self.members.held, len(self.site.test_y)
                record.write_json("run.json", description(self.federation, self.plan, held, test))
            self.pool.broadcast("receive", state.shared, state.differing)
            try:
                while state.round < self.federation.experiment.rounds:
                    self._round(record, state)
            finally:
                summary = metrics.summarise(state.curves)
                record.write_json("summary.json", summary)
            self._tell("running", state.round)
            ends = {name: self.members.request("end") for name in sorted(self.members.ready())}
            self.line.ask(ends, min(60, self.federation.rounds.limit))
            self._tell("finished", state.round)
            return summary
        finally:
            record.close()

    def _require_fitting(self) -> None:
        size, limit = self.plan.largest_message() / 1e6, self.federation.limits.largest_message
        if size > limit:
            raise InputError(
                f"the model needs messages of {size:,.1f} MB, more than largest_message = {limit} MB: raise "
                "that in federation.toml, [limits] (1900 at most), or take a smaller model"
            )

    def _require_same(self) -> None:
        """Raises InputError if the run that is there was started under another contract."""
        before = read_json(self.folder, "run.json").get("federation")
        if not isinstance(before, dict) or before.get("contract") != self.plan.fingerprint:
            raise InputError(
                f"{self.folder}: was run with other settings, files or another version than federation.toml "
                "asks for now; the numbers would be those of neither. Restore those, or move the folder away"
            )

    # A round

    def _round(self, record: Record, state: State) -> None:
        """One round, from sampling to the checkpoint; the simulator's, with answers that may fail to come."""
        f, t = self.federation, state.round
        clock = [time.perf_counter()]
        e = f.experiment
        sampled = sorted(sampled_clients(t, e.clients, e.fraction, e.sampling, e.seed))
        answers, sent = self._train(record, state, sampled)
        clock.append(time.perf_counter())
        down = nbytes(state.shared) * sent
        admitted = admit(self._fitting(record, t, answers), state.shared, record, t)
        needed = min(f.rounds.minimum, len(sampled))
        # Robust merging would act here, on the admitted updates.
        shares = aggregate(self.site, self.pool, record, state, admitted, needed=needed)
        if len(admitted) < needed:
            admitted = {}
        clock.append(time.perf_counter())
        errors = self.members.errors
        silent = {f.sites[k] for k in sampled if k not in answers and errors.get(f.sites[k]) == Code.SILENT}
        on_local, down_scores = self._score(state, t, silent)
        on_g, _ = evaluate.global_model(self.pool, self.site)
        clock.append(time.perf_counter())

        tested = {f.index(name): test for name, (_, test) in self.members.held.items()}
        state.curves = replace(state.curves, local_n={**state.curves.local_n, **tested})
        state.visits |= dict.fromkeys((k for k in admitted if self.plan.initial_own), t + 1)
        detail = detailed(t + 1)

        def part(k: int) -> Part:
            # A site that has been away since a restart keeps its known test part.
            samples, test_samples = self.members.held.get(f.sites[k], (0, state.curves.local_n.get(k, 0)))
            words = answers[k].words if k in admitted else {}
            accuracy, auc = on_local.get(k, (None, None))
            return Part(
                sampled=int(k in sampled),
                samples=samples,
                test_samples=test_samples,
                weight=shares.get(k, 0.0) if k in answers else None,
                local_acc=_share(words, "local_accuracy"),
                local_auc=_share(words, "local_auc"),
                untuned_acc=_share(words, "untuned_accuracy"),
                global_on_local_acc=accuracy,
                global_on_local_auc=auc if detail else None,
            )

        training, merging, scoring = (b - a for a, b in pairwise(clock))
        up = sum(answer.nbytes for answer in answers.values())
        spent = Spent(training, merging, scoring, down + down_scores, up)
        parts = {k: part(k) for k in range(e.clients)}
        line = close_round(self.site, record, state, parts, spent, on_g)
        self.say(self._line(state.round, line, admitted))
        self._tell("running", state.round)

    def _train(self, record: Record, state: State, sampled: list[int]) -> tuple[dict[int, Answer], int]:
        """A round's answers and the number of messages. Raises RunError if too few sites answer in its tries.

        An answer of an earlier try of the same round counts: it is of the same model and the same state.
        """
        f, t = self.federation, state.round
        needed = min(f.rounds.minimum, len(sampled))
        answers: dict[int, Answer] = {}
        sent = 0
        for attempt in range(1, f.rounds.tries + 1):
            self._tell("running", t, attempt=attempt)
            wanted = {f.sites[k]: k for k in sampled if k not in answers}
            present = self.members.awaited(set(wanted), needed - len(answers))
            shared = {"shared": state.shared}
            asked = {
                name: self.members.request("train", shared, round=t, state=state.visits.get(wanted[name], 0))
                for name in wanted
                if name in present
            }
            sent += len(asked)
            replies = self.line.ask(asked, f.rounds.limit) if asked else {}
            for name, k in wanted.items():
                reply = replies.get(name)
                missing = Code.SILENT if name in asked else Code.AWAY
                code = missing if reply is None else code_of(reply)
                if reply is not None and code == Code.DONE:
                    answers[k] = self._answer(reply)
                    if reply.words.get("fresh") is True:
                        reason = "the site has lost its own state and starts afresh"
                        record.event("fresh", round=t + 1, client=k, reason=reason)
                    self.members.errors.pop(name, None)
                    continue
                self._failed(record, t, attempt, name, k, code)
            if len(answers) >= needed:
                return answers, sent
            came = f"{len(answers)} of {len(sampled)} sites answered, {needed} needed"
            self.say(f"round {t + 1}, try {attempt} of {f.rounds.tries}: {came}")
        reasons = "; ".join(
            f"{name}: {code.name}, {code.meaning}" for name, code in self.members.errors.items()
        )
        raise RunError(
            f"round {t + 1}: {came} ({reasons}), also in the last of {f.rounds.tries} tries. "
            f"The rounds before, {t}, are safe; start again to go on"
        )

    def _failed(self, record: Record, t: int, attempt: int, name: str, k: int, code: Code) -> None:
        self.members.failed(name, code)
        reason = f"{code.name}: {code.meaning}"
        record.event("unanswered", round=t + 1, client=k, attempt=attempt, reason=reason)

    def _fitting(self, record: Record, t: int, answers: dict[int, Answer]) -> dict[int, Update]:
        """The updates of sites that sent what was agreed, sorted; each other one is named with its reason."""
        fitting = {}
        for k in sorted(answers):
            reason = self._misfit(k, answers[k])
            if reason:
                record.event("rejected", round=t + 1, client=k, reason=reason)
            else:
                fitting[k] = answers[k].update
        return fitting

    def _misfit(self, k: int, answer: Answer) -> str:
        """Why an update is none that site k may send; whether its numbers are finite is seen by `admit`."""
        update, limit = answer.update, self.federation.limits.largest_weight
        trees = {"shared": update.shared, "sums": update.sums, "head": update.own}
        for kind, found in trees.items():
            if misfit := self.plan.misfit(kind, found):
                return misfit
        samples, joined = answer.words.get("samples"), self.members.held[self.federation.sites[k]][0]
        if samples != joined:
            return f"{samples} samples, but the site joined with {joined}"
        return f"weight {float(update.weight):g} is beyond {limit:g}" if float(update.weight) > limit else ""

    def _answer(self, reply: Parcel) -> Answer:
        """A site's update in the simulator's form."""
        words, trees = reply.words, reply.trees
        numbers = (words.get(name) for name in ("weight", "samples"))
        weight, samples = (float(n) if type(n) in (int, float) else float("nan") for n in numbers)  # type: ignore[arg-type]
        update = Update(
            shared=trees.get("shared", {}),
            weight=torch.tensor([weight], dtype=torch.float64),
            own=trees.get("head", {}),
            samples=torch.tensor([samples], dtype=torch.float64),
            sums=trees.get("sums", {}),
        )
        return Answer(update, words, sum(nbytes(found) for found in trees.values()))

    def _score(
        self, state: State, t: int, silent: set[str]
    ) -> tuple[dict[int, tuple[float | None, float | None]], int]:
        """The merged model on every site's local test part, made there; and the bytes that were sent.

        Sites that were `silent` in this round are not asked: they do one thing after another, and a round
        would last twice its limit.
        """
        model = rest(state.shared) | state.differing
        present = sorted(self.members.ready() - silent)
        asked = {name: self.members.request("score", {"model": model}, round=t) for name in present}
        found = {}
        for name, reply in self.line.ask(asked, self.federation.rounds.limit).items():
            if code_of(reply) == Code.DONE:
                words = reply.words
                scores = _share(words, "global_accuracy"), _share(words, "global_auc")
                found[self.federation.index(name)] = scores
        return found, nbytes(model) * len(asked)

    # What is told

    def _told(self, event: dict[str, Any]) -> None:
        """An event of the run, with the site's name."""
        who = f"{self.federation.sites[event['client']]}: " if "client" in event else ""
        what = "update rejected: " if event["event"] == "rejected" else ""
        self.say(f"round {event['round']}: {who}{what}{event['reason']}")

    def _line(self, round: int, line: dict[str, Any], admitted: dict[int, Update]) -> str:
        shown = {"global": line["global_acc"], "local": line["local_acc"], "BwT": line["global_bwt"]}
        scores = ", ".join(f"{name} {v:.3f}" for name, v in shown.items() if v is not None)
        names = " ".join(self.federation.sites[k] for k in admitted)
        rounds = self.federation.experiment.rounds
        return f"round {round} of {rounds}: {scores or 'no scores'} ({names or 'no update admitted'})"

    def _tell(self, state: str, round: int | None, **more: Any) -> None:
        sites = self.members.report()
        rounds = self.federation.experiment.rounds
        self.note({"state": state, "round": round, "rounds": rounds, "sites": sites, **more})


def _share(words: dict[str, Any], name: str) -> float | None:
    """A score that a site reports; None if it reports none, or something that is no share of 1."""
    value = words.get(name)
    return value if isinstance(value, float) and 0 <= value <= 1 else None
