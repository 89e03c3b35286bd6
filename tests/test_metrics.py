"""Metrics against the specification's numbers, and their properties."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkper import averages
from fedkper.averages import mean, mean_curve, over_seeds, std
from fedkper.errors import InputError
from fedkper.forgetting import backward_transfer, consistency
from fedkper.metrics import Curves, balance, local_curves, over_runs, per_round, summarise
from golden import cases, check

# The machine may be shared: no test fails for being slow once.

HEADLINES = ["global_acc", "global_bwt", "global_consistency", "local_acc", "worst_client_acc"]
HEADLINES += ["local_consistency", "balance"]
NAN = float("nan")
EXAMPLE = [0.20, 0.50, 0.40, 0.30, 0.50, 0.60, 0.45]
# Accuracies as they arise: right answers out of 64, so that scaling by 1/2 is exact and ties stay ties.
SHARES = st.integers(0, 64).map(lambda n: n / 64)
GAPPY = st.one_of(SHARES, st.none())


@pytest.mark.parametrize("case", cases("consistency"))
def test_consistency_golden(case):
    got = consistency(np.array(case["inputs"]["acc"]))
    expected = case["expected"]
    assert list(got.peaks) == expected["peaks"]
    assert [list(w) for w in got.windows] == expected["windows"]
    assert [list(w) for w in got.skipped] == expected["skipped_zero_peak_windows"]
    check(got.ipfr, case, "ipfr")
    check(got.aipfr.value, case, "aipfr")
    for key, number in (
        ("C", got.c),
        ("C_drop_only", got.drop_only),
        ("C_with_tail", got.with_tail),
        ("C_drop_only_with_tail", got.drop_only_with_tail),
    ):
        check(number.value, case, key)
        assert (number.value is None) == bool(number.reason)


def test_consistency_worked_example():
    got = consistency(EXAMPLE)
    assert got.peaks == (0, 1, 4, 5)
    assert got.ipfr == pytest.approx((1.5, 0.2, 0.2))
    assert got.aipfr.value == pytest.approx(0.63333, abs=1e-5)
    values = [got.c.value, got.drop_only.value, got.with_tail.value, got.drop_only_with_tail.value]
    assert values == pytest.approx([0.36667, 0.93333, 0.46250, 0.88750], abs=1e-5)
    assert (got.c.used, got.with_tail.used) == (3, 4)


@pytest.mark.parametrize(
    ("acc", "peaks", "c", "drop_only", "with_tail"),
    [
        ([0.8, 0.4, 0.8], (0, 2), 0.75, 0.75, 0.75),
        ([0.9, 0.6, 0.5, 0.4], (0,), None, None, 0.5556),
        ([0.5, 0.5, 0.5], (0, 1, 2), 1, 1, 1),
        ([0, 0, 0.4, 0.2, 0.5], (0, 1, 2, 4), 0.625, 0.75, 0.625),
        ([0.4, 0.1, 0.1, 0.1, 0.8], (0, 4), 0.1875, 0.4375, 0.1875),
        ([0.2, 0.5], (0, 1), -0.5, 1, -0.5),
    ],
)
def test_consistency_table(acc, peaks, c, drop_only, with_tail):
    got = consistency(acc)
    assert got.peaks == peaks
    for number, value in ((got.c, c), (got.drop_only, drop_only), (got.with_tail, with_tail)):
        assert number.value == (None if value is None else pytest.approx(value, abs=1e-4))


def test_relative_drop_counts_both_ends_of_the_window():
    got = consistency([0.2, 0.5, 0.4, 0.45, 0.6, 0.6])
    assert got.windows[1] == (1, 4)
    assert got.ipfr[1] == pytest.approx((0 + 0.1 + 0.05 + 0.1) / 0.5 / 3)
    assert got.ipfr[1] == pytest.approx(0.1667, abs=1e-4)


@pytest.mark.parametrize(
    ("acc", "reason"),
    [
        ([], "no round"),
        ([None, NAN], "no round"),
        ([0.3], "no second record high"),
        ([0.9, 0.5], "no second record high"),
        ([0.0, 0.0, 0.0], "starts from an accuracy of 0"),
    ],
)
def test_undefined_consistency_has_a_reason(acc, reason):
    got = consistency(acc)
    assert got.c.value is None
    assert reason in got.c.reason
    assert got.aipfr.value is None


@pytest.mark.parametrize("hole", [None, NAN, math.inf, -math.inf])
def test_undefined_rounds_are_left_out_of_the_series(hole):
    got, whole = consistency([hole, 0.2, 0.5, hole, 0.4, 0.5, hole]), consistency([0.2, 0.5, 0.4, 0.5])
    assert got.ipfr == whole.ipfr
    assert got.c == whole.c
    assert got.with_tail == whole.with_tail
    assert got.peaks == (1, 2, 5)
    assert got.windows == ((1, 2), (2, 5))


@given(st.lists(GAPPY, max_size=30))
def test_consistency_of_a_scaled_curve(acc):
    got, half = consistency(acc), consistency([None if a is None else a / 2 for a in acc])
    assert got == half


@given(st.lists(GAPPY, max_size=30))
def test_consistency_bounds(acc):
    got = consistency(acc)
    for number in (got.c, got.drop_only, got.with_tail, got.drop_only_with_tail):
        assert number.value is None or (math.isfinite(number.value) and number.value <= 1)
    if got.c.value is not None:
        assert got.c.value <= got.drop_only.value
    if got.drop_only.value is not None:
        assert got.drop_only.value >= 0
    assert len(got.windows) + len(got.skipped) == max(len(got.peaks) - 1, 0)
    if any(acc):
        assert got.with_tail.used - got.c.used in (0, 1)


@given(st.lists(st.integers(1, 64).map(lambda n: n / 64), min_size=2, max_size=30))
def test_a_rising_curve_never_drops(acc):
    assert consistency(sorted(acc)).drop_only.value == 1
    falling = sorted(set(acc), reverse=True)
    assert consistency(falling).c.value is None


@pytest.mark.parametrize("case", cases("backward_transfer"))
def test_backward_transfer_golden(case):
    got = backward_transfer(np.array(case["inputs"]["acc"]), case["inputs"]["sampled"])
    assert [v is None for v in got.per_round] == [v is None for v in case["expected"]["per_round"]]
    for a, b in zip(got.per_round, case["expected"]["per_round"], strict=True):
        assert b is None or a == pytest.approx(b, abs=1e-12)
    check(got.mean.value, case, "mean_defined_rounds")
    check(got.undefined_as_zero.value, case, "mean_undefined_as_zero")
    check(got.final.value, case, "final")
    assert list(got.never_sampled) == case["expected"]["never_sampled"]


def test_backward_transfer_worked_example():
    acc = [[0.50, 0.20, 0.30], [0.40, 0.60, 0.30], [0.45, 0.35, 0.70], [0.30, 0.55, 0.40]]
    got = backward_transfer(acc, [[0], [1], [2], [0]])
    assert got.per_round[0] is None
    assert got.per_round[1:] == pytest.approx([-0.10, -0.15, -0.18333], abs=1e-5)
    assert got.mean.value == pytest.approx(-0.14444, abs=1e-5)
    assert got.undefined_as_zero.value == pytest.approx(-0.10833, abs=1e-5)
    assert got.clients == (0, 1, 2, 3)


def test_backward_transfer_of_two_clients_and_one_never_sampled():
    got = backward_transfer([[0.8, 0.5, 0.9], [0.6, 0.6, 0.1]], [[0, 1], []])
    assert got.final.value == pytest.approx(-0.05)
    assert got.clients[-1] == 2
    assert got.never_sampled == (2,)


def test_backward_transfer_without_some_local_tests():
    got = backward_transfer([[0.8, None, 0.9], [0.6, None, NAN]], [[0, 1, 2], [0]])
    assert got.final.value == pytest.approx(-0.2)
    assert got.clients == (0, 1)
    assert got.never_sampled == ()
    nobody = backward_transfer([[None, None]] * 3, [[0], [1], [0]])
    assert nobody.per_round == (None, None, None)
    assert {nobody.mean.value, nobody.undefined_as_zero.value, nobody.final.value} == {None}
    assert "local test" in nobody.mean.reason


def test_a_visit_without_evaluation_leaves_no_reference():
    got = backward_transfer([[0.8], [None], [0.6], [0.5]], [[0], [0], [0], []])
    assert got.per_round == (None, None, None, pytest.approx(-0.1))


def rounds_of(clients, rounds):
    values = st.lists(st.lists(GAPPY, min_size=clients, max_size=clients), min_size=rounds, max_size=rounds)
    sampled = st.lists(
        st.sets(st.integers(0, clients - 1), min_size=1).map(list), min_size=rounds, max_size=rounds
    )
    return st.tuples(values, sampled, st.permutations(range(clients)))


@given(rounds_of(4, 6))
def test_the_order_of_clients_changes_nothing(drawn):
    acc, sampled, order = drawn
    new = {old: i for i, old in enumerate(order)}
    moved = backward_transfer(
        [[row[k] for k in order] for row in acc], [[new[k] for k in s[::-1]] for s in sampled]
    )
    got = backward_transfer(acc, sampled)
    assert (moved.per_round, moved.mean, moved.clients) == (got.per_round, got.mean, got.clients)
    rows = [{k: row[k] for k in s} for row, s in zip(acc, sampled, strict=True)]
    renamed = [{new[k]: v for k, v in reversed(row.items())} for row in rows]
    sizes = dict(enumerate((5, 1, 9, 30)))
    a, b = local_curves(rows, sizes), local_curves(renamed, {new[k]: n for k, n in sizes.items()})
    assert a == b


@given(st.lists(SHARES, min_size=1, max_size=20), st.lists(SHARES, min_size=1, max_size=20))
def test_backward_transfer_of_a_constant_model_is_zero(row, other):
    acc = [row] * len(other)
    assert backward_transfer(acc, [[0]] * len(other)).mean.value in (0, None)


@pytest.mark.parametrize("case", cases("local_summary"))
def test_local_golden(case):
    rows = [{int(k): v for k, v in row.items()} for row in case["inputs"]["per_round"]]
    got = local_curves(rows, dict.fromkeys(range(4), 10))
    check(got.mean, case, "round_mean")
    check(got.over_samples, case, "round_mean")
    check(got.worst, case, "round_worst")
    check(mean(got.mean).value, case, "avg_local_acc")
    check(std(got.mean).value, case, "std_over_rounds")
    check(mean(got.worst).value, case, "avg_worst_client_acc")
    check(got.consistency.c.value, case, "local_consistency")
    assert got.consistency.peaks == (0, 1, 2)
    assert got.consistency.ipfr == pytest.approx((0, 0.142857), abs=1e-6)
    # Last visits: client 0 had 1, 1 had .3, 2 had .6, 3 had .7.
    assert got.worst_last_visit == (0.3, "", 4)
    # Own visits: 0: .9 1 (C = 8/9); 3: .5 .7 (C = .6); 1 and 2 only fall and have none.
    assert got.consistency_per_client == (pytest.approx((8 / 9 + 0.6) / 2), "", 2)


def test_means_over_clients_and_over_samples():
    got = local_curves([{0: 90 / 100, 1: 1 / 2}], {0: 100, 1: 2})
    assert got.mean == pytest.approx((0.70,))
    assert got.over_samples == pytest.approx((0.8922,), abs=1e-4)
    assert got.clients == (2,)


def test_local_curves_without_some_or_all_local_tests():
    got = local_curves([{0: 0.5, 1: None, 2: 0.7}, {1: NAN}], {0: 10, 1: 0, 2: 10})
    assert got.mean == (pytest.approx(0.6), None)
    assert got.worst == (0.5, None)
    assert got.over_samples == (pytest.approx(0.6), None)
    assert got.clients == (2, 0)
    nobody = local_curves([{0: None}, {1: None}], {0: 0, 1: 0})
    assert nobody.mean == nobody.worst == nobody.over_samples == (None, None)
    assert nobody.worst_last_visit.value is None
    assert "local test" in nobody.worst_last_visit.reason
    assert local_curves([{0: 0.5}], {}).over_samples == (None,)


@pytest.mark.parametrize("case", cases("balance"))
def test_balance_golden(case):
    check(balance(case["inputs"]["avg_global"], case["inputs"]["avg_local"]).value, case, "balance")
    for pair in ((None, 0.5), (0.5, NAN)):
        assert balance(*pair).value is None
        assert balance(*pair).reason


@pytest.mark.parametrize("case", cases("over_seeds"))
def test_over_seeds_golden(case):
    got = over_seeds(case["inputs"]["values"])
    check(got.mean.value, case, "mean")
    check(got.std_sample.value, case, "std_sample")
    check(got.std_population.value, case, "std_population")
    one = over_seeds([0.5])
    assert (one.mean.value, one.std_sample.value, one.std_population.value) == (0.5, None, 0)
    assert "2" in one.std_sample.reason
    assert over_seeds([None]).mean.value is None


@given(st.lists(GAPPY, max_size=20), st.randoms())
def test_means_and_deviations_do_not_depend_on_the_order(values, random):
    shuffled = random.sample(values, len(values))
    assert mean(values) == mean(shuffled)
    assert std(values) == std(shuffled)
    assert over_seeds(values) == over_seeds(shuffled)
    kept = [v for v in values if v is not None]
    if kept:
        assert mean(values) == (pytest.approx(np.mean(kept)), "", len(kept))
        assert std(values).value == pytest.approx(np.std(kept), abs=1e-12)


def run_of(global_acc, sampled=None, on_local=None, local=None, n=None):
    rounds = len(global_acc)
    sampled = [[0]] * rounds if sampled is None else sampled
    on_local = [[0.5]] * rounds if on_local is None else on_local
    local = [dict.fromkeys(s, 0.5) for s in sampled] if local is None else local
    return Curves(global_acc, sampled, on_local, local, {0: 10} if n is None else n)


LOCAL = [{0: 0.9, 3: 0.5}, {1: 0.6, 2: 0.8}, {0: 1.0, 2: 0.6}, {3: 0.7, 1: 0.3}]
RUN = run_of(
    [0.2, 0.5, 0.4, 0.6], [list(r) for r in LOCAL], [[0.5] * 5] * 4, LOCAL, {0: 9, 1: 9, 2: 9, 3: 9, 4: 9}
)


def test_summary_of_a_run():
    got = summarise(RUN)
    assert list(got) == [*HEADLINES, "variants", "scores", "spread", "counts"]
    assert got["global_acc"] == {
        "mean": pytest.approx(0.425),
        "std_rounds": pytest.approx(np.std(RUN.global_acc)),
    }
    assert got["local_acc"] == {"mean": pytest.approx(0.675), "std_rounds": pytest.approx(0.10897, abs=1e-5)}
    assert got["worst_client_acc"]["mean"] == pytest.approx(0.5)
    assert got["balance"]["mean"] == pytest.approx((0.425 + 0.675) / 2)
    assert got["global_bwt"] == {"mean": 0, "std_rounds": 0}
    for name in ("global_consistency", "local_consistency", "balance"):
        assert got[name]["std_rounds"] is None
        assert "per run" in got[name]["std_rounds_reason"]
    assert got["variants"]["global_acc_final"] == {"value": 0.6}
    assert got["variants"]["global_acc_best"] == {"value": 0.6}
    assert got["variants"]["global_acc_last10"]["value"] == pytest.approx(0.425)
    assert got["variants"]["worst_over_all_clients_last_visit"] == {"value": 0.3}
    counts = got["counts"]
    assert (counts["rounds"], counts["clients_sampled"], counts["clients_with_local_test"]) == (4, 4, 5)
    assert counts["local_evaluations"] == 8
    assert counts["values"]["global_bwt"] == 3
    assert set(counts["values"]) == {*HEADLINES, *got["variants"]}


def test_last_ten_rounds():
    got = summarise(run_of([0.0] * 5 + [1.0] + [0.5] * 9))["variants"]
    assert got["global_acc_last10"]["value"] == pytest.approx(0.55)
    lost = summarise(run_of([0.5, None]))["variants"]
    assert lost["global_acc_final"] == {"value": None, "reason": "the last round has no value"}
    assert lost["global_acc_best"] == {"value": 0.5}


def test_only_sampled_clients_count_in_the_local_metrics():
    got = summarise(run_of([0.5], [[0]], [[0.5, 0.5]], [{0: 0.75, 1: 0.25}], {0: 10, 1: 10}))
    assert got["local_acc"]["mean"] == got["worst_client_acc"]["mean"] == 0.75
    assert got["counts"]["local_evaluations"] == 1


def test_rows_for_a_table():
    rows = per_round(RUN)
    assert len(rows) == 4
    assert list(rows[0]) == [
        "global_acc",
        "global_bwt",
        "local_acc",
        "local_acc_over_samples",
        "worst_client_acc",
    ]
    assert rows[0] == {
        "global_acc": 0.2,
        "global_bwt": None,
        "local_acc": pytest.approx(0.7),
        "local_acc_over_samples": pytest.approx(0.7),
        "worst_client_acc": 0.5,
    }
    assert per_round(run_of([NAN]))[0]["global_acc"] is None
    assert per_round(run_of([])) == []


def no_silent_null(value):
    """Every null in a summary stands beside its reason."""
    if not isinstance(value, dict):
        return True
    reasons = {k: "reason" if k in ("mean", "value") else f"{k}_reason" for k in value}
    return all(no_silent_null(v) and (v is not None or value.get(reasons[k])) for k, v in value.items())


def test_a_run_without_local_tests():
    got = summarise(run_of([0.5, 0.6], None, [[None]] * 2, [{0: None}] * 2, {0: 0}))
    for name in ("local_acc", "worst_client_acc", "local_consistency", "global_bwt", "balance"):
        assert got[name]["mean"] is None
        assert got[name]["reason"]
    assert got["global_acc"]["mean"] == pytest.approx(0.55)
    assert got["counts"]["local_evaluations"] == 0
    assert no_silent_null(got)


VALUES = st.one_of(SHARES, st.none(), st.sampled_from([NAN, math.inf, -math.inf]))


@st.composite
def runs(draw, rounds=None):
    rounds = draw(st.integers(0, 8)) if rounds is None else rounds
    sampled = [draw(st.lists(st.integers(0, 2), unique=True)) for _ in range(rounds)]
    on_local = [[draw(VALUES) for _ in range(3)] for _ in range(rounds)]
    local = [{k: draw(VALUES) for k in s} for s in sampled]
    acc = [draw(VALUES) for _ in range(rounds)]
    return Curves(acc, sampled, on_local, local, {k: draw(st.integers(0, 9)) for k in range(3)})


@given(runs())
def test_any_run_gives_strict_json_and_reasons(run):
    for result in (summarise(run), over_runs([run])):
        json.dumps(result, allow_nan=False)
        assert no_silent_null(result)
        assert all(name in result for name in HEADLINES)
    json.dumps(per_round(run), allow_nan=False)
    assert len(per_round(run)) == len(run.global_acc)


@given(st.integers(0, 5).flatmap(lambda t: st.lists(runs(t), min_size=1, max_size=3)))
def test_any_runs_can_be_averaged(many):
    result = over_runs(many)
    json.dumps(result, allow_nan=False)
    assert no_silent_null(result)
    back = over_runs(many[::-1])
    assert [back[h]["mean"] for h in HEADLINES] == [result[h]["mean"] for h in HEADLINES]


def test_over_runs():
    got = over_runs([run_of([0.2, 0.4]), run_of([0.4, 0.8]), run_of([0.6, 0.9])])
    curve = np.array([0.4, 0.7])
    assert got["global_acc"] == {
        "mean": pytest.approx(0.55),
        "std_seeds": pytest.approx(np.std([0.3, 0.6, 0.75], ddof=1)),
        "runs": 3,
        "std_rounds": pytest.approx(curve.std()),
    }
    assert got["global_consistency"]["std_rounds"] is None
    assert got["global_consistency"]["std_seeds"] is not None
    assert got["variants"]["global_acc_final"] == {
        "mean": pytest.approx(0.7),
        "std_seeds": pytest.approx(np.std([0.4, 0.8, 0.9], ddof=1)),
        "runs": 3,
    }
    assert got["counts"] == {"runs": 3, "rounds": 2}
    one = over_runs([run_of([0.2, 0.4])])["global_acc"]
    assert one["std_seeds"] is None
    assert "run at least 2" in one["std_seeds_reason"]


def test_a_run_without_a_value_is_left_out_of_the_mean_over_runs():
    got = over_runs([run_of([0.2]), run_of([None])])["global_acc"]
    assert (got["mean"], got["runs"]) == (0.2, 1)
    assert mean_curve([[0.2, None], [0.4, None]]) == (pytest.approx(0.3), None)


def test_refusals():
    with pytest.raises(InputError, match=r"same number of rounds, got \[1, 2\]"):
        over_runs([run_of([0.2]), run_of([0.2, 0.3])])
    with pytest.raises(InputError, match="no run"):
        over_runs([])
    with pytest.raises(ValueError, match="one length"):
        Curves([0.5], [], [], [], {})


def test_nothing_needs_more_than_numpy_types():
    assert averages.mean(np.array([0.25, 0.75])).value == 0.5
    assert type(averages.mean(np.array([0.25, 0.75])).value) is float
