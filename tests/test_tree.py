"""Trees on disk and their sums."""

from pathlib import Path

import pytest
import torch

from fedkper import tree
from fedkper.errors import InputError


def test_a_tree_survives_save_and_load(tmp_path: Path) -> None:
    """Names, order, shapes and types: the order of the leaves decides how a sum over them is rounded."""
    for attempt in range(20):  # the file format's own order is by chance
        names = [f"sub/{i}" for i in torch.randperm(12).tolist()]
        saved = {name: torch.randn(2, 3) for name in names}
        saved |= {"count": torch.tensor([3, 4]), "empty": torch.empty(2, 0)}
        checksum = tree.save(saved, tmp_path / f"{attempt}.safetensors")
        loaded = tree.load(tmp_path / f"{attempt}.safetensors", checksum)
        assert list(loaded) == list(saved)
        assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in saved.items())
        assert all(v.data_ptr() % 64 == 0 for v in loaded.values() if v.numel())


@pytest.mark.parametrize("cut", [0, 7, 8, 50, 120])
def test_a_damaged_file_is_named(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model.safetensors"
    checksum = tree.save({"w": torch.randn(1, 30)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    for expected in (None, checksum):
        with pytest.raises(InputError, match=r"model\.safetensors"):
            tree.load(path, expected)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checksum = tree.save({"w": torch.randn(1, 30)}, path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="checksum"):
        tree.load(path, checksum)


def test_finite_tells_lanes_apart() -> None:
    leaf = torch.full((3, 4), 3e38)  # the sum overflows though every number is finite
    leaf[1, 2] = float("nan")
    assert tree.finite({"w": leaf, "count": torch.tensor([1, 2, 3])}).tolist() == [True, False, True]
    assert tree.finite({}).tolist() == [True]
    assert tree.finite({"count": torch.tensor([1, 2])}).tolist() == [True, True]


def test_a_mean_by_weights() -> None:
    leaves = {"w": torch.tensor([[1.0], [3.0]]), "n": torch.tensor([10, 21])}
    merged = tree.weighted_mean(leaves, torch.tensor([2, 2]))
    assert merged["w"].tolist() == [[2.0]]
    assert merged["n"].tolist() == [16]  # 15.5 to the nearest even
    assert merged["n"].dtype == torch.int64
