"""A new federation: the folder with what coordinator and sites need, and who gets what of it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import secrets
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedkper import folders, tree, userfile
from fedkper.errors import InputError, RunError
from fedkper.flower.contract import named, plain_method
from fedkper.flower.settings import Federation, Policy, toml

README = """# Federation {id}

| folder | for whom |
|---|---|
| `coordinator/`, `federation.toml` | the coordinator: this machine; `ca.key`, `server.key` never leave it |
{rows}
Hand each site its folder in a safe way: `key` in it is the site's private key. Then:

    fedkper link {folder}                            # here, at the coordinator

    fedkper site SITE-FOLDER --data FILE.npz         # at each hospital, with its own folder and data

    fedkper federation status {folder}               # here, at any time

All must have fedkper {version} with the extra `flower`, and each site its clock right. The sites reach this
machine at {address}; nothing else of it has to be reachable, and at the sites nothing at all.
{certificate}"""

REQUEST = """
Before the first start, have `coordinator/server.csr` signed by the hospitals' authority. Put the certificate
into `coordinator/server.crt`, and the authority's own certificate as `ca.crt` into `coordinator/` and into
each site's folder.
"""


def found(folder: Path, federation: Federation, hosts: list[str], own_authority: bool = True) -> None:
    """Writes a federation's folder, which must be new or empty.

    `hosts`: the names and addresses in the coordinator's certificate. Without `own_authority` there is a
    request for a certificate instead of one.
    """
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder}: is there and not empty; name another folder")
    folders.make(folder)
    try:
        _found(folder, federation, hosts, own_authority)
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be written ({error.strerror}); remove it and start again"
        ) from error


def _found(folder: Path, federation: Federation, hosts: list[str], own_authority: bool) -> None:
    from fedkper.flower import certificates

    coordinator = folder / "coordinator"
    coordinator.mkdir()
    (coordinator / "keys").mkdir()
    if own_authority:
        certificates.authority(coordinator / "ca.key", coordinator / "ca.crt", federation.id)
        certificates.certify(coordinator, hosts)
    else:
        certificates.request(coordinator / "server.key", coordinator / "server.csr", hosts)
    files = user_files(federation)
    write_federation(folder, federation, files)
    for site in federation.sites:
        place = folder / "sites" / site
        place.mkdir(parents=True)
        write_federation(place, dataclasses.replace(federation, test="", listen=""), files)
        write_site(
            place, site, Policy(methods=(plain_method(federation),), most_rounds=federation.experiment.rounds)
        )
        certificates.site_key(place / "key")
        shutil.move(place / "key.pub", coordinator / "keys" / f"{site}.pub")
        if own_authority:
            shutil.copy(coordinator / "ca.crt", place / "ca.crt")
    _readme(folder, federation, "" if own_authority else REQUEST)


def identity() -> str:
    """A new federation's id."""
    return secrets.token_hex(8)


def write_federation(folder: Path, federation: Federation, files: list[Path]) -> None:
    """federation.toml, and beside it the user's own method and model files."""
    e = federation.experiment
    experiment = dataclasses.replace(e, method=named(e.method), model=named(e.model)).to_json()
    coordinator = {"address": federation.address, "listen": federation.listen, "test": federation.test}
    parts = [
        "# What all sites and the coordinator have agreed on. Every site has a copy; they are compared.\n",
        toml({"id": federation.id, "sites": federation.sites}, "federation"),
        toml(coordinator, "coordinator"),
        toml({"classes": federation.classes, "shape": federation.shape}, "data"),
        _explained(federation.rounds, "rounds"),
        _explained(federation.limits, "limits"),
        "# As in `fedkper run`; clients is the number of sites, the partition is for rehearsals.\n"
        + toml(experiment, "experiment"),
    ]
    tree.write(folder / "federation.toml", "\n".join(parts).encode())
    for file in files:
        shutil.copy(file, folder / file.name)


def write_site(folder: Path, name: str, policy: Policy, data: str = "") -> None:
    """site.toml, with what each entry means."""
    head = "# The hospital's own: the coordinator never sees this file and cannot change what it says.\n"
    text = head + toml({"name": name, "data": data, "device": "cpu"}) + "\n" + _explained(policy, "policy")
    tree.write(folder / "site.toml", text.encode())


def _explained(values: Any, title: str) -> str:
    """A dataclass as a table, each entry under its meaning."""
    meanings = _meanings(type(values))
    lines = [f"[{title}]"]
    for field in dataclasses.fields(values):
        lines += [f"# {meanings[field.name]}", toml({field.name: getattr(values, field.name)}).rstrip()]
    return "\n".join(lines) + "\n"


def _meanings(cls: type) -> dict[str, str]:
    """The text beneath each field of a dataclass, from its source: it is said once, in the code."""
    (body,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(body, ast.ClassDef)
    pairs = [(field, text) for field, text in pairwise(body.body) if isinstance(field, ast.AnnAssign)]
    return {ast.unparse(field.target): ast.literal_eval(ast.unparse(text)) for field, text in pairs}


def user_files(federation: Federation) -> list[Path]:
    named = (federation.experiment.method, federation.experiment.model)
    return [userfile.split(text)[0] for text in dict.fromkeys(named) if userfile.is_one(text)]


def _readme(folder: Path, federation: Federation, certificate: str) -> None:
    from fedkper import __version__

    rows = "".join(f"| `sites/{site}/` | {site} |\n" for site in federation.sites)
    text = README.format(
        id=federation.id,
        rows=rows,
        folder=folder,
        version=__version__,
        address=federation.address,
        certificate=certificate,
    )
    tree.write(folder / "README.md", text.encode())
