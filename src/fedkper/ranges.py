"""Ranges of fields: declared beside the field, checked in one place, named in every refusal."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

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
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        if choices and value not in choices:
            raise InputError(f"{where}{option} {value}: must be one of {', '.join(choices)}")
        if isinstance(value, float) and not math.isfinite(value) and not limits:
            limits = [Range()]
        for limit in limits:
            if value is not None and not limit.holds(value):
                option = name.replace("_", "-") if where == "--" else name
                raise InputError(f"{where}{option} {value}: must be {limit}")


def convert(text: str, kind: type, where: str, limit: Range | None = None) -> Any:
    """A field's value from text, or InputError: true/false for a bool, whole numbers for an int.

    `limit` is only named in the message; `check` holds the value against it.
    """
    if kind is bool:
        if text.lower() not in WORDS:
            raise InputError(f"{where} {text}: must be true or false")
        return WORDS[text.lower()]
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InputError(f"{where} {text}: must be {what}{f', {limit}' if limit else ''}") from None
