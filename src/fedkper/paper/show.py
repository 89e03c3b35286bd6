"""The paper's table, and its efficiency figure in numbers, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from fedkper import tables
from fedkper.paper.efficiency import readings
from fedkper.paper.runs import Found, Setting, machines
from fedkper.paper.table import COLUMNS, LAST_OF_GROUP, Block, Row, Spread, Value, listing, number

# A terminal of this width has room for a deviation beside each mean; in others it is on a line of its own.
WIDE = 111
LEGEND = (
    "means over rounds, ± deviation over rounds, (deviation over seeds); ¹ best, ² second best; higher is "
    "better in every column"
)
_MARKS = {0: " ", 1: "¹", 2: "²"}
_STYLES = {0: "", 1: "bold", 2: "underline"}


def show(block: Block) -> None:
    """One setting's table, the notes to it, and the spread over partitions if there are several."""
    _heads(block.setting.title)
    for row in block.rows:
        _method(row)
        if row.method in LAST_OF_GROUP and row is not block.rows[-1]:
            tables.line("")
    for note in (LEGEND, *block.notes):
        tables.line(tables.plain(note), "dim")
    if block.spreads:
        tables.line("")
        _heads(f"{block.setting.title}: spread over partitions")
        for spread in block.spreads:
            _partitions(spread)
        tables.line("means of the seeds named, of each partition; ± deviation over partitions", "dim")


def efficiency(setting: Setting, runs: Mapping[str, list[Found]]) -> None:
    """Figure 5 in numbers: each method at quarters of the time that the first one took."""
    tables.line(tables.plain(f"{setting.title}: global accuracy at equal times"), "bold")
    baseline = next(iter(runs))
    found = readings(runs)
    for clock in dict.fromkeys(r.clock for r in found):
        tables.line(f"at quarters of {tables.plain(baseline)}'s seconds of {clock}")
        rows = []
        for r in (r for r in found if r.clock == clock):
            gain = "–" if r.relative is None else f"{100 * r.relative:+.1f} %"
            times = {"at": f"{r.seconds:.0f} s", "share": f"{100 * r.share:.0f} %"}
            accs = {"method": r.method, "its acc.": number(r.acc), baseline: number(r.baseline_acc)}
            gains = {"points": number(r.points, signed=True), "relative": gain}
            rows.append(times | accs | gains | {"of 9 rounds": number(r.smooth_points, signed=True)})
        tables.rows(rows)
        tables.line("")
    if other := machines([r for found in runs.values() for r in found]):
        tables.notice(f"the times are not of one machine and version: {'; '.join(other)}")


def _method(row: Row) -> None:
    """Its numbers, below them the published ones and the difference."""
    _values(row.method + (f" ({listing(row.seeds)})" if len(row.seeds) > 1 else ""), row.here)
    if row.published:
        _values("  published", row.published, "dim")
    if row.published and row.seeds:
        _line("  difference", [number(row.difference(c), signed=True) for c in COLUMNS])


def _values(label: str, values: Mapping[str, Value], style: str = "") -> None:
    """Means and deviations, beside each other as far as there is room."""
    cells = [values[c] for c in COLUMNS]
    rounds = ["" if v.std_rounds is None else f"±{number(v.std_rounds)}" for v in cells]
    seeds = ["" if v.std_seeds is None else f"({number(v.std_seeds)})" for v in cells]
    beside = [r or s for r, s in zip(rounds, seeds, strict=True)] if _wide() else [""] * len(cells)
    _line(label, [number(v.mean) for v in cells], beside, [v.rank for v in cells], style)
    for name, texts in {"  ± over rounds": rounds, "  (over seeds)": seeds}.items():
        left = [t if t != b else "" for t, b in zip(texts, beside, strict=True)]
        if any(left):
            _line(name, left, style=style)


def _partitions(spread: Spread) -> None:
    """Each partition's means, then their mean and deviation."""
    _line(f"{spread.method} (seed {listing(spread.seeds)})", ())
    for (seed, _), values in spread.each.items():
        _line(f"  partition {seed}", [number(values[c].mean) for c in COLUMNS])
    _line("  mean", [number(spread.over(c).mean.value) for c in COLUMNS])
    _line("  ±", [number(spread.over(c).std_sample.value) for c in COLUMNS])


def _heads(title: str) -> None:
    """The title, and the columns' names in two lines."""
    tables.line(tables.plain(title), "bold")
    label, column = _widths()
    for at in (0, 1):
        names = (tables.COLUMNS[c].split("\n")[at] for c in COLUMNS)
        tables.line((" " * label + "".join(f"{name:>{column}}" for name in names)).rstrip(), "bold")


def _line(
    label: str,
    numbers: Sequence[str],
    beside: Sequence[str] = (),
    ranks: Sequence[int] = (),
    style: str = "",
) -> None:
    """A name and a number for each column, in `style`; a name that is too long gets a line of its own."""
    room, column = _widths()
    label = tables.plain(label)
    if len(label) >= room and numbers:
        tables.line(label, style)
        label = ""
    text = Text(f"{label:<{room}}", style)
    for at, shown in enumerate(numbers):
        rank, after = ranks[at] if ranks else 0, beside[at] if beside else ""
        text.append(" " * (column - _after() - len(shown)))
        text.append(shown, _STYLES[rank])
        text.append(_MARKS[rank] + f"{after:<{_after() - 1}}")
    text.rstrip()
    tables.out.print(text, soft_wrap=True)


def _wide() -> bool:
    return tables.out.width >= WIDE


def _widths() -> tuple[int, int]:
    """Of the names, and of a column."""
    return (20, 13) if _wide() else (16, 9)


def _after() -> int:
    """Room behind a number: for its mark, and for a deviation."""
    return 7 if _wide() else 1
