"""The methods by name, and how a method is written on the command line."""

from __future__ import annotations

import dataclasses
from typing import Any

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
from fedkper.ranges import check, convert
from fedkper.userfile import near

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
        if field in values:
            raise InputError(f"--method {text}: {field} is given twice")
        values[field] = convert(value, type(known[field].default), f"--method {text}: {field}")
    method: Method = cls(**values)
    check(method, f"--method {text}: ")
    return method
