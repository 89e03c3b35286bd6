"""The hash of a data set stands for all that can change a run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from federation import dataset_of


def test_the_hash_knows_every_change() -> None:
    column = np.array([f"site {i % 3}" for i in range(120)])
    whole = replace(dataset_of(), columns={"site": column})
    moved = {
        "train_x": whole.train_x[::-1],
        "train_y": 1 - whole.train_y % 2,
        "test_x": whole.test_x[:-1],
        "test_y": whole.test_y[:-1],
        "columns": {"site": column[::-1]},
    }
    hashes = {replace(whole, **{name: value}).hash for name, value in moved.items()}
    assert len({*hashes, whole.hash, dataset_of().hash}) == len(moved) + 2
    assert replace(whole, columns={"site": column.copy()}).hash == whole.hash


@pytest.mark.parametrize("dtype", ["<i8", "<U8"])
def test_columns_of_numbers_and_of_words(dtype: str) -> None:
    column = np.arange(120).astype(dtype)
    assert len(replace(dataset_of(), columns={"patient": column}).hash) == 64
