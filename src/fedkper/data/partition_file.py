"""A partition as a JSON file with a hash, and whether a stored one is the one that a run asks for."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedkper import tree
from fedkper.data.partition import Indices, Partition, Partitioning, check_ranges
from fedkper.errors import InputError

FORMAT = "fedkper partition 1"


def save(partition: Partition, path: Path) -> None:
    """Writes the partition as JSON: complete or not at all, also when the machine stops meanwhile.

    Raises OSError where the folder does not exist or cannot be written.
    """
    content = {
        "format": FORMAT,
        "hash": partition.hash,
        "request": asdict(partition.request),
        "dataset_hash": partition.dataset_hash,
        "train": [p.tolist() for p in partition.train],
        "test": [p.tolist() for p in partition.test],
    }
    tree.write(path, json.dumps(content, allow_nan=False, separators=(",", ":")).encode())


def load(path: Path) -> Partition:
    """Reads a stored partition. Raises InputError, naming the file, unless the content fits its hash."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {FORMAT!r}")
        if set(content["request"]) != {field.name for field in fields(Partitioning)}:
            raise ValueError("its request has other options than this version knows")
        request = Partitioning(**content["request"])
        check_ranges(request)
        train, test = (tuple(_indices(p) for p in content[name]) for name in ("train", "test"))
        partition = Partition(request, str(content["dataset_hash"]), train, test)
        if not len(train) == len(test) == request.clients:
            raise ValueError("its number of parts is not its number of clients")
        if len(everything := np.concatenate([*train, *test])) != len(np.unique(everything)):
            raise ValueError("a sample is in it twice")
        if partition.hash != content["hash"]:
            raise ValueError("the content does not fit the hash")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InputError) as e:
        raise InputError(
            f"{path}: not a usable partition file ({type(e).__name__}: {e}): make it anew"
        ) from e
    return partition


def _indices(values: Any) -> Indices:
    array = np.asarray(values) if values else np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype != np.int64 or (array < 0).any():
        raise ValueError("a part is not a list of sample numbers")
    return array


def compare(stored: Partition, request: Partitioning, dataset_hash: str) -> list[str]:
    """One sentence for each value in which a stored partition differs from the request; empty if it fits.

    Options that the kind does not use (alpha of an iid partition) make no difference.
    """
    options = {"kind": "--partition", "clients": "--clients", "min_size": "--min-size", "split": "--split"}
    options |= {"seed": "--partition-seed"}
    only = {"dirichlet": "alpha", "pathological": "classes_per_client", "column": "column"}.get(request.kind)
    if only:
        options[only] = "--" + only.replace("_", "-")
    pairs = [(o, getattr(stored.request, name), getattr(request, name)) for name, o in options.items()]
    differs = [f"{o} is {a} in the stored partition, {b} in the request" for o, a, b in pairs if a != b]
    if stored.dataset_hash != dataset_hash:
        differs.append(
            f"data set is {stored.dataset_hash[:12]} in the stored partition, "
            f"{dataset_hash[:12]} in the request"
        )
    return differs


def require(stored: Partition, request: Partitioning, dataset_hash: str, place: str) -> None:
    """Raises InputError with every difference (see `compare`) unless the partition stored at `place` fits."""
    if differs := compare(stored, request, dataset_hash):
        raise InputError(
            f"{place}: {'; '.join(differs)}: use the stored values, or make a new partition elsewhere"
        )
