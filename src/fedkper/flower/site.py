"""A hospital: what it answers to the coordinator, under its own policy, from its own data and state.

Its folder is the only thing that lives: every message is answered by a new process.

federation.toml   the hospital's own copy of what was agreed
site.toml         its name and policy
state/            its personal model after its last rounds, bound to the federation and the round
audit.jsonl       every message: what was asked, what was sent
numbers.csv       its own scores, made here
site.log          the full text of whatever went wrong
status.json       where it stands
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import time
import traceback
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedkper import __version__, evaluate, tree, userfile
from fedkper.errors import InputError, RunError
from fedkper.execute import Call, Here, Visit
from fedkper.flower import holding
from fedkper.flower.contract import Plan, differences, fingerprint, named, plain_method
from fedkper.flower.ownstate import OwnState
from fedkper.flower.parcel import Code, Parcel, SiteError, Word
from fedkper.flower.settings import Federation, Policy, SiteSettings, read_federation, read_site
from fedkper.scores import Answers
from fedkper.tree import finite, nbytes, unlike

NUMBERS = ("round", "model", "images", "accuracy", "auc")


class Hospital:
    """A site's folder, and the answers that come from it."""

    def __init__(self, folder: Path, source: str = "") -> None:
        self.folder = folder
        self.source = source

    def answer(self, request: Parcel) -> Parcel:
        """The answer to a message. Never raises: a failure leaves as a code, its text stays in site.log."""
        action = str(request.words.get("action"))
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            reply = self._answer(action, request)
        except Exception as error:  # whatever it is, its text must not leave
            code = _code(error)
            reply = Parcel({"code": int(code)})
            with suppress(Exception):
                self._log(f"{started} {action}: {code.name}: {error}\n{traceback.format_exc()}")
                self._status("refused" if action == "join" else "failed", code=code.name, text=str(error))
        try:
            self._audit(started, action, request, reply)
        except OSError:  # what cannot be written down does not leave
            return Parcel({"code": int(Code.STATE)})
        return reply

    def _answer(self, action: str, request: Parcel) -> Parcel:
        if request.words.get("federation") != self.federation.id:
            raise SiteError(Code.MESSAGE, "the message is of another federation")
        if action == "join":
            return self._join(request)
        if action == "end":
            self._status("finished")
            return Parcel({"code": int(Code.DONE)})
        if action not in ("train", "score"):
            raise SiteError(Code.MESSAGE, f"unknown action '{action}'")
        self._require_joined(str(request.words.get("contract")))
        self.require_policy()
        if not 0 <= _whole(request, "round") < self.federation.experiment.rounds:
            raise SiteError(Code.MESSAGE, "a round that the federation does not have")
        # Without end, answers about models of the coordinator's choice would tell what the labels are.
        if self._served(action) >= 2 * self.policy.most_rounds:
            raise SiteError(Code.POLICY, f"{action}: asked for more often than rounds explain")
        return self._train(request) if action == "train" else self._score(request)

    @cached_property
    def federation(self) -> Federation:
        return read_federation(self.folder)

    @cached_property
    def settings(self) -> SiteSettings:
        found = read_site(self.folder)
        if found.name not in self.federation.sites:
            raise InputError(
                f"{self.folder / 'site.toml'}: name {found.name} is none of the federation's sites"
            )
        return found

    @property
    def policy(self) -> Policy:
        return self.settings.policy

    @cached_property
    def plan(self) -> Plan:
        return Plan(self.federation)

    @cached_property
    def data(self) -> holding.Holding:
        source = self.source or holding.located(self.settings.data, self.folder)
        return holding.read(source, self.federation, self.settings.name, self.own.folder)

    @cached_property
    def pool(self) -> Here:
        """The simulator's own executor, in which this site is one client among others without data."""
        fields = self.data.fields(self.index, len(self.federation.sites))
        return Here(self.plan.site(**fields), self.settings.device)

    @cached_property
    def own(self) -> OwnState:
        return OwnState(self.folder / "state" / self.federation.id, self.index)

    @property
    def index(self) -> int:
        return self.federation.index(self.settings.name)

    def require_policy(self) -> None:
        """Raises SiteError for what this hospital does not allow."""
        e, policy = self.federation.experiment, self.policy
        if not {named(e.method), plain_method(self.federation)} & set(policy.methods):
            raise SiteError(Code.POLICY, f"method {e.method} is not among the allowed: {policy.methods}")
        if e.rounds > policy.most_rounds:
            raise SiteError(Code.POLICY, f"{e.rounds} rounds; most_rounds is {policy.most_rounds}")
        if self.data.patients < policy.smallest_train:
            raise SiteError(
                Code.POLICY,
                f"{self.data.patients} patients to train on; smallest_train is {policy.smallest_train}",
            )

    def _join(self, request: Parcel) -> Parcel:
        here, there = self.plan.entries(), json.loads(str(request.words["contract"]))
        unequal = differences(here, there)
        if unequal:
            self._status("refused", code=Code.CONTRACT.name, text="\n".join(unequal))
            self._log("join refused: " + "; ".join(unequal))
            return Parcel({"code": int(Code.CONTRACT), "differences": "\n".join(unequal)})
        self.require_policy()
        if "head" in self.plan.sent() and not self.policy.send_head:
            raise SiteError(
                Code.POLICY,
                f"{self.federation.experiment.method}: its global scores are made with the sites' heads, "
                "but send_head is false in site.toml; allow it, or agree on a method without, such as "
                "fedper:head_probe=initial",
            )
        joined = {"contract": fingerprint(there), "basis": self._basis()}
        tree.write(self.own.folder / "joined.json", json.dumps(joined).encode())
        self._status("joined")
        held = {"samples": len(self.data.train_y), "test_samples": len(self.data.test_y)}
        return Parcel({"code": int(Code.DONE), **held})

    def _basis(self) -> str:
        """What the contract was made from at this site, in short: a change asks for joining again."""
        e = self.federation.experiment
        text = (self.folder / "federation.toml").read_bytes() + __version__.encode()
        return hashlib.sha256(text + json.dumps(userfile.hashes((e.method, e.model))).encode()).hexdigest()

    def _require_joined(self, contract: str) -> None:
        try:
            joined = json.loads((self.own.folder / "joined.json").read_text())
        except (OSError, ValueError):
            joined = {}
        if joined != {"contract": contract, "basis": self._basis()}:
            raise SiteError(Code.CONTRACT, "the contract was not agreed on, or changed since: join again")

    def _train(self, request: Parcel) -> Parcel:
        t, last = _whole(request, "round"), _whole(request, "state")
        if reason := unlike(request.trees.get("shared", {}), self.plan.first):
            raise SiteError(Code.MESSAGE, reason)
        self._status("training", round=t + 1)
        kept = self.own.find(last)
        if last > 0 and kept is None:
            self._log(f"the own state after round {last} is not here: the site starts afresh")
        self.pool.broadcast("receive", request.trees["shared"], {})
        call = Call("visit", ([self.index], t, [kept], [self.own.path(t + 1)]))
        visit: Visit = self.pool.run([call])[0]
        (trained,) = visit.trained
        update = trained.update
        if trained.checksum:
            self.own.keep(t + 1, trained.checksum, last)
        if not bool(finite(update.shared).all()):
            self._log(f"round {t + 1}: training diverged; ask for a smaller lr or a grad_clip such as 5")
        local, untuned = evaluate.local_answers(self.pool.site, {self.index: visit.logits[0]})
        words: dict[str, Word] = {"code": int(Code.DONE), "round": t, "fresh": last > 0 and kept is None}
        words |= {"weight": float(update.weight), "samples": int(update.samples)}
        words |= self._scores(t, "local", local[self.index])
        words |= self._scores(t, "untuned", untuned.get(self.index))
        self._status("trained", round=t + 1)
        # Clipping, noise and masking of what leaves would act here, on the update.
        head = update.own if self.policy.send_head and self.plan.needs_head(update) else {}
        trees = {"shared": update.shared, "sums": update.sums, "head": head}
        return Parcel(words, {name: found for name, found in trees.items() if found})

    def _score(self, request: Parcel) -> Parcel:
        t, model = _whole(request, "round"), request.trees.get("model", {})
        initial = self.plan.model.init()
        if reason := unlike(model, initial):
            raise SiteError(Code.MESSAGE, reason)
        self.pool.broadcast("receive", model, {})
        _, found = evaluate.global_model(self.pool, self.pool.site)
        words: dict[str, Word] = {"code": int(Code.DONE), "round": t}
        words |= self._scores(t, "global", found[self.index])
        self._status("scored", round=t + 1)
        return Parcel(words)

    def _scores(self, t: int, model: str, answers: Answers | None) -> dict[str, Word]:
        """Scores of a model on the local test part: written down here, sent as far as the policy allows."""
        if answers is None:
            return {}
        found = {"accuracy": answers.accuracy(), "auc": answers.auc()}
        row = [t + 1, model, len(answers.y), *("" if v is None else repr(v) for v in found.values())]
        path = self.folder / "numbers.csv"
        new = not path.exists()
        with open(path, "a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([NUMBERS, row] if new else [row])
        if not self.policy.send_scores or len(answers.y) < self.policy.smallest_test:
            return {}
        return {f"{model}_{name}": value for name, value in found.items() if value is not None}

    # What the hospital can read afterwards

    def _audit(self, started: str, action: str, request: Parcel, reply: Parcel) -> None:
        """A line on what came and what leaves: sizes, names of tensors, and every word as it is sent."""
        line: dict[str, Any] = {"time": started, "federation": request.words.get("federation")}
        line |= {"action": action, "round": request.words.get("round")}
        line |= {"received": {name: nbytes(found) for name, found in request.trees.items()}}
        tensors = {name: {"bytes": nbytes(f), "tensors": list(f)} for name, f in reply.trees.items()}
        sent = {k: v if _is_json(v) else str(v) for k, v in reply.words.items()}
        line |= {"sent": sent, "sent_tensors": tensors}
        with open(self.folder / "audit.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _served(self, action: str) -> int:
        """How often this site has trained, or scored, for this federation."""
        path = self.folder / "audit.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        mine = f'"federation": "{self.federation.id}", "action": "{action}"'
        return sum(mine in line and '"code": 0' in line for line in lines)

    def _log(self, text: str) -> None:
        with open(self.folder / "site.log", "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text.rstrip() + "\n")

    def _status(self, state: str, **more: Any) -> None:
        status = {"state": state, "time": time.time(), **more}
        tree.write(self.folder / "status.json", json.dumps(status).encode())


def _is_json(value: Word) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _whole(request: Parcel, name: str) -> int:
    value = request.words.get(name)
    if not isinstance(value, int):
        raise SiteError(Code.MESSAGE, f"the message lacks '{name}'")
    return value


def _code(error: Exception) -> Code:
    if isinstance(error, SiteError):
        return error.code
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Code.MEMORY
    if isinstance(error, OSError):
        return Code.STATE
    if isinstance(error, InputError):
        return Code.CONTRACT
    return Code.TRAINING if isinstance(error, RunError) else Code.INTERNAL
