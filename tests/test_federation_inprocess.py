"""A federation of coordinator and hospitals gives the simulator's numbers, method by method."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkper.methods import METHODS
from hospitals import federation_of, rehearsal, require_simulated, write_small
from terminal import strict


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_simulators_numbers(method: str, data: Path, tmp_path: Path) -> None:
    federation = federation_of(data, method=method)
    here = rehearsal(tmp_path / "federation", federation)
    here.run()
    real, simulated = tmp_path / "federation" / "run", tmp_path / "simulated"
    require_simulated(real, federation.experiment, simulated)
    assert strict(real / "summary.json")["balance"] == strict(simulated / "summary.json")["balance"]
