"""What was run, what went wrong in it, and how to run it again; from run.json and events.jsonl."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fedkper import runfiles
from fedkper.experiment import Experiment
from fedkper.paper import runs as paper_runs
from fedkper.paper.runs import Found, Partition, Setting
from fedkper.report.arms import Arm, of_classes
from fedkper.report.shape import COLUMNS, EVENTS, WARNINGS


def facts(setting: Setting, partition: Partition, arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """Data, clients, training, model and methods in words."""
    e, stored = setting.experiment, arms[0].runs[0].stored
    data = stored["data"] if isinstance(stored.get("data"), dict) else {}
    model = stored["model"] if isinstance(stored.get("model"), dict) else {}
    dealt = {
        "dirichlet": f"Dirichlet, alpha {e.alpha:g}: the smaller, the more the clients’ classes differ",
        "pathological": f"{e.classes_per_client} classes a client",
        "iid": "at random, alike for all",
        "column": f"by the column “{e.column}”",
    }[e.partition]
    if sites := arms[0].runs[0].sites:
        held = f"{_count(data, 'train')} images that train at the sites and never leave them"
        clients = (
            f"{len(sites)} sites of a real federation ({', '.join(sites)}), of which {e.fraction:.0%} train"
        )
        dealt = "each with its own data"
    else:
        held = f"{setting.dataset}: {_count(data, 'train')} images dealt out to the clients"
        clients = f"{e.clients:,}, of which {e.fraction:.0%} train"
        dealt += f"; partition seed {partition[0]}"
    shape = data.get("shape")
    size = f", {' × '.join(map(str, shape))}" if isinstance(shape, list) else ""
    parameters = model.get("parameters")
    weights = f", {parameters:,} weights" if isinstance(parameters, int) else ""
    return [
        (
            "Data",
            f"{held}, {_count(data, 'test')} of the global test set that no client sees{size}",
        ),
        ("Classes", ", ".join(of_classes(arms[0].runs)) or "not recorded"),
        ("Licence", str(data.get("licence") or "not stated in the data")),
        ("Citation", str(data.get("citation") or "not stated in the data")),
        (
            "Clients",
            f"{clients} in a round; {dealt}",
        ),
        (
            "Training",
            f"{e.rounds:,} rounds, {e.epochs} local epochs in batches of {e.batch}, "
            f"learning rate {e.lr:g} × {e.lr_decay:g} a round, momentum {e.momentum:g}",
        ),
        ("Model", f"{e.model}{weights}"),
        (
            "Methods",
            ", ".join(
                f"{arm.name} (seed{'s' if len(arm.seeds) > 1 else ''} {', '.join(map(str, arm.seeds))})"
                for arm in arms
            ),
        ),
        (
            "First started",
            min(
                (str(r.stored.get("started", "not recorded")) for arm in arms for r in arm.runs), key=_moment
            ),
        ),
        ("Data hash", str(data.get("hash") or "not recorded")),
        ("Partition hash", partition[1] or "not recorded"),
    ]


def _moment(text: str) -> float:
    """A time as seconds, whatever its zone; what is none comes last."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return math.inf


def _count(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    return f"{value:,}" if isinstance(value, int) else "an unknown number of"


def warnings(arms: Sequence[Arm], said: Sequence[str]) -> list[tuple[str, str]]:
    """What happened in the runs that a reader of the numbers should know."""
    lines = [("Runs", text) for text in said]
    lines += [("Data", text) for text in paper_runs.notices(r for arm in arms for r in arm.runs)]
    words = {
        "rejected": "an update was refused",
        "kept": "the global model was kept",
        "fallback": "the method fell back",
        "checkpoint": "a damaged checkpoint",
        "resumed": "the run was resumed",
        "unanswered": "a site did not answer",
        "fresh": "a site started afresh",
    }
    for arm in arms:
        for r in arm.runs:
            kinds: dict[str, list[dict[str, Any]]] = {}
            for event in runfiles.read_events(r.folder):
                kinds.setdefault(str(event.get("event")), []).append(event)
            for kind, events in kinds.items():
                what = f"{arm.name}, seed {r.experiment.seed}: {words.get(kind, kind)}"
                lines.append((what, _told(events)))
    for key, (title, _) in COLUMNS.items():
        reasons: dict[str, list[str]] = {}
        for arm in arms:
            if arm.summary[key]["mean"] is None:
                reasons.setdefault(str(arm.summary[key]["reason"]), []).append(arm.name)
        lines += [
            (f"No {title}", f"{reason}. In {len(names)} of {len(arms)} methods: {', '.join(names)}")
            for reason, names in reasons.items()
        ]
    if differing := paper_runs.machines(r for arm in arms for r in arm.runs):
        lines.append(
            ("Machines differ: times are not comparable, last digits may move", "; ".join(differing))
        )
    more = (
        [("More", f"{len(lines) - WARNINGS} warnings more, of other runs")] if len(lines) > WARNINGS else []
    )
    return lines[:WARNINGS] + more


def _told(events: Sequence[dict[str, Any]]) -> str:
    """How often and why, with the first few rounds and clients of each reason."""
    places: dict[str, list[str]] = {}
    for event in events:
        where = [f"{name} {event[name]}" for name in ("round", "after_round", "client") if name in event]
        places.setdefault(str(event.get("reason", "")), []).append(", ".join(where).replace("_", " "))
    told = []
    for reason, found in list(places.items())[:EVENTS]:
        more = f" and {len(found) - EVENTS} more" if len(found) > EVENTS else ""
        shown = "; ".join(found[:EVENTS]) + more
        told.append(f"{reason} ({shown})" if reason else shown)
    told += [f"and {len(places) - EVENTS} other reasons"] if len(places) > EVENTS else []
    return f"{'once' if len(events) == 1 else f'{len(events)} times'}: {'; '.join(told)}"


def commands(setting: Setting, partition: Partition, arms: Sequence[Arm]) -> list[str]:
    """fedkper compare with every option that is not the default; a line for each set of seeds.

    For a federation what founds another one with the same settings. Some defaults there are others.
    """
    e, default = setting.experiment, Experiment()
    options: list[str] = []
    sites = arms[0].runs[0].sites
    # The sites are the clients.
    left_out = {*paper_runs.FREE, "clients", "fraction"} if sites else set(paper_runs.FREE)
    for name, value in e.to_json().items():
        if name not in left_out and value != getattr(default, name):
            options += [f"--{name.replace('_', '-')}", f"{value}"]
    if partition[0] != default.partition_seed:
        options += ["--partition-seed", str(partition[0])]
    if sites:
        options += ["--fraction", f"{e.fraction}"]
        agreed = arms[0].runs[0].stored["federation"]
        for name in ("minimum", "wait", "limit", "tries"):
            options += (
                [f"--{name}", f"{agreed[name]:g}"] if isinstance(agreed.get(name), (int, float)) else []
            )
        start = ["fedkper", "federation", "new", "FOLDER", "--sites", *sites, "--method"]
        return [shlex.join([*start, arm.runs[0].experiment.method, *options]) for arm in arms]
    groups: dict[tuple[int, ...], list[str]] = {}
    for arm in arms:
        groups.setdefault(arm.seeds, []).append(arm.runs[0].experiment.method)
    return [
        shlex.join(["fedkper", "compare", "--methods", *methods, "--seeds", *map(str, seeds), *options])
        for seeds, methods in groups.items()
    ]


def versions(runs: Sequence[Found]) -> list[tuple[str, str]]:
    """Versions and machines, each once."""
    seen: dict[str, dict[str, None]] = {}
    for r in runs:
        versions = r.stored.get("versions")
        facts = dict(versions) if isinstance(versions, dict) else {}
        execution = r.stored.get("execution")
        facts |= {"device": execution.get("device")} if isinstance(execution, dict) else {}
        for name, value in (facts | {"platform": r.stored.get("platform")}).items():
            if value is not None:
                seen.setdefault(str(name), {})[str(value)] = None
    return [(name, ", ".join(values)) for name, values in seen.items()]
