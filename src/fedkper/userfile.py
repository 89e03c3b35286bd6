"""A user's own method or model: a class in a Python file outside the package, written FILE.py:CLASS."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from fedkper.errors import InputError


def is_one(text: str) -> bool:
    return ".py:" in text


def split(text: str) -> tuple[Path, str, str]:
    """FILE.py:CLASS:REST -> file, class name, rest."""
    path, _, remainder = text.rpartition(".py:")
    name, _, rest = remainder.partition(":")
    return Path(path + ".py"), name, rest


def load_class(text: str, base: type, option: str) -> type:
    """The class that `text` names. Raises InputError if there is none derived from `base`."""
    path, name, _ = split(text)
    if not path.is_file():
        raise InputError(f"{option} {path}:{name}: no such file")
    try:
        module = _module(path.resolve(), path.read_bytes())
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{option} {path}: the file cannot be run ({type(error).__name__}: {error})"
        ) from error
    cls = getattr(module, name, None)
    if not (inspect.isclass(cls) and issubclass(cls, base) and cls is not base):
        found = [n for n, c in vars(module).items() if inspect.isclass(c) and c.__module__ == module.__name__]
        raise InputError(
            f"{option} {path}:{name}: the file must define this class, derived from "
            f"{base.__module__}.{base.__qualname__}; it defines: {', '.join(found) or 'none'}"
        )
    return cls


@lru_cache(maxsize=64)
def _module(path: Path, source: bytes) -> ModuleType:
    """The file, run once for each of its versions: a class must stay the same object to reach the workers.

    Path and content make up the module's name, so that two files of one name do not replace each other, and
    a worker finds a class under the name it was sent with.
    """
    digest = hashlib.sha256(os.fsencode(path) + b"\0" + source).hexdigest()[:16]
    name = f"fedkper_user_{path.stem}_{digest}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def hashes(texts: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the files in FILE.py:CLASS, by the files' names; a second of the same name gets a number."""
    paths = dict.fromkeys(split(text)[0] for text in texts if is_one(text))
    found: dict[str, str] = {}
    for path in paths:
        number = sum(name.partition(" ")[0] == path.name for name in found)
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        found[f"{path.name} ({number + 1})" if number else path.name] = digest
    return found
