"""Sweeps on a Ray cluster: the same numbers as in processes of this machine, whatever dies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from terminal import TINY, fedkper, process, untimed, write_data

pytestmark = pytest.mark.long
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra: ray")

DYING = """
import os, signal
from dataclasses import dataclass
from fedkper.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Dies(FedAvg):
    def loss(self, *args):
        os.kill(os.getpid(), signal.SIGKILL)

@dataclass(frozen=True)
class Once(FedAvg):
    def loss(self, *args):
        if not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(*args)
"""


@needs_ray
def test_a_local_cluster_gives_the_same_numbers(tmp_path: Path) -> None:
    """Two cores, with relative paths, a worker that dies once and a cell whose worker dies twice."""
    write_data(tmp_path / "tiny.npz")
    (tmp_path / "mine.py").write_text(DYING)
    words: list[Any] = ["--dataset", "tiny.npz", *TINY[: TINY.index("--workers")], "--rounds", 3]
    methods = ["./mine.py:Dies", "./mine.py:Once", "fedavg", "fedkper"]
    asked = ["sweep", *words, "--jobs", 2, "--out"]
    log = tmp_path / "log"
    child = process(log, *asked, "ray", "--ray", "local", "--methods", *methods, folder=tmp_path)
    child.join(240)
    said = log.read_text()
    assert child.exitcode == 1, said
    assert "tiny_Once_seed1: its Ray worker ended" in said
    assert "1 of 4 cells failed:\n  its Ray worker ended" in said
    assert "\n    tiny_Dies_seed1\nWhen the cause is mended, go on with:\n  fedkper sweep --grid ray/" in said
    assert "Traceback" not in said
    child = process(log, *asked, "here", "--methods", *methods[1:], folder=tmp_path)
    child.join(120)
    assert child.exitcode == 0, log.read_text()
    for place in ("tiny_Once_seed1", "tiny_fedavg_seed1", "tiny_fedkper_seed1"):
        ray, here = tmp_path / "ray" / place, tmp_path / "here" / place
        assert untimed(ray) == untimed(here)
        for name in ("summary.json", "clients.csv"):
            assert (ray / name).read_bytes() == (here / name).read_bytes()
    assert not list((tmp_path / "ray").rglob("*.tmp"))


@needs_ray
def test_a_cluster_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--dataset", write_data(tmp_path / "tiny.npz"), *TINY[: TINY.index("--workers")]]
    assert fedkper("sweep", *words, "--seeds", 1, "--ray", "127.0.0.1:1") == 2
    assert "--ray 127.0.0.1:1: nothing answers there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.npz"]


def test_without_ray_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["--dataset", write_data(tmp_path / "tiny.npz"), *TINY[: TINY.index("--workers")]]
    assert fedkper("sweep", *words, "--seeds", 1, "--ray", "local", "--out", "sweep") == 2
    assert "--ray: needs the extra: pip install 'fedkper[ray]'" in capsys.readouterr().err
