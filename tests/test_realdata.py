"""Whole runs on real images, grey and colour, where they are at hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedkper.cli import main

pytestmark = pytest.mark.realdata


@pytest.mark.parametrize(
    ("dataset", "classes", "method"), [("breastmnist", 2, "fedkper"), ("bloodmnist", 8, "fedas")]
)
def test_a_run_on_real_images(
    dataset: str, classes: int, method: str, real: Callable[[str], Path], tmp_path: Path
) -> None:
    small = ["--clients", "5", "--fraction", "0.4", "--rounds", "2", "--epochs", "1", "--batch", "64"]
    where = ["--data", str(real(dataset)), "--out", str(tmp_path / "run")]
    partition = ["--alpha", "1", "--workers", "1"]
    assert main(["run", "--dataset", dataset, "--method", method, *small, *partition, *where]) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert len(record["data"]["classes"]) == classes
    assert isinstance(record["data"]["official"], bool)
    assert record["data"]["licence"] == "CC BY 4.0"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 1 / classes / 2 < summary["global_acc"]["mean"] <= 1
    assert summary["local_acc"]["mean"] > 1 / classes
    assert summary["counts"]["rounds"] == 2
