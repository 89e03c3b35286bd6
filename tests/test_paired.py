"""Paired comparison of methods."""

from __future__ import annotations

import numpy as np
import pytest

from fedkper.paired import difference


def test_one_pair_has_no_interval() -> None:
    found = difference([{0: 0.8}], [{0: 0.5}])
    assert found is not None
    assert found.mean == pytest.approx(0.3)
    assert found.low is found.high is None


def test_only_pairs_count() -> None:
    found = difference([{0: 0.8, 1: 0.1}, {1: 0.5}], [{0: 0.5, 2: 0.9}, {1: 0.4}])
    assert found is not None
    assert found.mean == pytest.approx((0.3 + 0.1) / 2)
    assert (found.seeds, found.clients) == (2, 2)
    assert difference([{0: 0.8}], [{1: 0.8}]) is None
    with pytest.raises(ValueError, match="zip"):
        difference([{0: 0.8}], [])


def test_the_interval_covers_the_truth() -> None:
    """Paired noise cancels: 0.05 between methods is clear although clients differ by 0.2."""
    draw = np.random.default_rng(3)
    covered, clear = 0, 0
    for _ in range(60):
        level = draw.normal(0.7, 0.2, 20)
        first = [dict(enumerate(level + 0.05 + draw.normal(0, 0.03, 20))) for _ in range(3)]
        second = [dict(enumerate(level + draw.normal(0, 0.03, 20))) for _ in range(3)]
        found = difference(first, second)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.05 <= found.high
        clear += found.low > 0
    assert covered >= 50  # 57 of 60 expected
    assert clear == 60


def test_the_same_again() -> None:
    first, second = [{0: 0.4, 1: 0.6}, {0: 0.5, 1: 0.9}], [{0: 0.3, 1: 0.6}, {0: 0.6, 1: 0.7}]
    assert difference(first, second) == difference(first, second)
    forth, back = difference(first, second), difference(second, first)
    assert forth is not None
    assert back is not None
    assert forth.low == pytest.approx(-back.high)  # type: ignore[operator]
