"""A site's personal states on its disk: what may be asked for again stays, and nothing else does."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedkper import tree
from fedkper.flower.ownstate import OwnState


def trained(own: OwnState, round: int, began: int) -> None:
    checksum = tree.save({"w": torch.full((1, 2), float(round))}, own.path(round))
    own.keep(round, checksum, began)


def test_a_state_whose_updates_are_never_merged_stays(tmp_path: Path) -> None:
    own = OwnState(tmp_path, 0)
    trained(own, 1, 0)
    for round in (2, 3, 4, 5):  # too late, refused, no quorum: the coordinator goes on from the state after 1
        trained(own, round, 1)
        assert own.find(1) is not None
    assert own.find(5) is not None
    assert own.find(3) is None


def test_a_new_run_of_the_same_federation_begins_again(tmp_path: Path) -> None:
    own = OwnState(tmp_path, 0)
    for round in range(1, 51):
        trained(own, round, round - 1)
    trained(own, 1, 0)
    trained(own, 2, 1)
    assert [round for round in range(1, 60) if own.find(round)] == [1, 2]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    own = OwnState(tmp_path, 0)
    (tmp_path / ".own-000000-000002.safetensors.4711.tmp").write_bytes(b"half")
    own.path(9).write_bytes(b"written, but never noted")
    (tmp_path / "joined.json").write_text("{}")
    trained(own, 1, 0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["joined.json", "own-000000-000001.safetensors", "own.json"]


@given(merged=st.lists(st.booleans(), min_size=1, max_size=12))
def test_after_any_history_the_last_two_checkpoints_find_their_states(merged: list[bool]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        own, visits = OwnState(Path(folder), 0), [0]
        for round, admitted in enumerate(merged, 1):
            trained(own, round, visits[-1])
            visits.append(round if admitted else visits[-1])
            for asked in visits[-2:]:  # by the last checkpoint, or by the one before
                assert asked == 0 or own.find(asked) is not None
        assert len(list(Path(folder).glob("own-*"))) <= 3
