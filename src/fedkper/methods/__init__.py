"""The methods by name, and how a method is written on the command line."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from fedkper import userfile
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
from fedkper.ranges import check, convert, near

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
    if userfile.is_one(text):
        cls, fields = userfile.load_class(text, Method, "--method"), userfile.split(text)[2]
        if "__dataclass_params__" not in vars(cls) or not vars(cls)["__dataclass_params__"].frozen:
            raise InputError(f"--method {text}: the class must be decorated with @dataclass(frozen=True)")
    else:
        name, _, fields = text.partition(":")
        if name.lower() not in METHODS:
            if name.endswith(".py"):
                raise InputError(f"--method {name}: name the class in it, {name}:CLASS")
            if "," in name:
                raise InputError(f"--method {name}: several methods are separated by spaces")
            raise InputError(
                f"--method {name}: not known{near(name.lower(), METHODS)}; one of {', '.join(METHODS)}"
            )
        cls = METHODS[name.lower()]
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}
    try:
        hints = get_type_hints(cls, include_extras=True)
    except Exception as error:
        raise InputError(f"--method {text}: its fields' types are not understood ({error})") from error
    values: dict[str, Any] = {}
    for item in filter(None, fields.split(",")):
        field, equals, value = item.partition("=")
        if field in known and not equals:
            raise InputError(f"--method {text}: {field} has no value; write {field}=VALUE")
        if field not in known:
            listing = ", ".join(map(_shown, known.values())) or "none"
            raise InputError(
                f"--method {text}: no field '{field}'{near(field, known)}; its fields are: {listing}"
            )
        if field in values:
            raise InputError(f"--method {text}: {field} is given twice")
        values[field] = convert(value, hints[field], f"--method {text}: {field}")
    bare = [name for name, f in known.items() if name not in values and _shown(f) == name]
    if bare:
        raise InputError(f"--method {text}: {bare[0]} has no default; add {bare[0]}=VALUE")
    try:
        method: Method = cls(**values)
    except Exception as error:  # a user's own checks
        raise InputError(f"--method {text}: {type(error).__name__}: {error}") from error
    check(method, f"--method {text}: ")
    return method


def _shown(field: dataclasses.Field[Any]) -> str:
    """A field with its default, if it has one."""
    if field.default is not dataclasses.MISSING:
        return f"{field.name}={field.default}"
    return field.name if field.default_factory is dataclasses.MISSING else f"{field.name}=..."
