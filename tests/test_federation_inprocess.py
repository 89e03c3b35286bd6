"""A federation of coordinator and hospitals gives the simulator's numbers, method by method."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from fedkper import run
from fedkper.methods import METHODS
from fedkper.run import Execution
from fedkper.tree import load
from hospitals import federation_of, rehearsal, write_small
from terminal import strict

SECONDS = {"train_seconds", "merge_seconds", "eval_seconds", "down_bytes", "up_bytes"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("data"))


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return [{k: v for k, v in row.items() if k not in SECONDS} for row in csv.DictReader(file)]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_simulators_numbers(method: str, data: Path, tmp_path: Path) -> None:
    federation = federation_of(data, method=method)
    here = rehearsal(tmp_path / "federation", federation)
    here.run()
    run.start(federation.experiment, tmp_path / "simulated", Execution(workers=1))
    real, simulated = tmp_path / "federation" / "run", tmp_path / "simulated"
    for name in ("rounds.csv", "clients.csv"):
        rows, expected = table(real / name), table(simulated / name)
        assert len(rows) == len(expected) > 0
        for a, b in zip(rows, expected, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                assert (a[key] == "") == (b[key] == ""), (name, key, a, b)
                if a[key]:
                    assert float(a[key]) == pytest.approx(float(b[key]), abs=1e-6), (name, key)
    mine, theirs = (load(f / "checkpoint" / "shared-000003.safetensors") for f in (real, simulated))
    assert mine.keys() == theirs.keys()
    for name, leaf in theirs.items():  # the counters of BatchNorm are whole numbers
        assert (mine[name].shape, mine[name].dtype) == (leaf.shape, leaf.dtype), name
        assert torch.allclose(mine[name], leaf, rtol=0, atol=1e-6), name
    assert strict(real / "summary.json")["balance"] == strict(simulated / "summary.json")["balance"]
