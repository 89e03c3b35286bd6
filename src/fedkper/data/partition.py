"""Deals a train split out to clients and splits each client's part into train and local test (specification
3).

A partition is fixed for all seeds and methods of a study: it depends on its own `--partition-seed` only, is
stored as a JSON file with a hash, and a run that asks for another one than the stored is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkper.errors import InputError
from fedkper.sample import MAX_SEED, stream

Indices = NDArray[np.int64]
Parts = list[Indices]

KINDS = ("dirichlet", "pathological", "iid", "column")
SPLITS = ("official", "stratified")
TRIES = 1000


@dataclass(frozen=True)
class Partitioning:
    """What was asked for. `make` checks the ranges, so that a message can name the option."""

    kind: str = "dirichlet"
    """dirichlet: label shares drawn per class. pathological: few classes per client. iid: equal random parts.
    column: one client per value of a column, in sorted order."""
    clients: int = 20
    alpha: float = 0.1
    """dirichlet: smaller is more skewed; 1000 is close to iid"""
    min_size: int = 10
    """Fewest samples of a client, local test part included; holds for every kind."""
    classes_per_client: int = 2
    """pathological only"""
    column: str = ""
    """column only: the name of the column"""
    split: str = "official"
    """Local test part: official (near class-balanced, 4 to 20 %) or stratified (20 % of each class)."""
    seed: int = 1


class Counts(NamedTuple):
    train: Indices
    test: Indices


@dataclass(frozen=True, eq=False)
class Partition:
    """Index arrays into the train split, one per client; every sample is in exactly one of them, once."""

    request: Partitioning
    dataset_hash: str
    train: tuple[Indices, ...]
    """[K] train parts D_k"""
    test: tuple[Indices, ...]
    """[K] local test parts L_k, possibly empty"""

    @property
    def hash(self) -> str:
        """SHA-256 over the request, the data set's hash and every index in order."""
        digest = hashlib.sha256(
            json.dumps([asdict(self.request), self.dataset_hash], sort_keys=True).encode()
        )
        for part in (*self.train, *self.test):
            digest.update(f"/{len(part)}/".encode())
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return digest.hexdigest()

    @property
    def sizes(self) -> Indices:
        """[K] samples of each client, train and local test together."""
        return np.array([len(a) + len(b) for a, b in zip(self.train, self.test, strict=True)], dtype=np.int64)

    def counts(self, labels: NDArray[np.int64], classes: int) -> Counts:
        """Label histograms [K, classes] of the train parts (the h_k of FedKPer) and the test parts."""

        def table(parts: Sequence[Indices]) -> Indices:
            return np.array([np.bincount(labels[p], minlength=classes) for p in parts], dtype=np.int64)

        return Counts(table(self.train), table(self.test))


def make(
    request: Partitioning,
    labels: NDArray[np.int64],
    dataset_hash: str,
    columns: Mapping[str, NDArray[Any]] | None = None,
) -> Partition:
    """Deals the samples with `labels` [N] out to clients and splits each client's part.

    `columns`: further columns [N] of the train split, for kind "column". The result depends on
    the arguments only.
    Raises InputError, naming the option and the numbers, for values out of range, for a request that
    arithmetic rules out (before anything is drawn), and where drawing does not meet the minimum within a
    bounded number of tries.
    """
    check_ranges(request)
    labels = np.asarray(labels)
    samples, clients, minimum = len(labels), request.clients, request.min_size
    if request.kind != "column" and clients * minimum > samples:
        raise InputError(
            f"--clients {clients} with --min-size {minimum} needs {clients * minimum} samples, "
            f"the train split has {samples}: use fewer clients or a smaller minimum"
        )
    deal = {"dirichlet": _dirichlet, "pathological": _pathological, "iid": _iid, "column": _column}
    parts = deal[request.kind](request, labels, columns or {})
    smallest = min(range(clients), key=lambda k: len(parts[k]))
    if len(parts[smallest]) < minimum:
        raise InputError(
            f"--min-size {minimum}: of --clients {clients}, client {smallest} would hold "
            f"{len(parts[smallest])} samples: use a smaller minimum, fewer clients or another --partition"
        )
    pairs = [_local_split(request, labels, client, part) for client, part in enumerate(parts)]
    return Partition(request, dataset_hash, tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))


def check_ranges(r: Partitioning) -> None:
    for option, value, low, high in (
        ("--clients", r.clients, 1, 1_000_000),
        ("--min-size", r.min_size, 1, 1_000_000_000),
        ("--classes-per-client", r.classes_per_client, 1, 1_000_000),
        ("--partition-seed", r.seed, 0, MAX_SEED),
    ):
        if type(value) is not int or not low <= value <= high:
            raise InputError(f"{option} {value!r}: must be a whole number from {low} to {high}")
    if type(r.alpha) not in (int, float) or not 0 < r.alpha <= 1e6:
        raise InputError(
            f"--alpha {r.alpha!r}: must be greater than 0 and at most 1000000 (smaller is more skewed)"
        )
    for option, name, known in (("--partition", r.kind, KINDS), ("--split", r.split, SPLITS)):
        if name not in known:
            raise InputError(f"{option} {name!r} is not known: use one of {', '.join(known)}")


def dirichlet_assign(class_sizes: Sequence[int], proportions: ArrayLike) -> Indices:
    """How many samples of each class go to each client [C, K] (specification 3.2, MOON / NIID-Bench rule).

    `proportions` [C, K]: one draw per class, in the order of `class_sizes` [C]. A client that holds at least
    N/K samples gets nothing of the next classes; it is asked between classes only, so a client may overshoot.
    Raises ValueError where no client is left with a positive, finite share.
    """
    shares = np.asarray(proportions, dtype=np.float64)
    classes, clients = shares.shape
    counts = np.zeros((classes, clients), dtype=np.int64)
    full = sum(class_sizes) / clients
    for c, size in enumerate(class_sizes):
        p = np.where(counts.sum(0) < full, shares[c], 0.0)
        total = p.sum()
        if not 0 < total < math.inf:
            raise ValueError(f"class {c}: no client that may still receive samples drew a share above 0")
        cuts = (np.cumsum(p / total) * size).astype(np.int64)[:-1]
        counts[c] = np.diff(cuts, prepend=0, append=size)
    return counts


def _dirichlet(r: Partitioning, labels: NDArray[np.int64], _: Mapping[str, NDArray[Any]]) -> Parts:
    """Specification 3.2. Only classes that occur draw; a retry goes on in the same random stream."""
    rng = np.random.RandomState(r.seed)
    members = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    remedy = f"(train split: {len(labels)} samples): use a larger alpha, fewer clients or a smaller minimum"
    asked = f"with --alpha {r.alpha:g}, --clients {r.clients} and --min-size {r.min_size}"
    for _try in range(TRIES):
        # The mask takes no random number, so all draws can be made before the deterministic part.
        draws = [(rng.permutation(m), rng.dirichlet(np.full(r.clients, r.alpha))) for m in members]
        try:
            counts = dirichlet_assign([len(m) for m in members], [p for _, p in draws])
        except ValueError as e:
            raise InputError(f"no Dirichlet split {asked}: {e} {remedy}") from None
        if counts.sum(0).min() >= r.min_size:
            pieces = [np.split(m, np.cumsum(n)[:-1]) for (m, _), n in zip(draws, counts, strict=True)]
            parts = [np.concatenate(piece) for piece in zip(*pieces, strict=True)]
            for part in parts:
                rng.shuffle(part)
            return parts
    raise InputError(f"no Dirichlet split {asked} found in {TRIES} tries {remedy}")


def _pathological(r: Partitioning, labels: NDArray[np.int64], _: Mapping[str, NDArray[Any]]) -> Parts:
    """Each client holds exactly `classes_per_client` classes.

    Every class is cut into equal shards (sizes differ by at most 1), as many as clients hold it. Classes have
    equally many shards; if that does not come out even, the largest classes have one more. Nothing is left
    over.
    """
    present, sizes = np.unique(labels, return_counts=True)
    shards = r.clients * r.classes_per_client
    if r.classes_per_client > len(present):
        raise InputError(
            f"--classes-per-client {r.classes_per_client} (with --clients {r.clients} and "
            f"--min-size {r.min_size}): the train split has {len(present)} classes, use at most that many"
        )
    if shards < len(present):
        raise InputError(
            f"--clients {r.clients} with --classes-per-client {r.classes_per_client} takes {shards} of "
            f"{len(present)} classes and leaves the others over: use more clients or more classes per client"
        )
    cuts = np.full(len(present), shards // len(present))
    cuts[np.argsort(-sizes, kind="stable")[: shards % len(present)]] += 1
    if (short := np.flatnonzero(sizes < cuts)).size:
        c = int(short[0])
        raise InputError(
            f"--clients {r.clients} with --classes-per-client {r.classes_per_client}: class {present[c]} has "
            f"{sizes[c]} samples for {cuts[c]} clients: use fewer clients or fewer classes per client"
        )
    rng = np.random.RandomState(r.seed)
    piles = [
        np.array_split(rng.permutation(np.flatnonzero(labels == c)), n)
        for c, n in zip(present, cuts, strict=True)
    ]
    parts = []
    for _client in range(r.clients):
        # Always the classes with most shards left, ties at random: this order never ends in a repeat.
        left = np.array([len(pile) for pile in piles])
        chosen = np.lexsort((rng.permutation(len(piles)), -left))[: r.classes_per_client]
        parts.append(rng.permutation(np.concatenate([piles[c].pop() for c in chosen])))
    return parts


def _iid(r: Partitioning, labels: NDArray[np.int64], _: Mapping[str, NDArray[Any]]) -> Parts:
    """Shuffled and cut into parts whose sizes differ by at most 1."""
    return np.array_split(np.random.RandomState(r.seed).permutation(len(labels)).astype(np.int64), r.clients)


def _column(r: Partitioning, labels: NDArray[np.int64], columns: Mapping[str, NDArray[Any]]) -> Parts:
    if r.column not in columns:
        known = f"columns: {', '.join(sorted(columns))}" if columns else "it has no further columns"
        raise InputError(f"--column {r.column!r} is not in the data set; {known}")
    column = np.asarray(columns[r.column])
    missing = [v is None or v != v or str(v).strip() == "" for v in column.tolist()]
    if any(missing):
        raise InputError(
            f"--column {r.column}: {sum(missing)} samples have no value, the first is {missing.index(True)}"
        )
    values, owner = np.unique(column.astype(str) if column.dtype == object else column, return_inverse=True)
    if len(values) != r.clients:
        raise InputError(
            f"--column {r.column} has {len(values)} values: use --clients {len(values)}, not {r.clients}"
        )
    return [np.flatnonzero(owner == k) for k in range(len(values))]


class LocalTest(NamedTuple):
    """One client's official split: `test` and `train` [C] by class, `random` test samples of any class."""

    quota: int
    test: Indices
    train: Indices
    random: int


def local_test_counts(class_counts: ArrayLike) -> LocalTest:
    """The official local split of a client with `class_counts` [C] samples (specification 3.3).

    The same quota for every class present, a fifth of the client's samples over its classes; a class below
    the quota gives a fifth of its own. A class just above it moves to the test part entirely: that is what
    the official code does. If nothing is taken at all, a fifth of the samples is taken at random.
    """
    n = np.asarray(class_counts, dtype=np.int64)
    fifth = int(n.sum()) // 5
    quota = fifth // max(int((n > 0).sum()), 1)
    test = np.where(n >= quota, quota, n // 5) * (n > 0)
    return LocalTest(quota, test, n - test, 0 if test.any() else fifth)


def stratified_test_counts(class_counts: ArrayLike) -> Indices:
    """The stratified local split: a fifth of each class [C], at least 1 of 2 or more, never the last one."""
    n = np.asarray(class_counts, dtype=np.int64)
    return np.where(n >= 2, np.maximum(n // 5, 1), 0)


def _local_split(
    r: Partitioning, labels: NDArray[np.int64], client: int, part: Indices
) -> tuple[Indices, Indices]:
    """(train, test) of one client, drawn from a stream of its own: no client's split depends on another's."""
    rng = stream("local split", r.seed, client)
    own = labels[part]
    classes, n = np.unique(own, return_counts=True)
    official = local_test_counts(n)
    take = official.test if r.split == "official" else stratified_test_counts(n)
    chosen = [rng.permutation(np.flatnonzero(own == c))[:k] for c, k in zip(classes, take, strict=True)]
    if r.split == "official" and official.random:
        chosen = [rng.permutation(len(part))[: official.random]]
    in_test = np.zeros(len(part), dtype=bool)
    in_test[np.concatenate(chosen)] = True
    return part[~in_test], part[in_test]
