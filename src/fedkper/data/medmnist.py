"""MedMNIST: the published single-label 2-D sets by name, and any other file in the same form by its path.

`load` finds or downloads a file, has it read and checked (npz.py), and returns a `Dataset`. The table of the
published sets is in sets.py.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fedkper.data import npz
from fedkper.data.dataset import Dataset
from fedkper.data.sets import FILES, REFUSED, SETS, SIZES, Info
from fedkper.errors import InputError


def load(name: str, folder: str | Path, size: int = 28, offline: bool = False) -> Dataset:
    """Read a set: train split, test split and further columns of the train split.

    `name` is a published set ('bloodmnist'), a file in `folder` or `folder`/medmnist without its ending
    ('tissuemnist_30k'), or a path that ends in '.npz'. `size` is the side of the images: 28, 64, 128 or 224
    for a published set. A published set that is missing is downloaded into `folder` unless `offline`.
    Another checksum than the official one is accepted, with a notice, and recorded in `source`.
    Raises InputError for an unknown or missing set, a failed download and every fault in the file.
    """
    info, size = _known(name, size)
    path = find(name, folder, size) or _fetch(name, info, size, Path(folder), offline)
    md5 = checksum(path)
    official = info is not None and md5 == info.md5[size]
    read = npz.read(path, info, size, trusted=official)
    source: dict[str, Any] = {"file": path.name, "md5": md5, "official": official}
    source |= _record(info, size, len(read.train_x), len(read.test_x))
    source |= {"mapping": read.mapping} if read.mapping else {}
    notices = tuple(f"{path.name}: {notice}" for notice in [*_provenance(source), *read.notices])
    stem = info.file(size)[:-4] if info else path.stem
    images_and_labels = read.train_x, read.train_y, read.test_x, read.test_y
    return Dataset(stem, read.classes, *images_and_labels, read.columns, source, notices)


def find(name: str, folder: str | Path, size: int = 28) -> Path | None:
    """Path of the file of a set, or None if it is neither in `folder` nor in `folder`/medmnist.

    A `name` that ends in '.npz' is tried as a path first, then in the folders as it is and by its last part.
    Raises InputError for a set that cannot be used and for an image size that a published set does not have.
    """
    info, size = _known(name, size)
    if name.endswith(".npz"):
        file = name
    else:
        file = info.file(size) if info else f"{name}.npz" if size == 28 else f"{name}_{size}.npz"
    places = [Path(name)] if name.endswith(".npz") else []
    names = dict.fromkeys((file, Path(file).name))  # a file that was moved is there under its name alone
    places += [Path(folder) / part / name for name in names for part in ("", "medmnist")]
    return next((place for place in places if os.path.isfile(place)), None)


def checksum(path: str | Path) -> str:
    """MD5 of a file in hexadecimal. Raises InputError if the file cannot be read."""
    try:
        with open(path, "rb") as stream:
            # A fingerprint to compare with the published one, no protection against an attacker.
            return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}). Check the path and its rights."
        ) from None


def rows(folder: str | Path, size: int = 28) -> list[dict[str, Any]]:
    """One row of plain values per published set; `present` says whether `find` has its file in `folder`."""
    return [
        {
            "name": info.name,
            "modality": info.modality,
            "task": info.task,
            "classes": len(info.classes),
            "channels": info.channels,
            **dict(zip(("train", "val", "test"), info.counts, strict=True)),
            "licence": info.licence,
            "present": find(info.name, folder, size) is not None,
        }
        for info in SETS.values()
    ]


def _known(name: str, size: int) -> tuple[Info | None, int]:
    """The published set behind a name or a file name, and the image size; (None, size) for any other."""
    stem = Path(name).name.removesuffix(".npz").lower()
    refused = REFUSED.get(stem.removesuffix("_64").removesuffix("_128").removesuffix("_224"))
    if refused:
        raise InputError(f"--dataset {name} cannot be used: {refused}. Choose one of: {', '.join(SETS)}.")
    if Path(name).name != name and not name.endswith(".npz"):
        raise InputError(f"--dataset {name}: a path has to end in '.npz'. Name the file itself.")
    info, own = FILES.get(stem, (None, 28))
    if own != 28 and size not in (28, own):
        raise InputError(f"{name} has size {own}, but size {size} was asked for. Leave out one of the two.")
    size = own if own != 28 else size
    if info and size not in SIZES:
        raise InputError(f"{name}: size {size} does not exist. Choose one of {', '.join(map(str, SIZES))}.")
    return info, size


# Getting the file


def _fetch(name: str, info: Info | None, size: int, folder: Path, offline: bool) -> Path:
    """Download a published set into `folder`, or say what to put where."""
    if info is None or name.endswith(".npz"):
        near = difflib.get_close_matches(Path(name).stem.lower(), SETS, n=3) or list(SETS)
        raise InputError(
            f"--dataset {name} is not there: no such file here, in {folder} or in {folder / 'medmnist'}. "
            f"Name a file by its path, which ends in '.npz', the folder it lies in with --data, "
            f"a published set ({', '.join(near)}), or synthetic."
        )
    import requests  # here and below: only a download pays for these imports

    reason = "downloads are switched off"
    for _ in range(0 if offline else 2):  # a broken download is fetched once more
        try:
            return _download(info, size, folder)
        except requests.ConnectionError:  # asking an unreachable server again only costs time
            reason = "the server cannot be reached"
            break
        except (OSError, ValueError) as error:
            reason = npz.cause(error)
    raise InputError(
        f"{info.file(size)} is missing and was not downloaded: {reason}. "
        f"Put the file into the folder {folder}: {info.where(size)}."
    )


def _download(info: Info, size: int, folder: Path) -> Path:
    import pooch

    # pooch writes under a temporary name and renames only after the checksum is right.
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        fetcher = pooch.HTTPDownloader(
            progressbar=_Bar(progress, info.file(size)),
            chunk_size=2**18,
            timeout=(5, 60),
            headers={"User-Agent": "fedkper"},  # the archive limits clients that do not name themselves
        )
        known = f"md5:{info.md5[size]}"
        return Path(pooch.retrieve(info.address(size), known, info.file(size), folder, downloader=fetcher))


class _Bar:
    """The progress bar that pooch drives, drawn by rich."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress, self._task = progress, progress.add_task(title, total=None)

    def _set_total(self, value: int) -> None:
        self._progress.update(self._task, total=value or None)

    total = property(fset=_set_total)

    def update(self, count: int) -> None:
        self._progress.update(self._task, advance=count)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        self._progress.refresh()


# Where it came from


def _record(info: Info | None, size: int, train: int, test: int) -> dict[str, Any]:
    """The part of `source` that compares with the published set; JSON values."""
    counts = {"train": train, "test": test}
    if info is None:
        return {"counts": counts, "counts_official": None, "licence": None, "citation": None}
    releases = {"medmnist 3.0.2": info.counts, "medmnist 2.x": info.counts_2x}
    same = [release for release, c in releases.items() if c and (c[0], c[2]) == (train, test)]
    return {
        "counts": counts,
        "counts_official": {"train": info.counts[0], "test": info.counts[2]},
        "counts_equal_those_of": same[0] if same else None,
        "md5_official": info.md5[size],
        "address": info.address(size),
        "licence": info.licence,
        "citation": info.citation,
    }


def _provenance(source: dict[str, Any]) -> list[str]:
    """The notice about a file of a published set that is not the official one."""
    if source["official"] or "md5_official" not in source:
        return []
    counts = "{train} train and {test} test images"
    what = f"it has {counts.format_map(source['counts'])}"
    if source["counts_equal_those_of"]:
        what += f" as in {source['counts_equal_those_of']}"
    else:
        what += f" instead of {counts.format_map(source['counts_official'])}"
    return [
        f"the checksum (MD5 {source['md5']}) is not that of the official file ({source['md5_official']}); "
        f"{what}. Results need not equal published ones."
    ]
