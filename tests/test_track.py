"""Curves in TensorBoard: the numbers of rounds.csv, each once, also after a resumption."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedkper import track
from terminal import TINY, column, fedkper, results, write_data


@pytest.fixture
def command(tmp_path: Path) -> list[Any]:
    return ["run", "--dataset", write_data(tmp_path / "tiny.npz"), *TINY, "--lr", 0.05, "--rounds", 4]


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (round, number), as TensorBoard reads them."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def in_table(folder: Path, name: str) -> list[tuple[int, float]]:
    cells = column(folder, "rounds.csv", name)
    return [(at, pytest.approx(float(cell))) for at, cell in enumerate(cells, 1) if cell]


def assert_as_in_the_table(board: Path, folder: Path) -> None:
    found = points(board)
    header = (folder / "rounds.csv").read_text().splitlines()[0].split(",")[1:]
    named = {tag.rpartition("/")[2]: tag for tag in found}
    assert {named[n].partition("/")[0] for n in named} == {"scores", "seconds", "bytes"}
    for name in header:
        expected = in_table(folder, name)
        assert found.get(named.get(name, ""), []) == expected, name


def test_every_number_of_a_round_and_no_other(command: list[Any], tmp_path: Path) -> None:
    assert fedkper(*command, "--out", tmp_path / "a") == 0
    assert fedkper(*command, "--out", tmp_path / "b", "--track", tmp_path / "boards") == 0
    assert_as_in_the_table(tmp_path / "boards" / tmp_path.name / "b", tmp_path / "b")
    assert results(tmp_path / "a") == results(tmp_path / "b")


def test_a_resumed_run_draws_no_point_twice(command: list[Any], tmp_path: Path) -> None:
    boards, folder = tmp_path / "boards", tmp_path / "r"
    assert fedkper(*command, "--out", folder, "--track", boards) == 0
    # The last round's checkpoint is lost: it is done again, and one more.
    (folder / "checkpoint" / "state-000004.json").write_text("{")
    again = ["run", "--resume", folder, "--rounds", 5, "--workers", 1]
    assert fedkper(*again, "--track", boards) == 0
    assert_as_in_the_table(boards / tmp_path.name / "r", folder)
    before = {p.name for p in boards.rglob("*")}
    assert fedkper(*again, "--track", boards) == 0  # finished: nothing to draw
    assert {p.name for p in boards.rglob("*")} == before


def test_a_comparison_has_a_board_for_each_run(command: list[Any], tmp_path: Path) -> None:
    words = ["compare", *command[1:-1], 2, "--methods", "fedavg", "fedper", "--out", tmp_path / "c"]
    assert fedkper(*words, "--track", tmp_path / "boards") == 0
    for name in ("fedavg-seed1", "fedper-seed1"):
        assert_as_in_the_table(tmp_path / "boards" / "c" / name, tmp_path / "c" / name)


def test_an_odd_place_stays_below_the_folder() -> None:
    for run in ("/", "/r", "..", "."):
        assert track.place(Path("boards"), Path(run)).is_relative_to("boards")


def test_without_tensorboard_nothing_is_begun(
    command: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(track, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    assert fedkper(*command, "--out", tmp_path / "r", "--track", tmp_path / "boards") == 2
    assert "pip install 'fedkper[track]'" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_board_that_cannot_be_written_is_named(
    command: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    boards = tmp_path / "boards"
    boards.mkdir()
    (boards / tmp_path.name).write_text("in the way")
    assert fedkper(*command, "--out", tmp_path / "r", "--track", boards) == 1
    said = capsys.readouterr().err
    assert "--track" in said
    assert "--resume" in said
    assert column(tmp_path / "r", "rounds.csv", "round") == ["1"]
    assert fedkper("run", "--resume", tmp_path / "r", "--workers", 1) == 0
    assert column(tmp_path / "r", "rounds.csv", "round") == ["1", "2", "3", "4"]
