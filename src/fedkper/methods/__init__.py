"""The methods by name, and how a method is written on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from fedkper.errors import InputError
from fedkper.method import Method
from fedkper.methods.ditto import Ditto
from fedkper.methods.fedala import FedALA
from fedkper.methods.fedas import FedAS
from fedkper.methods.fedavg import FedAvg
from fedkper.methods.fedbabu import FedBABU
from fedkper.methods.fedcurv import FedCurv
from fedkper.methods.fedkd import FedKD
from fedkper.methods.fedkper import FedKPer
from fedkper.methods.fedntd import FedNTD
from fedkper.methods.fedper import FedPer
from fedkper.methods.fedprox import FedProx
from fedkper.methods.moon import MOON
from fedkper.ranges import check, convert

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedcurv": FedCurv,
    "moon": MOON,
    "fedprox": FedProx,
    "fedntd": FedNTD,
    "fedas": FedAS,
    "fedala": FedALA,
    "ditto": Ditto,
    "fedper": FedPer,
    "fedkd": FedKD,
    "fedbabu": FedBABU,
    "fedkper": FedKPer,
}


def parse(text: str) -> Method:
    """A method from NAME, NAME:field=value,field=value or FILE.py:CLASS[:field=value,...].

    Raises InputError for an unknown name or field (with a near match) and for a value outside its range.
    """
    name, fields = text, ""
    if ".py:" in text:
        path, _, remainder = text.rpartition(".py:")
        class_name, _, fields = remainder.partition(":")
        cls = _from_file(Path(path + ".py"), class_name)
    else:
        name, _, fields = text.partition(":")
        if name.lower() not in METHODS:
            raise InputError(
                f"--method {name}: not known{near(name.lower(), METHODS)}; one of {', '.join(METHODS)}"
            )
        cls = METHODS[name.lower()]
    known = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for item in filter(None, fields.split(",")):
        field, equals, value = item.partition("=")
        if not equals or field not in known:
            listing = ", ".join(f"{f.name}={f.default}" for f in known.values()) or "none"
            raise InputError(
                f"--method {text}: no field '{field}'{near(field, known)}; its fields are: {listing}"
            )
        values[field] = convert(value, type(known[field].default), f"--method {text}: {field}")
    method = cls(**values)
    check(method, f"--method {text}: ")
    return method


def near(word: str, known: Any) -> str:
    match = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean '{match[0]}'?" if match else ""


def _from_file(path: Path, class_name: str) -> type[Method]:
    if not path.is_file():
        raise InputError(f"--method {path}:{class_name}: no such file")
    name = f"fedkper_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"--method {path}: the file cannot be run ({type(error).__name__}: {error})"
        ) from error
    cls = getattr(module, class_name, None)
    if not (inspect.isclass(cls) and issubclass(cls, Method) and dataclasses.is_dataclass(cls)):
        found = [
            n
            for n, c in vars(module).items()
            if inspect.isclass(c) and issubclass(c, Method) and c is not Method
        ]
        raise InputError(
            f"--method {path}:{class_name}: the file must define this class, a frozen dataclass derived "
            f"from fedkper.method.Method; it defines: {', '.join(found) or 'none'}"
        )
    return cls
