"""The first screen: which method, for whom, at what price; in plain sentences, no stronger than the runs.

A difference is compared with what the seed alone moves. With one seed nothing is known about that, and the
text says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedkper import paired, runfiles
from fedkper.averages import defined, mean, std
from fedkper.paper.runs import Found
from fedkper.report.arms import Arm
from fedkper.report.words import percent, points, seconds, signed, size

# 97.5 % points of Student's t for 1, 2, ... degrees of freedom; the last is taken beyond, a little too wide.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)

QUESTIONS = {
    "global_acc": (
        "Patients of no client",
        "global accuracy",
        "accuracy on patients that no client has seen",
    ),
    "local_acc": (
        "A client’s own patients",
        "local accuracy",
        "accuracy of each client’s own model on its own patients",
    ),
    "worst_client_acc": (
        "The worst-off client",
        "worst client",
        "accuracy at the client that fares worst in its round",
    ),
    "global_bwt": (
        "What earlier rounds taught",
        "backward transfer",
        "change of the global model’s accuracy at clients since they last trained; below 0 is forgetting",
    ),
}


class Interval(NamedTuple):
    """A mean difference with a 95 % interval; without one where too few values are there."""

    mean: float
    low: float | None
    high: float | None
    used: int


class Lead(NamedTuple):
    """How far a method is ahead of another, in words."""

    text: str
    certain: bool | None
    """whether the seeds show a difference; None with one seed, which cannot"""


@dataclass(frozen=True)
class Card:
    """One question of the first screen and its answer."""

    title: str
    metric: str
    hint: str
    best: tuple[str, ...]
    """the method with the highest value; several where they are equal to the last digit"""
    value: float | None
    lines: tuple[str, ...]
    """how far it is ahead of the next method, and of the reference"""
    certain: bool | None
    """of the lead over the next"""


@dataclass(frozen=True)
class Pair:
    """A method against the reference."""

    method: str
    over_seeds: Mapping[str, Interval | None]
    """by metric, over the seeds that both have"""
    over_clients: paired.Difference | None
    """local accuracy, over the seeds and clients that both have"""
    gaps: Mapping[int, float]
    """by client, the difference in local accuracy over the seeds that both have"""

    @property
    def better(self) -> int:
        return sum(gap > 0 for gap in self.gaps.values())

    @property
    def worse(self) -> int:
        return sum(gap < 0 for gap in self.gaps.values())


@dataclass(frozen=True)
class Verdict:
    headline: str
    cards: tuple[Card, ...]
    whom: tuple[str, ...]
    price: str
    care: tuple[str, ...]
    reference: str
    pairs: tuple[Pair, ...]


def reference_of(arms: Sequence[Arm]) -> Arm:
    """FedAvg, the plain method, where it was run; else the first."""
    return next((arm for arm in arms if arm.name == "FedAvg"), arms[0])


def ranked(arms: Sequence[Arm], key: str) -> list[tuple[Arm, float]]:
    """Those with a value, best first; higher is better for every metric.

    A method that never merged an update has forgotten nothing and learnt nothing: it has no rank.
    """
    values = [(arm, arm.summary[key]["mean"]) for arm in arms if arm.trained]
    return sorted(((a, v) for a, v in values if v is not None), key=lambda pair: -pair[1])


def _top(arms: Sequence[Arm], key: str) -> list[Arm]:
    """The first of a ranking, and all that are equal to it or ahead of it on the seeds that both have."""
    order = ranked(arms, key)
    if not order:
        return []
    first, best = order[0]
    return [arm for arm, value in order if value == best or sum(_differences(arm, first, key)) > 0]


def best_first(arms: Sequence[Arm]) -> list[Arm]:
    """By how many of the QUESTIONS a method is first on, then by balance."""
    first = [arm.name for key in QUESTIONS for arm in _top(arms, key)]
    balance = {arm.name: value for arm, value in ranked(arms, "balance")}
    return sorted(arms, key=lambda arm: (-first.count(arm.name), -balance.get(arm.name, -math.inf)))


def leader_and_rival(arms: Sequence[Arm]) -> tuple[Arm, Arm | None]:
    """The leading method and what it is held against: the reference, or the second where that leads."""
    leader, *others = best_first(arms)
    reference = reference_of(arms)
    return leader, reference if reference is not leader else others[0] if others else None


def verdict(arms: Sequence[Arm], shown: Sequence[Arm]) -> Verdict:
    """What the runs of one setting say, and the methods `shown` against the reference."""
    reference, (leader, rival) = reference_of(arms), leader_and_rival(arms)
    cards = tuple(_card(arms, key, reference) for key in QUESTIONS)
    return Verdict(
        headline=_headline(arms, leader, cards),
        cards=cards,
        whom=tuple(_whom(leader, rival)),
        price=_price(leader, rival),
        care=tuple(_care(arms)),
        reference=reference.name,
        pairs=tuple(compared(arm, reference) for arm in shown if arm is not reference),
    )


def compared(arm: Arm, reference: Arm) -> Pair:
    """Paired differences, the method minus the reference."""
    seeds = [seed for seed in arm.seeds if seed in reference.seeds]
    ours, theirs = (a.of(seeds).clients.local_acc if seeds else {} for a in (arm, reference))
    return Pair(
        arm.name,
        {key: over_seeds(_differences(arm, reference, key)) for key in QUESTIONS},
        paired.difference([arm.local_acc(s) for s in seeds], [reference.local_acc(s) for s in seeds]),
        {k: ours[k] - theirs[k] for k in sorted(ours.keys() & theirs.keys())},
    )


def over_seeds(differences: Sequence[float]) -> Interval | None:
    """Mean of paired differences and Student's 95 % interval, which two values or more have.

    A bootstrap of two or three seeds would be too sure of itself: it cannot draw what it has not seen.
    """
    if not differences:
        return None
    centre, spread, n = sum(differences) / len(differences), std(differences, 1).value, len(differences)
    if spread is None:
        return Interval(centre, None, None, n)
    half = T[min(n - 2, len(T) - 1)] * spread / math.sqrt(n)
    return Interval(centre, centre - half, centre + half, n)


def _differences(arm: Arm, other: Arm, key: str) -> list[float]:
    ours, theirs = arm.by_seed(key), other.by_seed(key)
    both = [(ours[s], theirs[s]) for s in ours if s in theirs]
    return [a - b for a, b in both if a is not None and b is not None]


def listed(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) <= 2 else f"{len(names)} methods alike"


def judged(arm: Arm, other: Arm, key: str) -> Lead:
    """How far a method is ahead of another, against what the seed alone moves; over the seeds both have."""
    interval = over_seeds(_differences(arm, other, key))
    if interval is None:
        return Lead(f"Not compared with {other.name}: no seed has both.", None)
    ahead = interval.mean
    gap = "less than 0.1" if 0 < ahead < 0.0005 else points(ahead)
    text = f"Ahead of {other.name} by {gap} points"
    if arm.seeds != other.seeds:
        text += f" on the seed{'s' if interval.used > 1 else ''} that both have"
    if interval.low is None or interval.high is None:
        return Lead(f"{text}.", None)
    spread = max(defined(a.summary[key].get("std_seeds") for a in (arm, other)), default=0.0)
    if ahead <= spread:
        return Lead(
            f"{text}: smaller than the spread over seeds ({points(spread)}), no difference shown.", False
        )
    within = f"95% interval {points(interval.low)} to {points(interval.high)}, {interval.used} seeds"
    if interval.low <= 0:
        return Lead(
            f"{text}: larger than the spread over seeds ({points(spread)}), not certain ({within}).", False
        )
    return Lead(f"{text} ({within}).", True)


def _card(arms: Sequence[Arm], key: str, reference: Arm) -> Card:
    title, metric, hint = QUESTIONS[key]
    order = ranked(arms, key)
    if not order:
        reason = arms[0].summary[key].get("reason", "")
        return Card(title, metric, hint, (), None, (f"Not defined: {reason}.",), None)
    top = _top(arms, key)
    behind = [arm for arm, _ in order if arm not in top]
    shown = behind[:1] + [arm for arm in behind[1:] if arm is reference]
    leads = [judged(top[0], arm, key) for arm in shown]
    mixed = [arm.name for arm in top if arm.summary[key]["mean"] != order[0][1]]
    text = f"By all seeds {top[0].name} is first, on those that both have {listed(mixed)}."
    lines = (text,) * bool(mixed) + tuple(lead.text for lead in leads)
    lines = lines or ("All methods are equal.",) * (len(top) > 1)
    certain = leads[0].certain if leads and len(top) == 1 else False
    return Card(title, metric, hint, tuple(arm.name for arm in top), order[0][1], lines, certain)


def _headline(arms: Sequence[Arm], leader: Arm, cards: Sequence[Card]) -> str:
    if len(arms) == 1:
        return f"One method was run, {leader.name}, so there is nothing to compare it with."
    answered = [card for card in cards if card.value is not None]
    won = [card for card in answered if leader.name in card.best]
    shared = sum(len(card.best) > 1 for card in won)
    if not answered:
        return "No question below has an answer: no number is defined."
    if all(len(card.best) == len(arms) for card in answered):
        return "All methods are equal on every question that has an answer."
    every = (
        "every question below" if len(won) == len(answered) else f"{len(won)} of {len(answered)} questions"
    )
    text = f"{leader.name} comes first on {every}"
    text += f" ({shared} of them together with others)" if shared else ""
    rest: dict[str, list[str]] = {}
    for card in answered:
        if card not in won:
            rest.setdefault(listed(card.best), []).append(card.title)
    text += "".join(f", {name} on “{'” and “'.join(titles)}”" for name, titles in rest.items())
    states = [card.certain for card in answered if len(card.best) == 1]
    if all(state is None for state in states):
        of_which = "One seed does" if all(len(arm.runs) == 1 for arm in arms) else "The seeds they share do"
        return f"{text}. {of_which} not show whether that is chance."
    if all(states):
        return f"{text}. Each lead over the next method is larger than what the seeds move."
    if not any(states):
        return f"{text}. With these seeds no lead over the next method is certain."
    certain = states.count(True)
    which = f"{certain} of these leads over the next method {'is' if certain == 1 else 'are'}"
    return f"{text}. {which} certain with these seeds."


def _whom(leader: Arm, rival: Arm | None) -> list[str]:
    """At how many clients, and where not."""
    acc = leader.clients.local_acc
    if not acc:
        return ["No client’s own model has an accuracy, so nothing can be said about single clients."]
    lines = []
    if rival is not None:
        pair = compared(leader, rival)
        if not pair.gaps:
            lines.append(f"No client can be compared with {rival.name}: no seed has both.")
    if rival is not None and pair.gaps:
        n, interval = len(pair.gaps), pair.over_clients
        text = (
            f"With {leader.name}, {pair.better} of {n} clients do better on their own patients than with "
            f"{rival.name}, {pair.worse} {'does' if pair.worse == 1 else 'do'} worse, "
            f"{n - pair.better - pair.worse} the same"
        )
        if interval is not None and interval.low is not None and interval.high is not None:
            text += (
                f"; on average {signed(interval.mean)} points a client (95% interval "
                f"{signed(interval.low)} to {signed(interval.high)}, bootstrap)"
            )
        lines.append(f"{text}.")
        lost = [k for k in sorted(pair.gaps, key=lambda k: pair.gaps[k]) if pair.gaps[k] < 0][:3]
        if lost:
            which = ", ".join(f"client {k} ({points(pair.gaps[k])} points)" for k in lost)
            lines.append(f"It costs most at {which}.")
    worst = sorted(acc, key=lambda k: acc[k])[:3]
    which = ", ".join(f"client {k} ({percent(acc[k])})" for k in worst)
    lines.append(f"Lowest local accuracy with {leader.name}: {which}.")
    return lines


def _price(leader: Arm, rival: Arm | None) -> str:
    """Traffic and training time of the leading method, and how many times the rival's they are."""
    traffic, time = ("down_bytes", "up_bytes"), ("train_seconds",)
    parts = []
    if (bytes := _sum(leader, traffic)) is not None:
        parts.append(f"{size(bytes)} sent in a round, down and up" + _times(leader, rival, traffic))
    if (train := _sum(leader, time)) is not None:
        parts.append(
            f"{seconds(train)} of training in a round on the machine that ran it"
            + _times(leader, rival, time)
        )
    if not parts:
        return f"{leader.name}: traffic and time were not recorded."
    return f"{leader.name}: {'; '.join(parts)}."


def _sum(arm: Arm, names: Sequence[str]) -> float | None:
    values = defined(arm.price[name].value for name in names)
    return sum(values) if len(values) == len(names) else None


def _times(arm: Arm, rival: Arm | None, names: Sequence[str]) -> str:
    ours, theirs = _sum(arm, names), None if rival is None else _sum(rival, names)
    if rival is None or ours is None or not theirs:
        return ""
    return f" ({ours / theirs:.2f} times {rival.name})"


def _care(arms: Sequence[Arm]) -> list[str]:
    """What must be known before any of this is believed."""
    lines = []
    counts = sorted({len(arm.runs) for arm in arms})
    if counts == [1]:
        seeds = sorted({arm.seeds[0] for arm in arms})
        which = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
        lines.append(
            f"One run a method ({which}): no spread over seeds is known, so a small difference may be chance."
        )
    elif len({arm.seeds for arm in arms}) > 1:
        lines.append("The methods were run with different seeds; they are compared over those they share.")
    else:
        lines.append(f"{counts[0]} seeds a method, all on one partition of the data.")
    lines += [f"{arm.name} never merged an update: it has no rank." for arm in arms if not arm.trained]
    refused = [arm.name for arm in arms if arm.trained and any(map(_refused, arm.runs))]
    if refused:
        lines.append(f"Updates were refused in {listed(refused)}, whose numbers rest on fewer; see Warnings.")
    if mean([arm.summary["global_acc"]["mean"] for arm in arms]).used < len(arms):
        lines.append("Not every method has a global accuracy; see the table.")
    made = "was reported by the sites of a real federation" if arms[0].runs[0].sites else "is simulated"
    lines.append(f"All of this {made}. It says nothing about use on patients before validation there.")
    return lines


def _refused(run: Found) -> bool:
    return any(event["event"] in ("rejected", "kept") for event in runfiles.read_events(run.folder))
