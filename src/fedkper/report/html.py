"""The report's HTML: the template, how numbers are written, and a policy that forbids all outside content."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fedkper import tree
from fedkper.errors import RunError
from fedkper.plots import COLOURS
from fedkper.report import chart, shape
from fedkper.report.arms import LAST
from fedkper.report.chart import Line, LineChart
from fedkper.report.verdict import QUESTIONS, listed
from fedkper.report.words import percent, points, seconds, signed, size

PARTS = {
    "table": "Methods",
    "curves": "Over the rounds",
    "forgetting": "Forgetting",
    "clients": "Clients",
    "classes": "Classes",
    "calibration": "Calibration",
    "price": "Traffic and time",
    "what": "What was run",
    "warnings": "Warnings",
    "again": "Run it again",
}
LONG = 12  # letters of a word that fit the narrowest column of names


def write(report: shape.Report, path: Path) -> None:
    """Writes the report; whole or not at all. Raises RunError where the file cannot be written."""
    try:
        tree.write(path, render(report).encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


def render(report: shape.Report) -> str:
    """One HTML document that needs nothing else: styles, script, pictures and values are in it.

    Names in it may be anybody's: the template escapes every text, and the policy lets no other script run.
    """
    here = files("fedkper.report")
    css = (here / "report.css").read_text(encoding="utf-8")
    js = (here / "report.js").read_text(encoding="utf-8")
    # Jinja leaves out a newline at the end; the hash must be of exactly what stands between the tags.
    digest = base64.b64encode(hashlib.sha256(js.encode()).digest()).decode()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedkper", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.filters |= {
        "num": num,
        "percent": percent,
        "points": points,
        "signed": signed,
        "bytes": size,
        "seconds": seconds,
        "said": said,
        "breakable": breakable,
    }
    page = environment.get_template("report.html.j2")
    return page.render(
        report=report,
        css=css,
        js=js,
        digest=digest,
        colours=COLOURS,
        c=shape,
        g=chart,
        parts=PARTS,
        questions=QUESTIONS,
        listed=listed,
        prices=shape.PRICE,
        last=LAST,
        curves=_curves,
    )


def _curves(section: shape.Section) -> dict[str, Any]:
    """What the script reads when a reader hovers over a curve."""
    return {
        chart.key: {"rounds": chart.rounds, "lines": [_line(chart, line) for line in chart.lines]}
        for chart in section.charts
    }


def _line(chart: LineChart, line: Line) -> dict[str, Any]:
    return {"n": line.number, "name": line.name, "values": chart.values[line.name]}


def num(value: float, digits: int = 3) -> str:
    """A number with a true minus sign."""
    if not math.isfinite(value):
        raise ValueError("what is not defined must be None, with a reason")
    text = f"{value:.{digits}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")


def said(reason: str) -> str:
    """A reason in the words of a reader: "undefined" is what scripts print when they fail."""
    return reason.replace("undefined", "not defined")


def breakable(name: str) -> Markup:
    """A name in which a line may end inside a long word too, after = ( / and the like instead of anywhere."""
    return Markup(" ").join(
        Markup("<wbr>").join(re.split(r"(?<=[=(/\\_,;:.+-])(?=.)", word)) if len(word) > LONG else word
        for word in name.split(" ")
    )
