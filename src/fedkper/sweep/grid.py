"""Which experiments a sweep has: lists of values for some fields, in words or in a file, multiplied out."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

from fedkper.errors import InputError
from fedkper.experiment import PRESETS, Experiment, from_json
from fedkper.ranges import convert, near

MOST = 10_000
HINTS = get_type_hints(Experiment, include_extras=True)
# The outermost loops; the methods and the seeds of a setting come after each other.
ORDER = {"preset": -2, "dataset": -1, "method": 1, "seed": 2}


@dataclass(frozen=True)
class Grid:
    """Lists to be multiplied out. "preset" stands for the fields that a preset sets."""

    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """{field: values}: all combinations"""
    cells: Sequence[Mapping[str, Any]] = ({},)
    """{field: value} each, combined with `vary`"""
    base: Mapping[str, Any] = field(default_factory=dict)
    """fields of all experiments, less "preset", which is replaced by what it sets"""
    data: Path | None = None
    """folder of the data files, where the file names one"""
    partition_file: Path | None = None

    def varied(self) -> set[str]:
        """The fields that `vary` and `cells` set."""
        names = {*self.vary, *(name for cell in self.cells for name in cell)}
        return names | {name for p in self._presets() for name in PRESETS[p]}

    def _presets(self) -> set[str]:
        named = {*self.vary.get("preset", ()), *(cell.get("preset") for cell in self.cells)}
        return named - {None}


def experiments(base: Experiment, grid: Grid) -> list[Experiment]:
    """All combinations on top of `base`: data sets outermost, seeds innermost.

    Raises InputError for a field that would get two values, and for more than MOST combinations.
    """
    _refuse_twice(grid)
    axes = dict(sorted(grid.vary.items(), key=lambda axis: ORDER.get(axis[0], 0)))
    count = len(grid.cells) * math.prod(map(len, axes.values()))
    if count > MOST:
        raise InputError(f"{count:,} cells: a sweep has at most {MOST:,}; vary less at a time")
    found = []
    for values in product(*axes.values()):
        for cell in grid.cells:
            fields = dict(cell) | dict(zip(axes, values, strict=True))
            found.append(dataclasses.replace(base, **_spelt_out(fields)))
    return found


def _refuse_twice(grid: Grid) -> None:
    inside = {name for cell in grid.cells for name in cell}
    if twice := sorted(inside & grid.vary.keys()):
        raise InputError(f"{twice[0]}: is varied and set in [[cells]] too; one of them would have no effect")
    set_by = {name for preset in grid.vary.get("preset", ()) for name in PRESETS[preset]}
    if twice := sorted(set_by & (inside | grid.vary.keys())):
        raise InputError(f"{twice[0]}: is varied, and the presets that are varied set it too; leave out one")


def _spelt_out(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields without "preset": what stands beside a preset wins."""
    preset = fields.pop("preset", None)
    return (PRESETS[preset] if preset else {}) | fields


def words(texts: Iterable[str]) -> dict[str, list[Any]]:
    """FIELD=VALUE,VALUE,... as typed. Raises InputError that names the field or the value."""
    vary: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise InputError(f"--vary {text}: must be FIELD=VALUE,VALUE,..., such as lr=0.1,0.01")
        if name == "method":  # NAME:field=value,field=value has commas
            raise InputError("--vary method: name them with --methods")
        _known(name, "--vary")
        if name in vary:
            raise InputError(f"--vary {name}: given twice; put all values into one list")
        items = [item.strip() for item in values.split(",")]
        if not all(items):
            raise InputError(f"--vary {text}: a value is empty")
        hint = str if name == "preset" else HINTS[name]
        vary[name] = [
            _checked(name, convert(item, hint, f"--vary {name}"), "--vary") for item in dict.fromkeys(items)
        ]
    return vary


def read(path: Path) -> Grid:
    """A file's grid: TOML, or JSON where the name ends in .json, such as the sweep.json of a sweep.

    Raises InputError that names the file, the part and what is allowed there.
    """
    where = f"--grid {path}"
    values = _parsed(path, where)
    known = ("experiment", "vary", "cells", "data", "partition_file", "folders", "fedkper")
    for name in values:
        if name not in known:
            raise InputError(
                f"{where}: unknown key '{name}'{near(name, known)}; one of {', '.join(known[:5])}"
            )
    base = _fields(values.get("experiment", {}), f"{where}: [experiment]")
    vary = values.get("vary", {})
    if not isinstance(vary, dict):
        raise InputError(f"{where}: vary must be a table: [vary], then field = [value, value]")
    lists = {name: _list(name, items, f"{where}: [vary]") for name, items in vary.items()}
    cells = values.get("cells", [{}])
    if not isinstance(cells, list) or not cells:
        raise InputError(f"{where}: cells must be a list of tables: [[cells]], then field = value")
    rows = [_fields(cell, f"{where}: [[cells]] {at}") for at, cell in enumerate(cells, 1)]
    grid = Grid(lists, rows, base, _path(values, "data", where), _path(values, "partition_file", where))
    if twice := sorted(base.keys() & grid.varied()):
        raise InputError(f"{where}: {twice[0]} is in [experiment] and varied too; leave out one")
    return dataclasses.replace(grid, base=_spelt_out(base))


def _parsed(path: Path, where: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{where}: is not a text in UTF-8") from error
    kind = "JSON" if path.suffix.lower() == ".json" else "TOML"
    try:
        values = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid {kind} ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"{where}: must hold one JSON object with experiment, vary or cells")
    return values


def _fields(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise InputError(f"{where}: must be a table of fields: field = value")
    return {name: _checked(_known(name, where), value, where) for name, value in values.items()}


def _list(name: str, values: Any, where: str) -> list[Any]:
    _known(name, where)
    if not isinstance(values, list) or not values:
        raise InputError(f"{where}: {name} must be a list of values: {name} = [value, value]")
    checked = [_checked(name, value, where) for value in values]
    return list(dict.fromkeys(checked))


def _known(name: str, where: str) -> str:
    if name != "preset" and name not in HINTS:
        raise InputError(f"{where}: unknown field '{name}'{near(name, [*HINTS, 'preset'])}")
    return name


def _checked(name: str, value: Any, where: str) -> Any:
    """A value of the field's type, or InputError. Ranges are checked with those of all options."""
    if not isinstance(value, str | int | float):
        raise InputError(f"{where}: {name} must be one number or text, not a {type(value).__name__}")
    if name != "preset":
        return getattr(from_json({name: value}, where), name)
    if value not in PRESETS:
        hint = near(str(value), PRESETS)
        raise InputError(f"{where}: preset {value}: not known{hint}; one of {', '.join(PRESETS)}")
    return value


def _path(values: dict[str, Any], name: str, where: str) -> Path | None:
    value = values.get(name)
    if value is not None and not (isinstance(value, str) and value):
        raise InputError(f"{where}: {name} must be a path")
    return None if value is None else Path(value)
