"""A hospital's data: a file of its own, or for rehearsals its share of a named set."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedkper import data, run, tree
from fedkper.data import partition as partitions
from fedkper.data.dataset import Dataset
from fedkper.errors import InputError
from fedkper.flower.parcel import Code, SiteError
from fedkper.flower.settings import Federation

SHARE = "share:"
ARRAYS = ("train_x", "train_y", "test_x", "test_y")


class Holding(NamedTuple):
    """What one site trains and is tested on."""

    train_x: NDArray[np.uint8]
    """[n, H, W, channels]"""
    train_y: NDArray[np.int64]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]
    patients: int
    """patients of the train part; images where the data do not name patients"""

    def fields(self, index: int, sites: int) -> dict[str, object]:
        """The data as the simulator's Site has them: all clients but `index` hold nothing."""
        n, m, none = len(self.train_y), len(self.test_y), torch.zeros(0, dtype=torch.int64)
        train, test = [none] * sites, [none] * sites
        train[index], test[index] = torch.arange(n), torch.arange(n, n + m)
        return {
            "train_x": torch.from_numpy(np.concatenate([self.train_x, self.test_x])),
            "train_y": torch.from_numpy(np.concatenate([self.train_y, self.test_y])),
            "train_index": train,
            "test_index": test,
            "scored": [index],
        }


def located(named: str, folder: Path) -> str:
    """What site.toml names; a relative path is one from the site's folder, wherever the reader runs."""
    return named if not named or named.startswith(SHARE) else str(folder.absolute() / named)


def read(source: str, federation: Federation, site: str, cache: Path) -> Holding:
    """The data that `source` names: a file, or share:NAME:INDEX/COUNT.

    Every message is answered by a new process, so a share, which takes seconds to cut, is kept in `cache`.
    Raises SiteError with the reason, for the site's own eyes.
    """
    if not source:
        raise SiteError(Code.DATA, 'no data are named: give --data FILE, or data = "FILE" in site.toml')
    try:
        if not source.startswith(SHARE):
            return _file(source, federation)
        key = f"{federation.id} {federation.experiment} {source}"
        path = cache / f"share-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
        if not path.is_file():
            _keep(_share(source, federation, site), path)
        with np.load(path, allow_pickle=False) as kept:
            train_x, train_y, test_x, test_y = (kept[name] for name in ARRAYS)
            return Holding(train_x, train_y, test_x, test_y, int(kept["patients"]))
    except (InputError, OSError, ValueError) as error:
        raise SiteError(Code.DATA, str(error)) from error


def _keep(share: Holding, path: Path) -> None:
    file = io.BytesIO()
    np.savez(file, **share._asdict())
    tree.write(path, file.getvalue())


def _file(source: str, federation: Federation) -> Holding:
    """The train split of a file in MedMNIST's form to train on, its test split as the local test part."""
    path = Path(source)
    if path.suffix != ".npz":
        raise InputError(f"data {source}: must be a .npz file in MedMNIST's form")
    if not path.is_file():
        raise InputError(f"data {source}: no such file")
    found = data.load(source, federation.shape[0], path.parent)
    _require(found, federation, source)
    patients = found.columns.get("patient")
    count = len(found.train_y) if patients is None else len(np.unique(patients))
    return Holding(found.train_x, found.train_y, found.test_x, found.test_y, count)


def _share(source: str, federation: Federation, site: str) -> Holding:
    """What the simulator's client of the same number holds."""
    name, _, part = source.removeprefix(SHARE).rpartition(":")
    index, _, count = part.partition("/")
    if not (name and index.isdecimal() and count.isdecimal()):
        asked = source.removeprefix(SHARE)
        raise InputError(f"--share {asked}: must be NAME:INDEX/COUNT, such as synthetic:0/3")
    if (int(index), int(count)) != (federation.index(site), len(federation.sites)):
        right = f"{federation.index(site)}/{len(federation.sites)}"
        raise InputError(f"--share {name}:{part}: {site} of this federation has share {right}")
    found = data.load(name, federation.experiment.size)
    _require(found, federation, name)
    dealt = partitions.make(run.partitioning(federation.experiment), found.train_y, found.hash, found.columns)
    train, test = dealt.train[int(index)], dealt.test[int(index)]
    x, y = found.train_x, found.train_y
    return Holding(x[train], y[train], x[test], y[test], len(train))


def _require(found: Dataset, federation: Federation, source: str) -> None:
    if found.shape != federation.shape:
        shapes = (" x ".join(map(str, shape)) for shape in (found.shape, federation.shape))
        raise InputError(
            f"{source}: images of {next(shapes)} (H, W, channels), the federation has {next(shapes)}"
        )
    if found.classes != federation.classes:
        at = next(
            (i for i, (a, b) in enumerate(zip(found.classes, federation.classes, strict=False)) if a != b),
            min(len(found.classes), len(federation.classes)),
        )
        mine, theirs = (c[at : at + 1] or ("missing",) for c in (found.classes, federation.classes))
        raise InputError(
            f"{source}: other classes than the federation's: class {at} is '{mine[0]}' here, '{theirs[0]}' "
            "there. Save the federation's class list, in its order, as the text array `classes` of the file"
        )
