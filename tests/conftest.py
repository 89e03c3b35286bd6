"""What tests share: real data where it is, small federations, one thread."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from fedkper.execute import settle

settle()
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
os.environ["COLUMNS"] = "200"
# A shell that starts the tests in the background ignores Ctrl-C, which the programs tested would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real() -> Callable[[str], Path]:
    """The folder of real data, by a set in it; a test that needs one is skipped, and says so, without it."""
    folder = Path(os.environ.get("FEDKPER_DATA") or Path(__file__).parents[2] / "shared" / "data")

    def holding(name: str) -> Path:
        file = folder / "medmnist" / f"{name}.npz"
        if not file.is_file():
            pytest.skip(f"no {file}: set FEDKPER_DATA to a folder that has it")
        return folder

    return holding
