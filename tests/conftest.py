"""What tests share: real data where it is, small federations, one thread."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fedkper.execute import settle

settle()
os.environ["COLUMNS"] = "200"
# A shell that starts the tests in the background ignores Ctrl-C, which the programs tested would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder with the real data sets; tests that need it are skipped, and say so, where it is missing."""
    folder = Path(os.environ.get("FEDKPER_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not (folder / "medmnist" / "bloodmnist.npz").is_file():
        pytest.skip(f"no real data in {folder}: set FEDKPER_DATA")
    return folder
