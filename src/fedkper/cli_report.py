"""The command report: one HTML file from the folders of runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import tyro

from fedkper import tables
from fedkper.errors import InputError
from fedkper.options import Command, OptionalPath

NAME = "report.html"


@dataclass(frozen=True)
class Report(Command):
    """One HTML file on runs, to open in a browser, to send and to print; it needs no network.

    It says which method, for whom and at what price, and shows the numbers behind that: the table, curves,
    forgetting, clients, classes, calibration, traffic and time, warnings, and the command to run it again.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs, or folders that hold some at any depth"""
    out: OptionalPath = None
    """the file; report.html in the first folder if not given"""
    data: OptionalPath = None
    """folder of the data files, to count who holds which classes; else $FEDKPER_DATA. No download"""

    def act(self) -> None:
        from fedkper.report import collect, html

        path = self.out or self.runs[0] / NAME
        if os.path.isdir(path):
            raise InputError(f"--out {path}: is a folder; name a file, such as {path / NAME}")
        if self.out and not os.path.isdir(path.parent):
            raise InputError(f"--out {path}: there is no folder {path.parent}; make it, or name another file")
        report = collect.collect(self.runs, self.data)
        html.write(report, path)
        for note in report.notes:
            tables.notice(note)
        tables.line(f"report: {path}")


COMMANDS: dict[str, type[Command]] = {"report": Report}
