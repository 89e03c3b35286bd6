"""Reference values of the specification (golden.json), as parameters for pytest."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_CASES = json.loads(Path(__file__).with_name("golden.json").read_text())["cases"]


def _with_nan(value: Any) -> Any:
    """JSON has no NaN, so the file writes the string "nan" for a NaN input."""
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return float("nan") if value == "nan" else value


def cases(op: str) -> list[Any]:
    """The cases of one operation; an op may carry a remark in brackets, as in "fedkd_rank (per energy)"."""
    found = [case for case in _CASES if case["op"].split(" (")[0] == op]
    assert found, f"golden.json has no case of {op}"
    return [pytest.param({**case, "inputs": _with_nan(case["inputs"])}, id=case["id"]) for case in found]


def check(got: Any, case: Any, key: str, dtype: str = "float64") -> None:
    """Compares one result with case["expected"][key] under the file's tolerance for `dtype`."""
    expected, tol = case["expected"][key], case["tol"][dtype]
    if expected is None:
        assert got is None, key
    else:
        np.testing.assert_allclose(got, expected, rtol=tol["rtol"], atol=tol["atol"], err_msg=key)
