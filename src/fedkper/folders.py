"""Folders for results: their names, how they are made, and the lock on one that is being written."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fedkper.errors import InputError, RunError

_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


@contextmanager
def out(given: Path | None, name: str) -> Iterator[Path]:
    """The folder of the results: --out, or a new one, which goes away again if nothing came to be in it."""
    folder = given or unique(Path("runs"), name)
    try:
        yield folder
    finally:
        if given is None:
            with suppress(OSError):  # not empty
                folder.rmdir()
                folder.parent.rmdir()


def runs(paths: Iterable[Path], skip: Callable[[Path], None] = lambda path: None) -> list[Path]:
    """The folders of runs (those with a run.json) at or below `paths`, at any depth, each once, sorted.

    A path that is no folder is returned as it is, so that whoever reads it says what is wrong with it;
    `skip` is told of folders that hold no run. Raises InputError if there is none at all.
    """
    found: dict[str, Path] = {}
    empty: list[Path] = []
    for path in paths:
        inside = below(path) if os.path.isdir(path) else [path]
        if not inside:
            empty.append(path)
        for folder in inside:
            found.setdefault(os.path.realpath(folder), folder)
    if not found:
        raise InputError(f"{empty[0]}: holds no run (no run.json); is this the folder of a run?")
    for path in empty:
        skip(path)
    return list(found.values())


def below(top: Path) -> list[Path]:
    """The folders of runs at or below `top`, at any depth."""
    found: list[Path] = []
    seen: set[str] = set()  # a link may lead back
    for place, inside, files in os.walk(top, followlinks=True):
        real = os.path.realpath(place)
        if "run.json" in files:
            found.append(Path(place))
        if "run.json" in files or real in seen:
            inside.clear()
        seen.add(real)
        inside.sort()
    return found


def unique(parent: Path, name: str) -> Path:
    """A folder for a run that nobody else has: the name, the time, and a number if need be. It is made."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{name[:70]}-{time.strftime('%Y%m%d-%H%M%S')}").strip("-.")
    for number in range(1, 1000):
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            make(parent)
            folder.mkdir()
            return folder
        except (FileExistsError, FileNotFoundError):  # taken, or `parent` was removed meanwhile
            continue
        except OSError as error:
            raise InputError(f"{folder}: cannot be made ({error.strerror}); name an --out") from error
    raise InputError(f"{parent / stem}: a thousand runs of that name exist; name another --out")


def make(folder: Path) -> None:
    """Makes a folder; every part of the path that does not exist yet must be a name that any system takes."""
    for part in (folder, *folder.parents):
        if os.path.exists(part):
            break
        name = part.name
        safe = re.fullmatch(r"[A-Za-z0-9._-]{1,99}", name) and name.strip(".") == name
        if not safe or _RESERVED.fullmatch(name):
            shown = name if len(name) < 120 else f"{name[:100]}..."
            raise InputError(
                f"--out: '{shown}' is no safe folder name; use up to 99 letters, digits, '.', '-' and '_', "
                "no dot at either end, and no reserved word such as CON"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be made ({error.strerror})") from error


def locked(folder: Path) -> IO[str]:
    """Two processes must not write one run: holds a lock as long as this one lives."""
    try:
        file = open(folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115  held open on purpose
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunError(f"{folder}: another process is writing this run; wait for it or stop it") from None
    return file
