"""Every reference case of the specification is used by some test."""

import json
import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_operation_has_a_test() -> None:
    operations = {c["op"].split(" (")[0] for c in json.loads((HERE / "golden.json").read_text())["cases"]}
    used = {op for path in HERE.glob("test_*.py") for op in re.findall(r'cases\("(\w+)"\)', path.read_text())}
    assert used == operations
