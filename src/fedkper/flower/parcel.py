"""What travels between a site and the coordinator, and the codes that stand for whatever went wrong."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from fedkper.errors import RunError
from fedkper.tree import Tree

Word = str | int | float | bool


class Parcel(NamedTuple):
    """A message or its answer: a few words and numbers, and trees by name."""

    words: dict[str, Word]
    trees: dict[str, Tree] = {}  # noqa: RUF012


class Code(IntEnum):
    """What a coordinator learns of a failure at a site; the text stays in the site's own log.

    With CONTRACT at joining come the entries that differ, which are of what was agreed on, not of data.
    """

    DONE = 0
    CONTRACT = 10
    POLICY = 11
    MESSAGE = 12
    DATA = 20
    STATE = 21
    MEMORY = 22
    TRAINING = 23
    INTERNAL = 30
    SILENT = 40
    AWAY = 41

    @property
    def meaning(self) -> str:
        return MEANINGS[self]


MEANINGS = {
    Code.DONE: "done",
    Code.CONTRACT: "the site's federation.toml, model or version differs from the coordinator's",
    Code.POLICY: "the site's own policy does not allow it",
    Code.MESSAGE: "the message was not understood, or is of another federation",
    Code.DATA: "the site's data cannot be read or do not fit",
    Code.STATE: "the site cannot read or write its own state",
    Code.MEMORY: "the site ran out of memory",
    Code.TRAINING: "training failed at the site",
    Code.INTERNAL: "an unexpected failure at the site",
    Code.SILENT: "no answer in time",
    Code.AWAY: "the site is not connected, or has not joined",
}


class SiteError(RunError):
    """A failure at a site: the code leaves it, the text does not."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.exit_code = 2 if code in (Code.CONTRACT, Code.POLICY, Code.DATA) else 1
