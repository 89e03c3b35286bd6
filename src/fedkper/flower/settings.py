"""federation.toml, which coordinator and sites share, and site.toml, which is the hospital's own."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from fedkper import userfile
from fedkper.errors import InputError
from fedkper.experiment import Experiment
from fedkper.experiment import from_json as experiment_from
from fedkper.ranges import Range, check, kind_of, near
from fedkper.run import Execution, check_device

T = TypeVar("T")
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


@dataclass(frozen=True)
class Rounds:
    """How long the coordinator waits, and for how many."""

    minimum: Annotated[int, Range(1, 10_000)] = 2
    """sites that must have joined to start, and that must answer for a round to count"""
    wait: Annotated[float, Range(1, 1e6)] = 600.0
    """seconds to wait for the sites before the first round"""
    limit: Annotated[float, Range(1, 1e6)] = 600.0
    """seconds that a round waits for answers; what comes later is dropped"""
    tries: Annotated[int, Range(1, 100)] = 3
    """how often a round is tried before the run ends as failed"""


@dataclass(frozen=True)
class Limits:
    """What an update may be."""

    largest_value: Annotated[float, Range(0, 1e30, above=True)] = 1e6
    """largest absolute value of any number in an update"""
    largest_weight: Annotated[float, Range(0, 1e30, above=True)] = 1e9
    """largest weight that a site may claim in the mean"""
    largest_message: Annotated[int, Range(1, 1900)] = 1900
    """megabytes of a message; Flower's own format ends at 2 GB"""


@dataclass(frozen=True)
class Federation:
    """All that coordinator and sites must agree on, and what the coordinator alone decides."""

    id: str
    sites: tuple[str, ...]
    address: str
    """HOST:PORT at which the sites reach the coordinator"""
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """(H, W, channels) of an image"""
    experiment: Experiment
    rounds: Rounds = Rounds()
    limits: Limits = Limits()
    listen: str = ""
    """HOST:PORT on which the coordinator listens; empty: 127.0.0.1 and the port of the address"""
    test: str = ""
    """the coordinator's own test set: a name or a file; empty for none"""

    def index(self, site: str) -> int:
        return self.sites.index(site)

    @property
    def bound(self) -> tuple[str, int]:
        """Host and port on which the coordinator listens."""
        host, _, port = (self.listen or f"127.0.0.1:{self.address.rpartition(':')[2]}").rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True)
class Policy:
    """What a hospital allows. Read at the hospital only, so that no coordinator can override it."""

    methods: tuple[str, ...] = ()
    """methods that it takes part in, by name or with their fields; empty: none"""
    smallest_train: Annotated[int, Range(1, 10**9)] = 10
    """fewest patients (fewest images where the data do not name patients) to take part with"""
    smallest_test: Annotated[int, Range(1, 10**9)] = 5
    """fewest local test images for which a score leaves the site"""
    most_rounds: Annotated[int, Range(1, 10**6)] = 100
    """rounds that it takes part in"""
    send_scores: bool = True
    """whether accuracies leave the site; fedkper needs a weight, an accuracy times a diversity, which does"""
    send_head: bool = False
    """whether a personal head may leave for the coordinator's scoring (fedper, fedas)"""


@dataclass(frozen=True)
class SiteSettings:
    name: str
    data: str
    """a file, or share:NAME:INDEX/COUNT of a named set for rehearsals; empty: --data or --share says it"""
    policy: Policy
    device: str = "cpu"


def read_federation(folder: Path) -> Federation:
    """The federation.toml of a folder. Raises InputError that names the entry."""
    path = folder / "federation.toml"
    table = _read(path)
    where = str(path)
    shared, coordinator = _section(table, "federation", where), _section(table, "coordinator", where)
    data = _section(table, "data", where)
    values = _section(table, "experiment", where)
    known = {"federation", "coordinator", "data", "experiment", "rounds", "limits"}
    _unknown(table, known, where)
    _unknown(shared, {"id", "sites"}, f"{where}, federation")
    _unknown(coordinator, {"address", "listen", "test"}, f"{where}, coordinator")
    _unknown(data, {"classes", "shape"}, f"{where}, data")
    sites = _texts(shared.get("sites"), f"{where}: sites")
    refuse_names(sites, f"{where}: sites")
    classes = _texts(data.get("classes"), f"{where}: classes")
    shape = data.get("shape")
    if not (isinstance(shape, list) and len(shape) == 3 and all(type(n) is int and n > 0 for n in shape)):
        raise InputError(f"{where}: shape {shape!r}: must be [height, width, channels]")
    experiment = experiment_from(values, f"{where}, experiment")
    if experiment.clients != len(sites):
        raise InputError(f"{where}: clients {experiment.clients}, but sites names {len(sites)}")
    found = Federation(
        id=_text(shared.get("id"), f"{where}: id"),
        sites=sites,
        address=_text(coordinator.get("address"), f"{where}: address"),
        classes=classes,
        shape=(shape[0], shape[1], shape[2]),
        experiment=_located(experiment, folder).checked(),
        rounds=fill(Rounds, table.get("rounds", {}), f"{where}, rounds"),
        limits=fill(Limits, table.get("limits", {}), f"{where}, limits"),
        listen=str(coordinator.get("listen", "")),
        test=str(coordinator.get("test", "")),
    )
    refuse_contradictions(found, where)
    return found


def refuse_contradictions(federation: Federation, where: str) -> None:
    """Raises InputError for an address without a port, and for numbers that cannot be met together."""
    for entry, text in (("address", federation.address), ("listen", federation.listen)):
        host, _, port = text.rpartition(":")
        if (text or entry == "address") and not (host and port.isdecimal() and 1 <= int(port) <= 65535):
            raise InputError(f"{where}: {entry} {text}: must be HOST:PORT")
        if text and not re.fullmatch(r"[A-Za-z0-9.:\[\]_-]{1,64}", host):
            raise InputError(
                f"{where}: {entry} {text}: HOST must be an IP address, or a name of at most 64 letters, "
                "digits, dots and hyphens (xn--... for names with other letters)"
            )
    if federation.rounds.minimum > len(federation.sites):
        raise InputError(
            f"{where}: minimum {federation.rounds.minimum}: the federation has {len(federation.sites)} sites"
        )


def _located(e: Experiment, folder: Path) -> Experiment:
    """A user's own method or model file lies beside federation.toml."""

    def locate(text: str) -> str:
        if not userfile.is_one(text) or userfile.split(text)[0].is_absolute():
            return text
        return str(folder.absolute() / text)

    return dataclasses.replace(e, method=locate(e.method), model=locate(e.model))


def read_site(folder: Path) -> SiteSettings:
    """The site.toml of a hospital's folder. Raises InputError that names the entry."""
    path = folder / "site.toml"
    table = _read(path)
    _unknown(table, {"name", "data", "device", "policy"}, str(path))
    name = _text(table.get("name"), f"{path}: name")
    refuse_names((name,), f"{path}: name")
    policy = fill(Policy, table.get("policy", {}), f"{path}, policy")
    device = str(table.get("device", "cpu"))
    check_device(Execution(device=device))
    return SiteSettings(name, str(table.get("data", "")), policy, device)


def fill(cls: type[T], values: Any, where: str) -> T:
    """A dataclass from a table. Raises InputError for an unknown entry, a wrong type, a wrong value."""
    if not isinstance(values, dict):
        raise InputError(f"{where}: must be a table")
    hints = get_type_hints(cls, include_extras=True)
    _unknown(values, set(hints), where)
    fields: dict[str, Any] = {}
    for key, value in values.items():
        kind, many = kind_of(hints[key])
        if many:
            value = _texts(value, f"{where}: {key}", empty=True)
        elif kind is float and type(value) in (int, float):
            value = float(value)
        elif type(value) is not kind:
            what = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
            raise InputError(f"{where}: {key} {value!r}: must be {what}")
        fields[key] = value
    made = cls(**fields)
    check(made, f"{where}: ")
    return made


def refuse_names(names: tuple[str, ...], where: str) -> None:
    """Raises InputError for site names that are not plain, or not all different."""
    for name in names:
        if not NAME.fullmatch(name):
            raise InputError(f"{where} {name}: use up to 31 of a-z, 0-9 and '-', beginning with none of '-'")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"{where}: {twice[0]} is named twice")


def toml(values: dict[str, Any], title: str = "") -> str:
    """A table of plain values as TOML; a JSON value of these kinds is one of TOML too."""
    head = [f"[{title}]"] if title else []
    lines = [f"{key} = {json.dumps(_plain(value), ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join([*head, *lines]) + "\n"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); is this the right folder?") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid TOML ({error})") from error


def _section(table: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    section = table.get(name)
    if not isinstance(section, dict):
        raise InputError(f"{where}: the table [{name}] is missing")
    return section


def _unknown(table: dict[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise InputError(f"{where}: unknown entry '{key}'{near(key, known)}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: must be text")
    return value


def _texts(value: Any, where: str, empty: bool = False) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value) or not (value or empty):
        raise InputError(f"{where}: must be a list of texts")
    return tuple(value)
