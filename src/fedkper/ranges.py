"""Ranges of fields: declared beside the field, checked in one place, named in every refusal."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fedkper.errors import InputError

WORDS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)


class Range(NamedTuple):
    """Annotated[float, Range(0, 1)]: from low to high, both included unless `above` (low excluded)."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def holds(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low = f"above {plain(self.low)}" if self.above else f"at least {plain(self.low)}"
        high = f"at most {plain(self.high)}" if math.isfinite(self.high) else "finite"
        return f"{low} and {high}" if math.isfinite(self.low) else high


def plain(value: float) -> str:
    """A number as a person writes it: 1,000,000 and 0.01, not 1e+06."""
    return f"{int(value):,}" if math.isfinite(value) and value == int(value) else f"{value:g}"


def check(thing: Any, where: str = "--") -> None:
    """Raises InputError for the first field of a dataclass that is outside its declared range."""
    for name, hint in get_type_hints(type(thing), include_extras=True).items():
        value = getattr(thing, name)
        limits = [a for a in get_args(hint) if isinstance(a, Range)] if get_origin(hint) is Annotated else []
        option = name.replace("_", "-") if where == "--" else name
        inner = kind_of(hint)[0]
        choices = get_args(inner) if get_origin(inner) is Literal else ()
        if choices and value not in choices:
            raise InputError(f"{where}{option} {value}: must be one of {', '.join(map(str, choices))}")
        if isinstance(value, float) and not math.isfinite(value) and not limits:
            limits = [Range()]
        for limit in limits:
            if value is not None and not limit.holds(value):
                raise InputError(f"{where}{option} {value}: must be {limit}")


def kind_of(hint: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there may be several: without ranges and None."""
    if get_origin(hint) is Annotated:
        return kind_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return kind_of(next(kind for kind in get_args(hint) if kind is not NoneType))
    if get_origin(hint) is tuple:
        return kind_of(get_args(hint)[0])[0], True
    return hint, False


def convert(text: str, hint: Any, where: str) -> Any:
    """A field's value from text, or InputError: true/false for a bool, whole numbers for an int.

    A range in the hint is only named in the message; `check` holds the value against it.
    """
    kind, _ = kind_of(hint)
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        if text not in choices:
            raise InputError(f"{where} {text}: must be one of {', '.join(choices)}{near(text, choices)}")
        return choices[text]
    if kind in (str, Path):
        return kind(text)
    if kind is bool:
        if text.lower() not in WORDS:
            raise InputError(f"{where} {text}: must be true or false")
        return WORDS[text.lower()]
    if kind not in (int, float):
        raise InputError(f"{where}: a field of this type cannot be set here, only bool, int, float and text")
    limits = [a for a in get_args(hint) if isinstance(a, Range)] if get_origin(hint) is Annotated else []
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        hint = "; several are separated by spaces" if "," in text else ""
        raise InputError(
            f"{where} {text}: must be {what}{f', {limits[0]}' if limits else ''}{hint}"
        ) from None


def near(word: str, known: Iterable[str]) -> str:
    """A hint at what may have been meant, or nothing."""
    match = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean '{match[0]}'?" if match else ""
