"""Ranges of fields: declared beside the field, checked in one place, named in every refusal."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from fedkper.errors import InputError


class Range(NamedTuple):
    """Annotated[float, Range(0, 1)]: from low to high, both included unless `above` (low excluded)."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def holds(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.low < value if self.above else self.low <= value)
            and value <= self.high
        )

    def __str__(self) -> str:
        low = (
            f"above {self.low:g}"
            if self.above
            else f"at least {self.low:g}"
            if math.isfinite(self.low)
            else ""
        )
        high = f"at most {self.high:g}" if math.isfinite(self.high) else ""
        return " and ".join(filter(None, (low, high))) or "a finite number"


def check(thing: Any, where: str = "--") -> None:
    """Raises InputError for the first field of a dataclass that is outside its declared range."""
    for name, hint in get_type_hints(type(thing), include_extras=True).items():
        value = getattr(thing, name)
        limits = [a for a in get_args(hint) if isinstance(a, Range)] if get_origin(hint) is Annotated else []
        if isinstance(value, float) and not math.isfinite(value) and not limits:
            limits = [Range()]
        for limit in limits:
            if value is not None and not limit.holds(value):
                option = name.replace("_", "-") if where == "--" else name
                raise InputError(f"{where}{option} {value}: must be {limit}")


def convert(text: str, kind: type, where: str) -> Any:
    """A field's value from text, or InputError: true/false for a bool, whole numbers for an int."""
    if kind is bool:
        words = {
            "true": True,
            "1": True,
            "yes": True,
            "on": True,
            "false": False,
            "0": False,
            "no": False,
            "off": False,
        }
        if text.lower() in words:
            return words[text.lower()]
        raise InputError(f"{where} {text}: must be true or false")
    try:
        return kind(text)
    except ValueError:
        raise InputError(
            f"{where} {text}: must be {'a whole number' if kind is int else 'a number'}"
        ) from None
