"""The paper's table as files: CSV for programs, Markdown for a page, LaTeX for a paper."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedkper import tree
from fedkper.errors import RunError
from fedkper.paper.runs import Setting, deviations
from fedkper.paper.table import COLUMNS, LAST_OF_GROUP, Block, Row, Spread, Value, listing, number

HEADS = {
    "global_acc": "global accuracy",
    "global_bwt": "global BwT",
    "global_consistency": "global consistency",
    "local_acc": "local accuracy",
    "worst_client_acc": "worst client",
    "local_consistency": "local consistency",
    "balance": "balance",
}
CSV_COLUMNS = (
    "dataset",
    "clients",
    "rounds",
    "not_as_in_the_paper",
    "partition_seed",
    "partition_hash",
    "strategy",
    "seeds",
    "metric",
    "mean",
    "std_rounds",
    "std_seeds",
    "rank",
    "reason",
    "published_mean",
    "published_std_rounds",
    "published_std_seeds",
    "published_rank",
    "difference",
)
SPREAD_COLUMNS = (
    *CSV_COLUMNS[:4],
    "strategy",
    "seeds",
    "partition_seeds",
    "metric",
    "mean",
    "std_partitions",
)
LEGEND = (
    "Means over rounds ± deviation over rounds, in brackets the deviation over seeds; BwT is backward "
    "transfer. Higher is better in every column."
)
HOW_TO = (
    "% needs \\usepackage{booktabs}; to see it alone:\n"
    "% pdflatex '\\documentclass{article}\\usepackage[a4paper,landscape,margin=1cm]{geometry}"
    "\\usepackage{booktabs}\\begin{document}\\input{table1}\\end{document}'\n"
)
_SPECIAL = {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}"}
_SPECIAL |= {"–": "--", "±": r"$\pm$", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
_SPECIAL |= {"$": r"$\$$"} | {c: f"\\{c}" for c in "&%#_{}"}  # a dollar of the font that is there


def save(blocks: Sequence[Block], folder: Path) -> list[Path]:
    """Writes table1.csv, .md and .tex, and table1-partitions.csv where there are several partitions.

    Raises RunError that names the file if one cannot be written.
    """
    texts = {"table1.csv": as_csv(blocks), "table1-partitions.csv": spreads_as_csv(blocks)}
    texts |= {"table1.md": as_markdown(blocks), "table1.tex": as_latex(blocks)}
    written = [folder / name for name, text in texts.items() if text]
    for path in written:
        try:
            tree.write(path, texts[path.name].encode(errors="replace"))
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror})") from error
    return written


def as_csv(blocks: Sequence[Block]) -> str:
    """A line for each setting, method and column, numbers unrounded, an empty cell for what is undefined."""
    lines = []
    for block in blocks:
        for row in block.rows:
            for column in COLUMNS:
                here, there = row.here[column], row.published.get(column, Value(None))
                cells = [
                    *_head(block.setting),
                    block.partition[0],
                    block.partition[1][:12],
                    row.method,
                    _seeds(row.seeds),
                    column,
                ]
                cells += [here.mean, here.std_rounds, here.std_seeds, here.rank or None, here.reason]
                cells += [there.mean, there.std_rounds, there.std_seeds, there.rank or None]
                lines.append([*cells, row.difference(column)])
    return _csv(CSV_COLUMNS, lines)


def spreads_as_csv(blocks: Sequence[Block]) -> str:
    """The same for the spread over partitions; empty if no setting has several."""
    lines = []
    for block in blocks:
        for spread in block.spreads:
            partitions = _seeds([seed for seed, _ in spread.each])
            for column in COLUMNS:
                over = spread.over(column)
                cells = [*_head(block.setting), spread.method, _seeds(spread.seeds), partitions, column]
                lines.append([*cells, over.mean.value, over.std_sample.value])
    return _csv(SPREAD_COLUMNS, lines) if lines else ""


def _head(setting: Setting) -> list[object]:
    e = setting.experiment
    return [setting.dataset, e.clients, e.rounds, "; ".join(deviations(e))]


def _seeds(seeds: Sequence[int]) -> str:
    return " ".join(map(str, seeds))


def _csv(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if cell is None else cell for cell in line] for line in lines)
    return text.getvalue()


# --- Markdown -----------------------------------------------------------------------------------------


def as_markdown(blocks: Sequence[Block]) -> str:
    parts = ["# Table 1", LEGEND + " Best in bold, second best underlined."]
    for block in blocks:
        parts.append(f"## {_markdown(block.setting.title)}")
        rows = [line for row in block.rows for line in _lines(row, _markdown, _markdown_value, "*{}*")]
        parts.append(_markdown_table(["", *HEADS.values()], rows))
        parts.append("\n".join(f"- {_markdown(note)}" for note in block.notes))
        if block.spreads:
            parts.append(f"### {_markdown(block.setting.title)}: spread over partitions")
            rows = [
                line
                for spread in block.spreads
                for line in _spread_lines(spread, _markdown, _markdown_value, "*{}*")
            ]
            parts.append(_markdown_table(["", *HEADS.values()], rows))
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#$~])", r"\\\1", " ".join(text.split()))


def _markdown_value(v: Value, signed: bool) -> str:
    text = number(v.mean, signed)
    text = f"**{text}**" if v.rank == 1 else f"<u>{text}</u>" if v.rank == 2 else text
    return text + _beside(v, "± ")


# --- LaTeX --------------------------------------------------------------------------------------------


def as_latex(blocks: Sequence[Block]) -> str:
    """A table* for each setting, for \\input into a document that loads booktabs."""
    return HOW_TO + "\n".join(table for block in blocks for table in _latex_tables(block))


def _latex_tables(block: Block) -> list[str]:
    title = _latex(block.setting.title)
    rows = []
    for row in block.rows:
        rows += [" & ".join(line) + r" \\" for line in _lines(row, _latex, _latex_value, r"\quad {}")]
        if row.method in LAST_OF_GROUP and row is not block.rows[-1]:
            rows.append(r"\midrule")
    caption = f"{title}. {_latex(LEGEND)} Best in bold, second best underlined."
    tables = [_latex_table(caption, rows, [_latex(note) + r"\par" for note in block.notes])]
    if block.spreads:
        rows = []
        for spread in block.spreads:
            rows += [
                " & ".join(line) + r" \\" for line in _spread_lines(spread, _latex, _latex_value, r"\quad {}")
            ]
        caption = f"{title}: spread over partitions, of means of the seeds named."
        tables.append(_latex_table(caption, rows, []))
    return tables


def _latex_table(caption: str, rows: Sequence[str], notes: Sequence[str]) -> str:
    heads = " & ".join(["", *HEADS.values()])
    lines = [r"\begin{table*}", r"\centering", rf"\caption{{{caption}}}", r"\footnotesize"]
    lines += [r"\setlength{\tabcolsep}{4pt}", rf"\begin{{tabular}}{{@{{}}l{'l' * len(HEADS)}@{{}}}}"]
    lines += [r"\toprule", heads + r" \\", r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    lines += [r"\par\medskip\raggedright\scriptsize", *notes] if notes else []
    return "\n".join([*lines, r"\end{table*}", ""])


def _latex(text: str) -> str:
    """Text with nothing that TeX takes for a command, and nothing that its usual fonts lack."""
    return "".join(_SPECIAL.get(c, c if ord(c) < 256 else "?") for c in " ".join(text.split()))


def _latex_value(v: Value, signed: bool) -> str:
    text = number(v.mean, signed)
    text = _latex(text) if v.mean is None else f"${text}$"
    text = rf"\textbf{{\boldmath {text}}}" if v.rank == 1 else text
    text = rf"\underline{{{text}}}" if v.rank == 2 else text
    beside = _beside(v, r"$\pm$").strip()
    return text + (rf"\,{{\scriptsize {beside}}}" if beside else "")


# --- what both have in common -------------------------------------------------------------------------


def _beside(v: Value, sign: str) -> str:
    """The deviations behind a mean."""
    rounds = "" if v.std_rounds is None else f" {sign}{number(v.std_rounds)}"
    return rounds + ("" if v.std_seeds is None else f" ({number(v.std_seeds)})")


def _lines(
    row: Row, escape: Callable[[str], str], value: Callable[[Value, bool], str], below: str
) -> list[list[str]]:
    """A method's lines: ours, the published one, the difference; `below`: how the names of these are set."""
    seeds = f" (seeds {listing(row.seeds)})" if len(row.seeds) > 1 else ""
    lines = [[escape(row.method + seeds), *(value(row.here[c], False) for c in COLUMNS)]]
    if row.published:
        lines.append([below.format("published"), *(value(row.published[c], False) for c in COLUMNS)])
    if row.published and row.seeds:
        values = (Value(row.difference(c)) for c in COLUMNS)
        lines.append([below.format("difference"), *(value(v, True) for v in values)])
    return lines


def _spread_lines(
    spread: Spread, escape: Callable[[str], str], value: Callable[[Value, bool], str], below: str
) -> list[list[str]]:
    """Each partition's means, then their mean and deviation."""
    lines = [[escape(f"{spread.method} (seed {listing(spread.seeds)})"), *[""] * len(COLUMNS)]]

    def line(name: str, values: Mapping[str, float | None]) -> None:
        cells = (value(Value(values[c]), False) for c in COLUMNS)
        lines.append([below.format(escape(name)), *cells])

    for (seed, _), each in spread.each.items():
        line(f"partition {seed}", {c: each[c].mean for c in COLUMNS})
    line("mean", {c: spread.over(c).mean.value for c in COLUMNS})
    line("± over partitions", {c: spread.over(c).std_sample.value for c in COLUMNS})
    return lines
