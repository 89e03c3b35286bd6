"""Reads the runs' folders into everything that a report shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fedkper import runfiles
from fedkper.averages import Number, defined, mean
from fedkper.errors import InputError
from fedkper.paper import runs as paper_runs
from fedkper.paper.runs import Found, Partition, Setting
from fedkper.report import facts, forgot, sites
from fedkper.report.arms import CURVES, LAST, Arm, arms_of, of_classes
from fedkper.report.chart import LineChart, Reliability, line_chart, reliability
from fedkper.report.shape import (
    CHARTS,
    CLASSES,
    CLIENTS,
    COLUMNS,
    DRAWN,
    METHODS,
    PRICE,
    SCORE_COLUMNS,
    SETTINGS,
    SPREAD_COLUMNS,
    Cell,
    Heat,
    Matrix,
    Report,
    Row,
    Section,
)
from fedkper.report.verdict import best_first, leader_and_rival, verdict
from fedkper.report.words import percent
from fedkper.scores import BINS, recalls


def collect(paths: Sequence[Path], data: Path | None = None) -> Report:
    """Reads the runs at or below `paths`. Raises InputError where there is none, or none that can be read.

    `data`: folder of the data files, to count who holds which classes; nothing is downloaded.
    """
    found, notes = paper_runs.find(paths)
    found = [one for one in found if _whole(one, notes)]
    settings, doubled = paper_runs.settings(found)
    notes += doubled
    sections: list[Section] = []
    for setting in settings:
        partition, arms, said = arms_of(setting)
        if arms:
            sections.append(_section(len(sections), setting, partition, arms, said, data))
        else:
            notes += [f"{setting.title}: no run has finished a round yet"]
    if not sections:
        reason = f": {notes[0]}" if notes else " (no run.json); is this the folder of a run?"
        raise InputError(f"{paths[0]}: holds no run that can be reported{reason}")
    names = list(dict.fromkeys(s.title.partition(",")[0] for s in sections))
    title = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return Report(title, tuple(sections), tuple(notes), len(found), sum(bool(one.sites) for one in found))


def _whole(found: Found, notes: list[str]) -> bool:
    """Whether the files that only a report reads are in order; else a sentence is added to `notes`."""
    try:
        for read in (runfiles.read_events, runfiles.read_confusion, runfiles.read_calibration):
            read(found.folder)
    except InputError as error:
        notes.append(f"left out: {error}")
        return False
    return True


def _section(
    at: int, setting: Setting, partition: Partition, arms: list[Arm], said: list[str], data: Path | None
) -> Section:
    leader, rival = leader_and_rival(arms)
    unique = list(dict.fromkeys([leader, rival or leader, *best_first(arms)]))
    kept = [arm for arm in arms if arm in unique[:METHODS]]
    numbers = {arm.name: n for n, arm in enumerate(kept)}
    full = at < SETTINGS
    drawn = unique[:DRAWN] if full else []
    shown = unique[:2]
    classes = of_classes(leader.runs)
    held = sites.holdings(leader, data) if full else None
    rows = sites.client_rows(shown, leader, held, classes) if full else []
    spread = {
        key: tuple(_row(arm, numbers, SPREAD_COLUMNS, _over_clients(key)) for arm in kept)
        for key in ("local_acc", "global_on_local_acc")
    }
    judged, others = verdict(arms, kept), _partitions(setting)
    elsewhere = _elsewhere(others, leader.name, f"{partition[0]}")
    return Section(
        key=f"s{at + 1}",
        title=setting.title,
        real=bool(setting.runs[0].sites),
        full=full,
        facts=tuple(facts.facts(setting, partition, arms)),
        deviations=tuple(paper_runs.deviations(setting.experiment)),
        verdict=dataclasses.replace(judged, care=(*elsewhere, *judged.care)),
        several=any(len(arm.runs) > 1 for arm in arms),
        rows=tuple(_row(arm, numbers, COLUMNS, _headline) for arm in kept),
        left_out=len(arms) - len(kept),
        scores=tuple(_row(arm, numbers, SCORE_COLUMNS, _score) for arm in kept),
        price=tuple(_row(arm, numbers, PRICE, _price) for arm in kept),
        spread=spread,
        partitions=tuple(others),
        charts=tuple(_charts(kept, numbers, {arm.name for arm in unique[:DRAWN]})) if full else (),
        forgotten=tuple(fall for arm in drawn for fall in forgot.falls(arm, classes)),
        recalls=tuple(r for arm in shown if full and (r := forgot.over_rounds(arm, classes))),
        classes=classes,
        holdings=_fewer(held, [row.client for row in rows[:CLIENTS]]),
        clients=tuple(rows[:CLIENTS]),
        clients_in_all=len(rows),
        shown=tuple(arm.name for arm in shown),
        auc_clients=tuple(_auc(arm) for arm in kept) if any(arm.clients.has_auc for arm in kept) else (),
        heats=tuple(h for arm in drawn for h in _heats(arm, [row.client for row in rows[:CLIENTS]])),
        matrices=tuple(m for arm in drawn if (m := _matrix(arm, classes))),
        calibration=tuple(c for arm in drawn if (c := _calibration(arm))),
        warnings=tuple(facts.warnings(arms, said)),
        commands=tuple(facts.commands(setting, partition, arms)),
        versions=tuple(facts.versions([r for arm in arms for r in arm.runs])),
    )


def _row(
    arm: Arm,
    numbers: Mapping[str, int],
    columns: Iterable[str],
    cell: Callable[[Arm, str], Cell],
) -> Row:
    seeds = arm.seeds
    note = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return Row(arm.name, note, {key: cell(arm, key) for key in columns}, numbers[arm.name])


def _headline(arm: Arm, key: str) -> Cell:
    entry = arm.summary[key]
    used = min(s["counts"]["values"][key] for s in arm.summaries)
    over = "windows" if key.endswith("consistency") else "rounds"
    parts = [f"{len(arm.runs)} seeds"] if len(arm.runs) > 1 else []
    parts += [] if key == "balance" else [f"mean over {used} {over}"]
    if entry.get("runs", len(arm.runs)) < len(arm.runs):
        parts.append(f"has a value for {entry['runs']} of {len(arm.runs)} seeds")
    if entry.get("std_rounds") is not None:
        parts.append(f"deviation over rounds {entry['std_rounds']:.3f}")
    deviation = entry.get("std_seeds") if len(arm.runs) > 1 else entry.get("std_rounds")
    return Cell(entry["mean"], deviation, entry.get("reason", ""), ", ".join(parts))


def _score(arm: Arm, key: str) -> Cell:
    entry = arm.summary["scores"][key]
    rounds = [len(defined(r.curves.scores.get(key, ()))) for r in arm.runs]
    if not any(rounds):
        return Cell(None, None, "not recorded by the version that made the run, or not defined in any round")
    deviation = entry.get("std_seeds") if len(arm.runs) > 1 else entry.get("std_rounds")
    title = f"mean over {min(rounds)} of {arm.rounds} rounds"
    return Cell(entry["mean"], deviation, entry.get("reason", ""), title)


def _over_clients(key: str) -> Callable[[Arm, str], Cell]:
    def cell(arm: Arm, name: str) -> Cell:
        entries = [s["spread"][key] for s in arm.summaries]
        found = mean((e[name] for e in entries), "no client has a value")
        clients = min(e["clients"] for e in entries)
        title = f"over {clients} of {arm.runs[0].experiment.clients} clients"
        return Cell(found.value, None, found.reason, title)

    return cell


def _price(arm: Arm, key: str) -> Cell:
    p = arm.price
    if key == "total_bytes":
        parts, times = [p["down_bytes"], p["up_bytes"]], arm.rounds
    elif key == "total_seconds":
        parts, times = [p["train_seconds"], p["merge_seconds"], p["eval_seconds"]], arm.rounds
    else:
        parts, times = [p[key]], 1
    values = defined(n.value for n in parts)
    if len(values) < len(parts):
        return Cell(None, None, "not recorded")
    return Cell(sum(values) * times, None, "", f"mean over {parts[0].used} rounds")


def _charts(arms: Sequence[Arm], numbers: Mapping[str, int], shown: set[str]) -> list[LineChart]:
    charts = []
    for key in CURVES:
        curves = {arm.name: arm.curves[key] for arm in arms}
        title, axis = CHARTS[key]
        if chart := line_chart(key, title, axis, curves, numbers, shown):
            charts.append(chart)
    return charts


def _partitions(setting: Setting) -> list[tuple[str, str, Cell, Cell, int]]:
    """Means of each method on each partition, where there are several."""
    lines = []
    partitions = setting.partitions()
    for partition in sorted(partitions) if len(partitions) > 1 else ():
        for name, runs in setting.finished(partition).items():
            arm = Arm(name, tuple(runs))
            cells = _headline(arm, "global_acc"), _headline(arm, "local_acc")
            lines.append((name, f"{partition[0]}", *cells, len(runs)))
    return sorted(lines, key=lambda line: (line[0], int(line[1])))


def _elsewhere(lines: Sequence[tuple[str, str, Cell, Cell, int]], leader: str, here: str) -> list[str]:
    """On which other partitions the leading method is not first in global accuracy."""
    found = []
    for seed in dict.fromkeys(line[1] for line in lines if line[1] != here):
        acc = {name: cell.value for name, at, cell, _, _ in lines if at == seed and cell.value is not None}
        best = max(acc, key=lambda name: acc[name], default=leader)
        if leader in acc and acc[best] > acc[leader]:
            than = f"{percent(acc[best])} against {percent(acc[leader])}"
            found.append(
                f"With the data dealt out otherwise (partition seed {seed}), {best} and not {leader} "
                f"does best for patients of no client: {than}."
            )
    return found


def _fewer(held: sites.Holdings | None, clients: Sequence[int]) -> sites.Holdings | None:
    """Those of some clients, in the order of their numbers."""
    if held is None:
        return None
    return sites.Holdings({k: held.counts[k] for k in sorted(clients) if k in held.counts}, held.what)


def _auc(arm: Arm) -> tuple[str, int, int, Cell]:
    auc, there = arm.clients.local_auc, arm.clients.local_acc
    found: Number = mean(auc.values(), "each client’s test part has one class, or was not recorded")
    return arm.name, len(auc), len(there), Cell(found.value, None, found.reason)


def _heats(arm: Arm, clients: Sequence[int]) -> list[Heat]:
    heats = []
    for model in ("local", "global_on_local"):
        found = sites.by_class(arm, model, clients)
        if found:
            heats.append(
                Heat(arm.name, model, tuple((str(k), tuple(found[k])) for k in clients if k in found))
            )
    return heats


def _matrix(arm: Arm, classes: Sequence[str]) -> Matrix | None:
    counts = arm.confusion("global", arm.rounds - LAST).get(None)
    if counts is None:
        return None
    recall = recalls(counts)
    worst = sorted(range(len(classes)), key=lambda c: 2.0 if (r := recall[c]) is None else r)[:CLASSES]
    kept = sorted(worst)
    return Matrix(
        arm.name,
        tuple((c, classes[c]) for c in kept),
        tuple(tuple(int(counts[a, b]) for b in kept) for a in kept),
        tuple(int(counts[a].sum()) for a in kept),
        tuple(recall[a] for a in kept),
        int(counts[:, -1].sum()),
    )


def _calibration(arm: Arm) -> tuple[str, Reliability] | None:
    """Of the first seed's last recorded round."""
    found = runfiles.read_calibration(arm.runs[0].folder)
    found = {t: bins for t, bins in found.items() if t <= arm.rounds}
    if not found:
        return None
    last = max(found)
    values = arm.runs[0].curves.scores.get("global_ece", ())
    ece = values[last - 1] if last <= len(values) else None
    return arm.name, reliability(found[last], BINS, last, ece)
