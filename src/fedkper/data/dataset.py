"""What every reader of data returns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Dataset:
    """A labelled image set with the two splits that a federation uses.

    `train` is dealt out to the clients, `test` is the global test set G that no client ever sees
    (specification 3.1). A validation split, where a file has one, is not loaded.
    """

    name: str
    classes: tuple[str, ...]
    """Class names in the order of their numbers."""
    train_x: NDArray[np.uint8]
    """[N, H, W, channels]"""
    train_y: NDArray[np.int64]
    """[N], 0 to len(classes) - 1"""
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Further columns of the train split, [N] each: a hospital, a patient, a scanner."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where it came from, as JSON values for the record: file, checksum, licence, citation, label mapping."""
    notices: tuple[str, ...] = ()
    """Sentences that the user should read: another checksum, labels that were renumbered, constant images."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, channels) of an image."""
        h, w, c = self.train_x.shape[1:]
        return int(h), int(w), int(c)

    @cached_property
    def hash(self) -> str:
        """SHA-256 over both splits and the columns, shapes included: one hash, the same models."""
        digest = hashlib.sha256()
        arrays: list[NDArray[Any]] = [self.train_x, self.train_y, self.test_x, self.test_y]
        for array in arrays + [self.columns[name] for name in sorted(self.columns)]:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()
