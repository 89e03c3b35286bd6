"""Trees: a model, a client's state or a message as dict[str, Tensor], every leaf with a leading lane axis L.

A name such as "mentor/conv1.weight" belongs to the sub-tree "mentor"; names without "/" are the model itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from fedkper.errors import InputError

Tree = dict[str, Tensor]


def prefix(name: str, tree: Tree) -> Tree:
    return {f"{name}/{k}": v for k, v in tree.items()}


def sub(name: str, tree: Tree) -> Tree:
    """The sub-tree `name`, without its prefix."""
    return {k[len(name) + 1 :]: v for k, v in tree.items() if k.startswith(name + "/")}


def rest(tree: Tree) -> Tree:
    """The leaves that belong to no sub-tree."""
    return {k: v for k, v in tree.items() if "/" not in k}


def choose(which: Tensor, a: Tree, b: Tree) -> Tree:
    """The leaves of `a` in the lanes where `which` [L] is true, else those of `b`."""
    return {k: torch.where(across(which, v), v, b[k]) for k, v in a.items()}


def across(lanes: Tensor, leaf: Tensor) -> Tensor:
    """[L] shaped so that it combines with a leaf [L, ...]."""
    return lanes.view(-1, *[1] * (leaf.dim() - 1))


def spread(tree: Tree, count: int) -> Tree:
    """One lane, seen `count` times, without copies."""
    return {k: v.expand(count, *v.shape[1:]) for k, v in tree.items()}


def to(thing: Any, device: str | torch.device) -> Any:
    """Tensors, and trees and sequences of them, on a device; anything else as it is."""
    if isinstance(thing, Tensor):
        return thing.to(device)
    if isinstance(thing, dict):
        return {k: v.to(device) for k, v in thing.items()}
    return [v.to(device) for v in thing] if isinstance(thing, list) else thing


def stack(trees: list[Tree]) -> Tree:
    """Trees of one lane or more beside each other: [L1, ...], [L2, ...] -> [L1 + L2, ...].

    Leaves that lie beside each other already, as Rows puts them, are not copied.
    """
    if len(trees) == 1:
        return trees[0]
    return {k: _beside([t[k] for t in trees]) for k in (trees[0] if trees else ())}


def _beside(leaves: list[Tensor]) -> Tensor:
    first = leaves[0]
    memory, size = first.untyped_storage().data_ptr(), first.numel()
    adjoining = first.is_contiguous() and all(
        (v.shape, v.stride(), v.dtype) == (first.shape, first.stride(), first.dtype)
        and v.untyped_storage().data_ptr() == memory
        and v.storage_offset() == first.storage_offset() + at * size
        for at, v in enumerate(leaves)
    )
    if not adjoining:
        return torch.cat(leaves)
    return first.as_strided((len(leaves) * len(first), *first.shape[1:]), first.stride())


class Rows:
    """Room for `count` trees of one lane that come one by one and will be stacked: each is copied once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.leaves: Tree = {}

    def put(self, at: int, tree: Tree) -> Tree:
        """The tree in its row. A leaf that is not like the first tree's stays where it is."""
        return {k: self._put(at, k, v) for k, v in tree.items()}

    def _put(self, at: int, name: str, leaf: Tensor) -> Tensor:
        if name not in self.leaves:
            self.leaves[name] = leaf.new_empty(self.count, *leaf.shape[1:])
        row = self.leaves[name][at : at + 1]
        return row.copy_(leaf) if (row.shape, row.dtype) == (leaf.shape, leaf.dtype) else leaf


def lanes(tree: Tree, index: slice | list[int] | Tensor) -> Tree:
    """The given lanes."""
    return {k: v[index] for k, v in tree.items()}


def sqdist(a: Tree, b: Tree) -> Tensor:
    """Squared Euclidean distance over the leaves of `a`, per lane: [L]."""
    return torch.stack([_flat(v - b[k]).square().sum(1) for k, v in a.items()]).sum(0)


def weighted_mean(tree: Tree, weight: Tensor) -> Tree:
    """Mean over lanes with `weight` [L], which is normalised here; leaves become [1, ...].

    Integer leaves (BatchNorm's counter) are averaged too and rounded, and keep their type.
    """
    share = weight.double() / weight.double().sum()

    def mean(leaf: Tensor) -> Tensor:
        real = leaf if leaf.is_floating_point() else leaf.double()
        averaged = (share.to(real.dtype) @ _flat(real)).view(1, *leaf.shape[1:])
        return averaged if leaf.is_floating_point() else averaged.round().to(leaf.dtype)

    return {k: mean(v) for k, v in tree.items()}


def _flat(leaf: Tensor) -> Tensor:
    return leaf.reshape(len(leaf), -1)


def total(tree: Tree) -> Tree:
    """Sum over lanes; leaves become [1, ...]."""
    return {k: v.sum(0, keepdim=True) for k, v in tree.items()}


def finite(tree: Tree) -> Tensor:
    """Per lane, whether every number is finite: [L] bool."""
    # A sum is non-finite as soon as one term is (overflow of finite terms is ruled out by float64).
    sums = [_flat(v).sum(1, dtype=torch.float64) for v in tree.values() if v.is_floating_point()]
    if not sums:
        return torch.ones(len(next(iter(tree.values()))) if tree else 1, dtype=torch.bool)
    return torch.stack(sums).isfinite().all(0)


def unlike(found: Tree, expected: Tree, what: str = "parameters") -> str:
    """Why a tree is not as expected, by its names, shapes and types; empty if it is."""
    odd = sorted(found.keys() ^ expected.keys())
    if odd:
        return f"other {what} than expected: {', '.join(odd[:3])}"
    for name, leaf in found.items():
        if described(leaf) != described(expected[name]):
            return f"{name} is {described(leaf)}, not {described(expected[name])}"
    return ""


def described(leaf: Tensor) -> str:
    """Type and shape."""
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def nbytes(tree: Tree) -> int:
    """Bytes of one lane."""
    return sum(v[0].numel() * v.element_size() for v in tree.values())


def save(tree: Tree, path: Path) -> str:
    """Writes `tree` as safetensors beside `path`, flushes, renames. Returns the checksum for `load`."""
    # The format forgets the order of the leaves, and a sum over leaves is rounded by it.
    data = encode({k: v.contiguous() for k, v in tree.items()}, {"order": json.dumps(list(tree))})
    write(path, data)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def load(path: Path, checksum: str | None = None) -> Tree:
    """Reads what `save` wrote. Raises InputError that names the file if it is missing or damaged."""
    try:
        data = path.read_bytes()
        if checksum is not None and hashlib.blake2b(data, digest_size=16).hexdigest() != checksum:
            raise InputError(f"{path}: damaged (the checksum does not match)")
        leaves = decode(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        order = json.loads(header["__metadata__"]["order"])
        # The file packs its tensors; sums over memory that is not aligned are rounded differently.
        return {k: leaves[k].clone() for k in order}
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error})") from error


def write(path: Path, data: bytes) -> None:
    """A file is either the old one or the new one, never half: written beside it, flushed, renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
