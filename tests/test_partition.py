"""Partitions and local splits: the specification's numbers, refusals, and that no sample gets lost."""

import json
import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkper.data.partition import (
    TRIES,
    Partitioning,
    dirichlet_assign,
    local_test_counts,
    make,
    stratified_test_counts,
)
from fedkper.data.partition_file import compare, load, require, save
from fedkper.errors import InputError
from fedkper.losses import entropy
from golden import cases, check

# The machine may be shared: no test fails for being slow once.

HASH = "ab" * 32
KINDS = ["dirichlet", "pathological", "iid", "column"]


def labels_of(*sizes):
    """Labels in an order that is not sorted, `sizes[c]` of class c."""
    return np.random.RandomState(9).permutation(np.repeat(np.arange(len(sizes)), sizes))


def assert_complete(partition, labels):
    """Each sample exactly once, train and test disjoint, nobody empty or below the minimum."""
    everything = np.concatenate([*partition.train, *partition.test])
    assert np.array_equal(np.sort(everything), np.arange(len(labels)))
    assert len(partition.train) == len(partition.test) == partition.request.clients
    assert partition.sizes.min() >= max(partition.request.min_size, 1)
    assert min(len(p) for p in partition.train) >= 1
    assert all(p.dtype == np.int64 for p in (*partition.train, *partition.test))


@pytest.mark.parametrize("case", cases("dirichlet_assign"))
def test_dirichlet_assign_golden(case):
    check(dirichlet_assign(case["inputs"]["class_sizes"], case["inputs"]["proportions"]), case, "counts")


@pytest.mark.parametrize("case", cases("local_test_counts"))
def test_local_test_counts_golden(case):
    got = local_test_counts(case["inputs"]["class_counts"])
    assert got.quota == case["expected"]["per_class_quota"]
    assert got.test.tolist() == case["expected"]["test"]
    assert got.train.tolist() == case["expected"]["train"]
    assert got.random == case["expected"]["random_fallback"]


def test_dirichlet_assign_refuses_a_class_that_nobody_can_take():
    for proportions in ([[0.0, 0.0]], [[math.nan, math.nan]], [[math.inf, 1.0]]):
        with pytest.raises(ValueError, match="class 0"):
            dirichlet_assign([4], proportions)
    # Client 0 is full after class 0, and client 1 draws nothing of class 1.
    with pytest.raises(ValueError, match="class 1"):
        dirichlet_assign([4, 2], [[1.0, 0.0], [1.0, 0.0]])


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any),
    st.integers(1, 8),
    st.integers(0, 2**32 - 1),
)
def test_dirichlet_assign_deals_everything(sizes, clients, seed):
    shares = np.random.RandomState(seed).dirichlet(np.ones(clients), len(sizes)) + 1e-9
    counts = dirichlet_assign([max(n, 1) for n in sizes], shares)
    assert counts.sum(1).tolist() == [max(n, 1) for n in sizes]
    assert counts.min() >= 0


def plain_dirichlet(labels, clients, alpha, minimum, seed):
    """The published rule, written in the order in which it draws."""
    rng = np.random.RandomState(seed)
    while True:
        parts = [[] for _ in range(clients)]
        for c in range(labels.max() + 1):
            members = np.flatnonzero(labels == c)
            rng.shuffle(members)
            p = rng.dirichlet(np.repeat(alpha, clients))
            p = np.array([x * (len(part) < len(labels) / clients) for x, part in zip(p, parts, strict=True)])
            cuts = (np.cumsum(p / p.sum()) * len(members)).astype(int)[:-1]
            for part, new in zip(parts, np.split(members, cuts), strict=True):
                part.extend(new.tolist())
        if min(map(len, parts)) >= minimum:
            break
    for part in parts:
        rng.shuffle(part)
    return parts


@pytest.mark.parametrize(("clients", "alpha", "seed"), [(20, 0.1, 1), (10, 0.5, 2), (5, 100, 3), (1, 1, 4)])
def test_dirichlet_is_the_published_rule_draw_for_draw(clients, alpha, seed):
    labels = labels_of(300, 200, 500, 100, 250)
    expected = plain_dirichlet(labels, clients, alpha, 10, seed)
    partition = make(Partitioning("dirichlet", clients, alpha, seed=seed), labels, HASH)
    assert [sorted([*a, *b]) for a, b in zip(partition.train, partition.test, strict=True)] == [
        sorted(part) for part in expected
    ]
    for part, train in zip(expected, partition.train, strict=True):
        kept = set(train.tolist())
        assert train.tolist() == [i for i in part if i in kept]


def test_a_full_client_gets_nothing_of_the_next_classes():
    got = dirichlet_assign([10, 10], [[0.9, 0.1], [0.9, 0.1]])
    assert got.tolist() == [[9, 1], [9, 1]]  # 9 is below 20 / 2: asked between classes, client 0 overshoots
    full = dirichlet_assign([10, 10], [[1.0, 0.0], [0.9, 0.1]])
    assert full.tolist() == [[10, 0], [0, 10]]


@pytest.mark.parametrize("sizes_clients_alpha_min", [((20,) * 10, 30, 0.01, 2), ((500,) * 10, 100, 0.05, 10)])
def test_a_minimum_that_drawing_does_not_meet_is_refused_soon(sizes_clients_alpha_min):
    sizes, clients, alpha, minimum = sizes_clients_alpha_min
    with pytest.raises(InputError) as caught:
        make(Partitioning("dirichlet", clients, alpha, minimum), labels_of(*sizes), HASH)
    text = str(caught.value)
    for words in (f"--clients {clients}", f"--min-size {minimum}", f"--alpha {alpha}", f"{TRIES} tries"):
        assert words in text
    for remedy in ("larger alpha", "fewer clients", "smaller minimum"):
        assert remedy in text


def test_requests_that_arithmetic_rules_out_are_refused_before_drawing(monkeypatch):
    sixty, even, uneven = labels_of(20, 20, 20), labels_of(50, 50, 50), labels_of(50, 50, 3)
    monkeypatch.setattr(np.random, "RandomState", None)
    with pytest.raises(InputError, match=r"--clients 50 with --min-size 2 needs 100 samples.* 60"):
        make(Partitioning("dirichlet", 50, 0.5, 2), sixty, HASH)
    with pytest.raises(InputError, match=r"--classes-per-client 5 .*--clients 4 .*has 3 classes"):
        make(Partitioning("pathological", 4, classes_per_client=5), even, HASH)
    with pytest.raises(InputError, match=r"takes 2 of 3 classes"):
        make(Partitioning("pathological", 2, classes_per_client=1), even, HASH)
    with pytest.raises(InputError, match=r"class 2 has 3 samples for 4 clients"):
        make(Partitioning("pathological", 4, classes_per_client=3), uneven, HASH)


def test_a_share_that_underflows_is_refused_with_numbers():
    with pytest.raises(InputError, match=r"--alpha 1e-06, --clients 4 and --min-size 10.*larger alpha"):
        make(Partitioning("dirichlet", 4, 1e-6), labels_of(50, 50, 50), HASH)


def test_mild_skew_works_at_once():
    labels = labels_of(*[1000] * 10)
    partition = make(Partitioning("dirichlet", 10, 1000.0), labels, HASH)
    assert_complete(partition, labels)
    assert partition.sizes.min() > 800


def test_skew_falls_with_alpha():
    labels = labels_of(*[1000] * 10)

    def diversity(request):
        train, test = make(request, labels, HASH).counts(labels, 10)
        return float(entropy(torch.from_numpy(train + test)).mean())

    values = [diversity(Partitioning("dirichlet", 20, alpha)) for alpha in (0.05, 0.5, 5.0, 1000.0)]
    assert values == sorted(values)
    assert len(set(values)) == 4
    assert values[-1] > 0.98
    assert diversity(Partitioning("iid", 20)) > 0.98


@pytest.mark.parametrize(("clients", "classes"), [(10, 2), (7, 3), (5, 1), (4, 5), (20, 2), (13, 4)])
def test_pathological_clients_hold_exactly_their_classes(clients, classes):
    labels = labels_of(500, 400, 300, 200, 333)
    partition = make(Partitioning("pathological", clients, classes_per_client=classes), labels, HASH)
    assert_complete(partition, labels)
    train, test = partition.counts(labels, 5)
    counts = train + test
    assert ((counts > 0).sum(1) == classes).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for shards in counts.T:
        assert np.ptp(shards[shards > 0]) <= 1
    by_size = np.argsort([500, 400, 300, 200, 333])
    assert (np.diff(holders[by_size]) >= 0).all()


def test_iid_sizes_differ_by_at_most_one():
    labels = labels_of(100, 3)
    partition = make(Partitioning("iid", 7), labels, HASH)
    assert_complete(partition, labels)
    assert np.ptp(partition.sizes) == 1


@pytest.mark.parametrize(
    "column",
    [
        np.repeat(["b", "a", "c"], 20),
        np.repeat([30, 4, 100], 20),
        np.array(["y", "x", "z"] * 20, dtype=object),
    ],
)
def test_one_client_per_value_of_a_column(column):
    labels = labels_of(30, 30)
    request = Partitioning("column", 3, column="site")
    partition = make(request, labels, HASH, {"site": column})
    assert_complete(partition, labels)
    for k, value in enumerate(sorted(set(column.tolist()))):
        members = np.concatenate([partition.train[k], partition.test[k]])
        assert set(column[members].tolist()) == {value}
    with pytest.raises(InputError, match="--column site has 3 values: use --clients 3, not 20"):
        make(replace(request, clients=20), labels, HASH, {"site": column})


def test_refusals_of_a_column():
    labels = labels_of(30, 30)
    request = Partitioning("column", 2, column="site")
    with pytest.raises(InputError, match=r"--column 'site' .*columns: age, sex"):
        make(request, labels, HASH, {"sex": labels, "age": labels})
    with pytest.raises(InputError, match="no further columns"):
        make(request, labels, HASH)
    for bad in (np.where(labels, np.nan, 1.0), np.where(labels, "a", " "), np.where(labels, "a", None)):
        with pytest.raises(InputError, match="30 samples have no value"):
            make(request, labels, HASH, {"site": bad})
    with pytest.raises(InputError, match=r"--min-size 10.*--clients 2.*client 1 would hold 5"):
        make(request, labels, HASH, {"site": np.repeat([0, 1], [55, 5])})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clients": 0}, "--clients 0"),
        ({"clients": 2.0}, "--clients 2.0"),
        ({"min_size": 0}, "--min-size 0.*from 1"),
        ({"alpha": 0.0}, "--alpha 0.0.*greater than 0.*smaller is more skewed"),
        ({"alpha": math.nan}, "--alpha nan"),
        ({"alpha": math.inf}, "--alpha inf"),
        ({"classes_per_client": 0}, "--classes-per-client 0"),
        ({"seed": -1}, "--partition-seed -1"),
        ({"seed": 2**32}, "--partition-seed"),
        ({"seed": True}, "--partition-seed True"),
        ({"kind": "dirichlett"}, "--partition 'dirichlett'.*pathological"),
        ({"split": "other"}, "--split 'other'.*official, stratified"),
    ],
)
def test_values_out_of_range_name_the_option(change, words):
    with pytest.raises(InputError, match=words):
        make(replace(Partitioning(), **change), labels_of(500, 500), HASH)
    with pytest.raises(InputError, match="has 0"):
        make(Partitioning(), np.zeros(0, dtype=np.int64), HASH)


@pytest.mark.parametrize(
    ("counts", "test"),
    [((50, 50, 50, 50), (10,) * 4), ((500, 10), (51, 2)), ((400, 44), (44, 44)), ((4, 2, 1, 4), 2)],
)
def test_local_split_takes_the_counts_of_the_specification(counts, test):
    labels = labels_of(*counts)
    partition = make(Partitioning("iid", 1), labels, HASH)
    assert_complete(partition, labels)
    got = partition.counts(labels, len(counts)).test[0]
    if test == 2:
        assert got.sum() == 2
    else:
        assert tuple(got) == test


@given(st.lists(st.integers(0, 500), min_size=1, max_size=11))
def test_official_quotas(counts):
    n = np.array(counts)
    got = local_test_counts(n)
    assert (got.test >= 0).all()
    assert (got.test + got.train == n).all()
    assert got.test.sum() + got.random <= int(0.2 * n.sum())
    present = n[n > 0]
    if len(present):
        quota = int(int(0.2 * n.sum()) / len(present))
        assert got.quota == quota
        assert got.test[n > 0].tolist() == [quota if quota <= c else int(0.2 * c) for c in present]
        assert got.random == (0 if got.test.any() else int(0.2 * n.sum()))
        assert got.train.sum() - got.random >= 1


@given(st.lists(st.integers(0, 500), min_size=1, max_size=11))
def test_stratified_takes_a_fifth_of_each_class_and_never_the_last(counts):
    for n, k in zip(counts, stratified_test_counts(counts).tolist(), strict=True):
        assert k == (max(int(0.2 * n), 1) if n >= 2 else 0)
        assert n == 0 or k < n


@st.composite
def requests(draw):
    labels = labels_of(*draw(st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any)))
    request = Partitioning(
        kind=draw(st.sampled_from(KINDS)),
        clients=draw(st.integers(1, 6)),
        alpha=draw(st.sampled_from([0.05, 0.1, 1.0, 100.0])),
        min_size=draw(st.integers(1, 12)),
        classes_per_client=draw(st.integers(1, 4)),
        column="site",
        split=draw(st.sampled_from(["official", "stratified"])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    return request, labels, {"site": np.random.RandomState(0).randint(0, request.clients, len(labels))}


@settings(max_examples=150)
@given(requests())
def test_any_request_deals_everything_or_is_refused_with_numbers(drawn):
    request, labels, columns = drawn
    try:
        partition = make(request, labels, HASH, columns)
    except InputError as refusal:
        text = str(refusal)
        assert f"--clients {request.clients}" in text or "--column site has" in text
        assert re.search(r"--min-size \d|--classes-per-client \d|--column site has", text)
        return
    assert_complete(partition, labels)
    assert make(request, labels, HASH, columns).hash == partition.hash
    classes = int(labels.max()) + 1
    train, test = partition.counts(labels, classes)
    for all_, taken in zip(train + test, test, strict=True):
        if request.split == "stratified":
            assert taken.tolist() == stratified_test_counts(all_).tolist()
        elif (official := local_test_counts(all_)).random:
            assert taken.sum() == official.random
        else:
            assert taken.tolist() == official.test.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_and_nothing_else(kind):
    labels = labels_of(200, 300)
    columns = {"site": np.random.RandomState(3).randint(0, 4, len(labels))}
    request = Partitioning(kind, 4, 0.5, column="site")
    np.random.seed(1)
    first = make(request, labels, HASH, columns)
    before = np.random.get_state()[1].tolist()
    np.random.rand(10)
    assert make(request, labels, HASH, columns).hash == first.hash
    np.random.seed(1)
    make(request, labels, HASH, columns)
    assert np.random.get_state()[1].tolist() == before
    other = make(replace(request, seed=2), labels, HASH, columns)
    assert any(set(a.tolist()) != set(b.tolist()) for a, b in zip(first.test, other.test, strict=True))


def test_a_clients_local_split_does_not_depend_on_the_others():
    labels = labels_of(200, 300)
    site = np.repeat([0, 1, 2], [200, 200, 100])
    request = Partitioning("column", 3, column="site")
    three = make(request, labels, HASH, {"site": site})
    two = make(replace(request, clients=2), labels[:400], HASH, {"site": site[:400]})
    for k in range(2):
        assert np.array_equal(three.test[k], two.test[k])


def test_clients_with_equal_labels_do_not_share_their_draws():
    labels = np.tile(np.repeat([0, 1], 50), 2)
    request = Partitioning("column", 2, column="site")
    partition = make(request, labels, HASH, {"site": np.repeat([0, 1], 100)})
    assert not np.array_equal(partition.test[0], partition.test[1] - 100)


def test_the_hash_covers_everything():
    labels = labels_of(200, 300)
    base = make(Partitioning("iid", 4), labels, HASH)
    swapped = replace(base, train=(base.train[1], base.train[0], *base.train[2:]))
    moved = replace(base, train=base.test, test=base.train)
    others = [
        swapped,
        moved,
        replace(base, dataset_hash="00"),
        replace(base, request=Partitioning("iid", 4, 0.2)),
    ]
    assert len({p.hash for p in (base, *others)}) == 5


def test_save_and_load(tmp_path):
    labels = labels_of(4, 30, 60)
    for kind, split in (("dirichlet", "official"), ("iid", "stratified")):
        partition = make(Partitioning(kind, 3, 1.0, 3, split=split), labels, HASH)
        path = tmp_path / "partition.json"
        save(partition, path)
        got = load(path)
        assert got.hash == partition.hash
        assert got.request == partition.request
        assert all(np.array_equal(a, b) for a, b in zip(got.train, partition.train, strict=True))
        assert all(p.dtype == np.int64 for p in (*got.train, *got.test))
        assert [p.name for p in tmp_path.iterdir()] == ["partition.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    partition = make(Partitioning("iid", 3), labels_of(30, 60), HASH)
    path = tmp_path / "partition.json"
    save(partition, path)

    def full(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save(make(Partitioning("iid", 3, seed=2), labels_of(30, 60), HASH), path)
    assert load(path).hash == partition.hash
    assert [p.name for p in tmp_path.iterdir()] == ["partition.json"]


def test_a_reader_of_the_old_file_never_sees_a_half_written_one(tmp_path):
    path = tmp_path / "partition.json"
    save(make(Partitioning("iid", 3), labels_of(30, 60), HASH), path)
    with path.open() as old:
        text = path.read_text()
        save(make(Partitioning("iid", 3, seed=2), labels_of(30, 60), HASH), path)
        assert old.read() == text != path.read_text()


def edited(change):
    def edit(text):
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "[" * 100_000,
        lambda text: "[1]",
        lambda text: "null",
        lambda text: text.replace("iid", "idd"),
        edited(lambda c: c.pop("hash")),
        edited(lambda c: c.update(format="other")),
        edited(lambda c: c.update(dataset_hash="00")),
        edited(lambda c: c["request"].update(alpha=0.2)),
        edited(lambda c: c["request"].update(alpha=math.nan)),
        edited(lambda c: c["request"].update(extra=1)),
        edited(lambda c: c["request"].update(clients="3")),
        edited(lambda c: c.update(request=None)),
        edited(lambda c: c["train"].pop()),
        edited(lambda c: c["train"][0].pop()),
        edited(lambda c: c["train"][0].append(c["train"][1][0])),
        edited(lambda c: c["train"].__setitem__(0, [0.5])),
        edited(lambda c: c["train"].__setitem__(0, [-1])),
        edited(lambda c: c["train"].__setitem__(0, [2**70])),
        edited(lambda c: c["train"].__setitem__(0, [[1], [2, 3]])),
        edited(lambda c: c["train"].__setitem__(0, 7)),
        edited(lambda c: c.update(train=[], test=[])),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, edit):
    path = tmp_path / "partition.json"
    save(make(Partitioning("iid", 3), labels_of(30, 60), HASH), path)
    path.write_text(edit(path.read_text()))
    with pytest.raises(InputError, match=re.escape(str(path))):
        load(path)


def test_files_that_are_not_there_or_not_text_are_refused_by_name(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", tmp_path, tmp_path / "binary"):
        with pytest.raises(InputError, match=re.escape(str(path))):
            load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alpha": 0.5}, "--alpha is 0.1 in the stored partition, 0.5 in the request"),
        ({"clients": 4}, "--clients is 3"),
        ({"seed": 2}, "--partition-seed is 1"),
        ({"min_size": 11}, "--min-size is 10"),
        ({"split": "stratified"}, "--split is official"),
        ({"kind": "iid"}, "--partition is dirichlet"),
        ({"kind": "pathological", "classes_per_client": 1}, "--classes-per-client is 2"),
        ({"kind": "column", "column": "site"}, "--column is "),
    ],
)
def test_a_stored_partition_that_differs_is_refused_by_value(change, words):
    request = Partitioning("dirichlet", 3)
    stored = make(request, labels_of(300, 600, 200), HASH)
    assert compare(stored, request, HASH) == []
    assert compare(stored, replace(request, classes_per_client=5, column="unused"), HASH) == []
    require(stored, request, HASH, "partition.json")
    assert any(words in sentence for sentence in compare(stored, replace(request, **change), HASH))
    with pytest.raises(InputError, match=r"partition.json: .*data set is abababababab"):
        require(stored, replace(request, **change), "cd" * 32, "partition.json")


@pytest.mark.realdata
def test_dirichlet_on_bloodmnist(real):
    with np.load(real("bloodmnist") / "medmnist" / "bloodmnist.npz") as data:
        labels = data["train_labels"].reshape(-1).astype(np.int64)
    partition = make(Partitioning("dirichlet", 20, 0.1), labels, HASH)
    assert_complete(partition, labels)
    assert partition.sizes.sum() == 11959
    # The specification measured a median of about 545, sizes up to about 2,000 and a test share of 4 to 20 %.
    assert 300 < np.median(partition.sizes) < 800
    assert 1000 < partition.sizes.max() < 3500
    share = np.array([len(p) for p in partition.test]) / partition.sizes
    assert share.min() > 0.02
    assert share.max() <= 0.2
    assert 0.1 < share.mean() < 0.16
