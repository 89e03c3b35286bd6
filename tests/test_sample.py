"""Client sampling: counts, repeats, schedules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkper.errors import InputError
from fedkper.sample import clients_per_round, sampled_clients, stream
from golden import cases

# The machine may be shared: no test fails for being slow once.


@pytest.mark.parametrize("case", cases("sampled_clients"))
def test_official_schedule(case):
    inputs = case["inputs"]
    got = [sampled_clients(t, inputs["n_clients"], inputs["ratio"]) for t in inputs["rounds"]]
    assert got == case["expected"]["clients"]


@pytest.mark.parametrize(
    ("fraction", "clients", "count"),
    [(0.1, 5, 1), (0.1, 20, 2), (0.1, 30, 3), (0.1, 50, 5), (0.29, 100, 29), (1.0, 7, 7), (0.999, 7, 6)],
)
def test_count(fraction, clients, count):
    assert clients_per_round(clients, fraction) == count
    for rule in ("official", "seeded"):
        rounds = [sampled_clients(t, clients, fraction, rule, seed=3) for t in range(50)]
        assert all(len(r) == len(set(r)) == count for r in rounds)
        assert all(type(k) is int and 0 <= k < clients for r in rounds for k in r)
        if count < clients:
            assert len({frozenset(r) for r in rounds}) > 1


@pytest.mark.parametrize("rule", ["official", "seeded"])
@pytest.mark.parametrize("clients", [20, 30, 50])
def test_everybody_is_chosen_at_some_time(rule, clients):
    seen = {k for t in range(200) for k in sampled_clients(t, clients, 0.1, rule)}
    assert seen == set(range(clients))


@pytest.mark.parametrize(
    ("clients", "low", "high", "by"), [(20, 4, 18, 40), (30, 5, 16, 25), (50, 3, 17, 34)]
)
def test_official_visits_of_the_specification(clients, low, high, by):
    rounds = [sampled_clients(t, clients, 0.1) for t in range(100)]
    visits = np.bincount(np.concatenate(rounds), minlength=clients)
    assert (visits.min(), visits.max()) == (low, high)
    seen = [len(np.unique(np.concatenate(rounds[: t + 1]))) == clients for t in (by - 1, by)]
    assert seen == [False, True]


def test_rules_and_seeds():
    def schedule(rule, seed):
        return [sampled_clients(t, 20, 0.2, rule, seed) for t in range(10)]

    assert schedule("official", 1) == schedule("official", 2)
    assert schedule("seeded", 1) == schedule("seeded", 1)
    assert schedule("seeded", 1) != schedule("seeded", 2)


def test_the_global_generator_is_neither_read_nor_moved():
    first = sampled_clients(3, 20, 0.1), stream("x", 1).randint(1000)
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()
    assert (sampled_clients(3, 20, 0.1), stream("x", 1).randint(1000)) == first
    assert np.random.get_state()[1].tolist() == before


@given(
    st.integers(1, 300),
    st.floats(0.001, 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["official", "seeded"]),
)
def test_any_request_gives_distinct_clients(clients, fraction, t, rule):
    chosen = sampled_clients(t, clients, fraction, rule)
    assert len(chosen) == len(set(chosen)) == clients_per_round(clients, fraction) >= 1
    assert set(chosen) <= set(range(clients))


def test_streams_differ_by_every_part_of_the_key():
    keys = [("a", 1, 2), ("b", 1, 2), ("a", 2, 1), ("a", 1), ("a", 1, 2, 0)]
    assert len({stream(*key).randint(2**31) for key in keys}) == len(keys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 0, 0.1), "--clients 0"),
        ((0, 5, 0.0), "--fraction 0.0"),
        ((0, 5, 1.1), "--fraction 1.1"),
        ((0, 5, float("nan")), "--fraction nan"),
        ((-1, 5, 0.5), "round -1"),
        ((0, 5, 0.5, "other"), "--sampling 'other'.*official, seeded"),
        ((0, 5, 0.5, "seeded", -1), "--seed -1"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(InputError, match=words):
        sampled_clients(*arguments)
