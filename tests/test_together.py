"""Runs that differ in their seed ride together, with the numbers that each has alone; memory and lanes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from federation import run_site, site
from fedkper import memory, tree
from fedkper.methods import METHODS
from fedkper.record import Record
from fedkper.simulate import Member, simulate_together
from fedkper.site import Site, together
from terminal import TINY, fedkper, results, write_data

SEEDS = (3, 1, 2)


def ride(sites: list[Site], folder: Path, stop: int = 0, **arguments: Any) -> list[Path]:
    """Runs the sites together, to the end or until round `stop` of the last one is safe."""

    def stopped(round: int, line: dict[str, Any]) -> None:
        if round == stop:
            raise KeyboardInterrupt

    folders = [folder / str(one.experiment.seed) for one in sites]
    members = []
    for one, place in zip(sites, folders, strict=True):
        record = Record.open(place) if (place / "run.json").exists() else Record.create(place)
        record.write_json("run.json", {"experiment": one.experiment.to_json()})
        members.append(Member(one, record, stopped if one is sites[-1] else None))
    try:
        simulate_together(members, **arguments)
    finally:
        for member in members:
            member.record.close()
    return folders


def numbers(folder: Path) -> list[str]:
    rows = [row.split(",") for row in (folder / "rounds.csv").read_text().splitlines()]
    kept = [i for i, name in enumerate(rows[0]) if not name.endswith("seconds")]
    files = ("clients.csv", "confusion.csv", "summary.json")
    return [*(row[i] for row in rows for i in kept), *((folder / f).read_text() for f in files)]


@pytest.mark.parametrize("name", METHODS)
def test_each_has_the_numbers_that_it_has_alone(name: str, tmp_path: Path) -> None:
    sites = [site(name, seed=seed, sampling="seeded", rounds=3) for seed in SEEDS]
    for one in sites:
        run_site(one, tmp_path / "alone" / str(one.experiment.seed))
    for folder in ride(sites, tmp_path / "together"):
        assert numbers(folder) == numbers(tmp_path / "alone" / folder.name)
        for path in (folder / "checkpoint").glob("*.safetensors"):
            assert (
                path.read_bytes()
                == (tmp_path / "alone" / folder.name / "checkpoint" / path.name).read_bytes()
            )
    assert len({(tmp_path / "alone" / f"{seed}" / "rounds.csv").read_text() for seed in SEEDS}) == 3


def test_each_scores_the_clients_that_it_scores_alone(tmp_path: Path) -> None:
    """Which ones is drawn by the seed."""
    sites = [site("fedavg", seed=seed, rounds=2, score_clients=2) for seed in SEEDS]
    assert len({tuple(one.scored) for one in sites}) > 1
    for folder in ride(sites, tmp_path / "together"):
        one = next(s for s in sites if str(s.experiment.seed) == folder.name)
        run_site(one, tmp_path / folder.name)
        assert numbers(folder) == numbers(tmp_path / folder.name)


@pytest.mark.parametrize("name", METHODS)
def test_side_by_side_in_lanes(name: str, tmp_path: Path) -> None:
    sites = [site(name, seed=seed, rounds=2, fraction=0.9, lr=0.01) for seed in SEEDS]
    for folder in ride(sites, tmp_path / "together", lanes=100):
        one = next(s for s in sites if str(s.experiment.seed) == folder.name)
        run_site(one, tmp_path / folder.name)
        for path in (folder / "checkpoint").glob("*.safetensors"):
            ours, alone = tree.load(path), tree.load(tmp_path / folder.name / "checkpoint" / path.name)
            for key, leaf in alone.items():
                torch.testing.assert_close(ours[key], leaf, rtol=1e-4, atol=1e-4)


def test_in_a_pool(tmp_path: Path) -> None:
    sites = [site("ditto", seed=seed, rounds=2) for seed in SEEDS]
    for folder in ride(sites, tmp_path / "pool", workers=2):
        one = next(s for s in sites if str(s.experiment.seed) == folder.name)
        run_site(one, tmp_path / folder.name)
        assert numbers(folder) == numbers(tmp_path / folder.name)


def test_one_that_was_stopped_behind_the_others_catches_up(tmp_path: Path) -> None:
    """All have two rounds when the stop comes; then one loses its last."""
    sites = [site("fedper", seed=seed, rounds=4) for seed in SEEDS]
    with pytest.raises(KeyboardInterrupt):
        ride(sites, tmp_path / "together", stop=2)
    folder = tmp_path / "together" / "1"
    newest = max((folder / "checkpoint").glob("state-*.json"))
    newest.write_text("cut")
    for folder in ride(sites, tmp_path / "together"):
        one = next(s for s in sites if str(s.experiment.seed) == folder.name)
        run_site(one, tmp_path / folder.name)
        assert numbers(folder) == numbers(tmp_path / folder.name)


def test_only_seeds_may_differ() -> None:
    sites = [site(seed=1), site(seed=2)]
    assert [rider.seed for rider in together(sites).riders] == [1, 2]
    with pytest.raises(ValueError, match="seed alone"):
        together([sites[0], site(seed=2, lr=0.5)])
    with pytest.raises(ValueError, match="seed alone"):
        together([sites[0], replace(sites[1], train_index=[part.flip(0) for part in sites[1].train_index])])


def test_lanes_are_chosen_from_the_free_memory() -> None:
    small, large = site("fedavg"), site("ditto")
    assert memory.lane_bytes(large) > memory.lane_bytes(small) > 0
    free = 10 * memory.lane_bytes(small)
    assert memory.lanes_that_fit(small, "cpu", free) == 7
    assert memory.lanes_that_fit(large, "cpu", free) < 7
    assert memory.lanes_that_fit(small, "cpu", 1) == 1
    wide = site("fedavg", batch=12)
    assert memory.lane_bytes(wide) > memory.lane_bytes(small)


def test_seeds_of_a_comparison(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As typed: the seeds together, each with the numbers of a run of its own, and again after a stop."""
    data = ["--dataset", write_data(tmp_path / "tiny.npz"), *TINY, "--rounds", 3]
    words = ["compare", *data, "--methods", "fedavg", "fedper", "--seeds", 2, 1, "--out", tmp_path / "c"]
    assert fedkper(*words) == 0
    assert "seeds 2, 1" in " ".join(capfd.readouterr().err.split())
    for seed in (1, 2):
        assert fedkper("run", *data, "--method", "fedper", "--seed", seed, "--out", tmp_path / f"{seed}") == 0
        assert results(tmp_path / "c" / f"fedper-seed{seed}") == results(tmp_path / f"{seed}")
    newest = max((tmp_path / "c" / "fedper-seed1" / "checkpoint").glob("state-*.json"))
    newest.write_text("cut")
    assert fedkper(*words) == 0
    assert results(tmp_path / "c" / "fedper-seed1") == results(tmp_path / "1")


def test_lanes_as_typed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = ["--dataset", write_data(tmp_path / "tiny.npz"), *TINY[:-2], "--rounds", 2]
    assert fedkper("run", *data, "--lanes", 3, "--out", tmp_path / "lanes") == 0
    assert fedkper("run", *data, "--workers", 1, "--out", tmp_path / "alone") == 0
    for path in (tmp_path / "alone" / "checkpoint").glob("*.safetensors"):
        for key, leaf in tree.load(path).items():
            ours = tree.load(tmp_path / "lanes" / "checkpoint" / path.name)[key]
            torch.testing.assert_close(ours, leaf, rtol=1e-4, atol=1e-4)
    capfd.readouterr()
    assert fedkper("run", *data, "--lanes", 3, "--workers", 2, "--out", tmp_path / "x") == 2
    assert "--workers 2: has no effect with --lanes 3" in capfd.readouterr().err
