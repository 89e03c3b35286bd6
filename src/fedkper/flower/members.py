"""The sites as the coordinator sees them: who has joined, who is there, what went wrong last."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from fedkper.errors import RunError
from fedkper.flower.contract import Plan
from fedkper.flower.parcel import Code, Parcel
from fedkper.method import MOST_SAMPLES
from fedkper.tree import Tree

# Seconds between two looks at who is there.
PAUSE = 2.0
# Seconds that a site has at most to answer to a joining, and until one that did not is asked again.
JOIN_SECONDS, AGAIN_SECONDS = 120.0, 300.0


class Line(Protocol):
    """How the coordinator reaches the sites."""

    def present(self) -> set[str]:
        """The sites that are connected now."""
        ...

    def ask(self, requests: dict[str, Parcel], seconds: float) -> dict[str, Parcel]:
        """The answers that come in time; a site without one is left out."""
        ...


class Members:
    """Joins the sites and keeps the list."""

    def __init__(self, plan: Plan, line: Line, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.line = line
        self.say = say
        self.names = plan.federation.sites
        self.held: dict[str, tuple[int, int]] = {}
        """train and local test images of every site that has joined"""
        self.refused: dict[str, str] = {}
        """why others have not; one that goes away and comes back is asked again"""
        self.away: set[str] = set()
        self.asked_again: dict[str, float] = {}
        """when sites that did not answer to their joining are asked again, by time.monotonic"""
        self.errors: dict[str, Code] = {}
        """of every site that failed, the last"""

    def ready(self) -> set[str]:
        """The sites that are there and have joined."""
        return self.line.present() & self.held.keys()

    def request(self, action: str, trees: dict[str, Tree] | None = None, **words: Any) -> Parcel:
        """A message under this federation's contract."""
        contract = {} if action in ("join", "end") else {"contract": self.plan.fingerprint}
        federation = self.plan.federation.id
        return Parcel({"action": action, "federation": federation, **contract, **words}, trees or {})

    def gather(self, tell: Callable[[], None]) -> None:
        """Waits until all sites have joined, or at the limit enough. Raises RunError if too few have.

        `tell` is called while it waits.
        """
        rounds = self.plan.federation.rounds
        end, told = time.time() + rounds.wait, ""
        while len(self.held) < len(self.names):
            late = time.time() >= end
            self.join(self.line.present())
            settled = self.held.keys() | (self.refused.keys() - self.asked_again.keys())
            missing = [name for name in self.names if name not in settled]
            if not missing or len(self.held) + len(missing) < rounds.minimum or late:
                break
            came = f"{len(self.held)} came" + (f" ({', '.join(sorted(self.held))})" if self.held else "")
            until = time.strftime("%H:%M", time.localtime(end))
            text = (
                f"needs {rounds.minimum} of {len(self.names)} sites, {came}; waiting for more until {until}"
            )
            if text != told:
                self.say(text)
            told = text
            tell()
            time.sleep(min(PAUSE, max(0.0, end - time.time())))
        if len(self.held) < rounds.minimum:
            reasons = "".join(f"\n  {name}: {reason}" for name, reason in self.refused.items())
            raise RunError(
                f"needs {rounds.minimum} of {len(self.names)} sites, {len(self.held)} joined"
                f" ({', '.join(sorted(self.held)) or 'none'}) within {rounds.wait:g} s{reasons}"
            )

    def join(self, present: Iterable[str]) -> None:
        """Compares the contract with the sites that have not joined yet."""
        self.away |= self.refused.keys() - set(present)
        now = time.monotonic()
        due = {name for name, moment in self.asked_again.items() if moment <= now}
        held_back = self.refused.keys() - self.away - due
        new = [name for name in sorted(present) if name not in self.held and name not in held_back]
        if not new:
            return
        entries = json.dumps(self.plan.entries())
        asked = {name: self.request("join", contract=entries) for name in new}
        replies = self.line.ask(asked, min(JOIN_SECONDS, self.plan.federation.rounds.limit))
        for name in new:
            self.asked_again.pop(name, None)
        for name in sorted(asked.keys() - replies.keys()):
            self._refuse(name, Code.SILENT)
            self.asked_again[name] = time.monotonic() + AGAIN_SECONDS
        for name, reply in sorted(replies.items()):
            code, words = code_of(reply), reply.words
            sizes = [words.get(key) for key in ("samples", "test_samples")]
            counts = [n for n in sizes if type(n) is int and 0 <= n <= MOST_SAMPLES]
            if code == Code.DONE and len(counts) == 2:
                self.held[name] = counts[0], counts[1]
                self.away.discard(name)
                self.refused.pop(name, None)
                self.errors.pop(name, None)
                self.say(f"{name} joined")
                continue
            told = str(words.get("differences", ""))[:4000] if code == Code.CONTRACT else ""
            self._refuse(name, code, told.splitlines())

    def _refuse(self, name: str, code: Code, why: Sequence[str] = ()) -> None:
        self.away.discard(name)
        self.refused[name] = "\n    ".join([f"{code.name}, {code.meaning}", *why])
        self.errors[name] = code
        self.say(f"{name} refused: {self.refused[name]}")

    def awaited(self, wanted: set[str], needed: int) -> set[str]:
        """The wanted sites that are there and have joined; waits up to a round's limit for enough of them."""
        limit = self.plan.federation.rounds.limit
        end = time.time() + limit
        while True:
            present = self.line.present()
            self.join(present)
            ready = wanted & present & self.held.keys()
            if len(ready) >= needed or time.time() >= end:
                return ready
            time.sleep(min(PAUSE, max(0.0, end - time.time())))

    def failed(self, name: str, code: Code) -> None:
        self.errors[name] = code
        if code == Code.CONTRACT:  # changed since it joined: ask again
            self.held.pop(name, None)

    def report(self) -> dict[str, dict[str, Any]]:
        """Every site's state, for status.json."""
        present = self.line.present()
        return {
            name: {
                "there": name in present,
                "joined": name in self.held,
                "error": self.errors[name].name if name in self.errors else "",
            }
            for name in self.names
        }


def code_of(reply: Parcel) -> Code:
    """The code of an answer; MESSAGE for one that has none."""
    code = reply.words.get("code")
    return Code(int(code)) if type(code) is int and code in list(Code) else Code.MESSAGE
