"""A user's own method or model: a class in a Python file outside the package, written FILE.py:CLASS."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
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
    stat = path.stat()
    try:
        module = _module(path.resolve(), stat.st_mtime_ns, stat.st_size)
    except Exception as error:
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
def _module(path: Path, *version: int) -> ModuleType:
    """The file, run once for each of its versions: a class must stay the same object to reach the workers."""
    name = f"fedkper_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def near(word: str, known: Iterable[str]) -> str:
    """A hint at what may have been meant, or nothing."""
    match = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean '{match[0]}'?" if match else ""
