"""A stored run of every method: whoever changes code without meaning to change numbers is told.

`python tests/test_reference.py` stores the present numbers, which is right only where a change is meant.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest

from federation import run_site, site
from fedkper import runfiles, tree
from fedkper.methods import METHODS

STORED = Path(__file__).with_name("reference.json")


def numbers(name: str, folder: Path) -> dict[str, list[float]]:
    """Of four rounds of five small clients: accuracies by round, and the norm of each leaf that is shared."""
    run_site(site(name, rounds=4), folder)
    curves = runfiles.read_curves(folder)
    shared = tree.load(max((folder / "checkpoint").glob("shared-*")))
    local = [math.fsum(v or 0 for v in row.values()) for row in curves.local_acc]
    norms = [float(leaf.double().norm()) for leaf in shared.values()]
    return {"global_acc": [v or 0 for v in curves.global_acc], "local_acc": local, "norms": norms}


@pytest.mark.parametrize("name", METHODS)
def test_numbers_are_those_of_the_stored_run(name: str, tmp_path: Path) -> None:
    stored, found = json.loads(STORED.read_text())[name], numbers(name, tmp_path / "run")
    # Another processor rounds otherwise, which may turn an image of 30; a change of a method turns more.
    assert found["norms"] == pytest.approx(stored["norms"], rel=1e-5)
    for curve in ("global_acc", "local_acc"):
        assert found[curve] == pytest.approx(stored[curve], abs=0.05)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        found = {name: numbers(name, Path(place) / name) for name in METHODS}
    STORED.write_text(json.dumps(found, indent=1) + "\n")
