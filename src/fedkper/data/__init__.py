"""Data: a name and a folder -> a Dataset."""

from __future__ import annotations

import os
from pathlib import Path

import pooch

from fedkper.data import medmnist, synthetic
from fedkper.data.dataset import Dataset


def folder(given: Path | None = None) -> Path:
    """Where data files are: the given folder, else $FEDKPER_DATA, else the user's cache."""
    return Path(given or os.environ.get("FEDKPER_DATA") or pooch.os_cache("fedkper"))


def load(name: str, size: int = 28, given: Path | None = None) -> Dataset:
    """The embedded set ("synthetic") or a file in MedMNIST's form; downloads a published set that is missing.

    Raises InputError for an unknown name, a missing file that cannot be downloaded, and a damaged one.
    """
    return synthetic.load() if name == "synthetic" else medmnist.load(name, folder(given), size)
