"""Curves in TensorBoard while a run goes on. The only file that imports it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedkper.errors import InputError, RunError
from fedkper.simulate import OnRound

# TensorBoard shows what stands before the "/" as a group; all but these columns of rounds.csv are scores.
GROUPS = ("seconds", "bytes")


def checked(folder: Path) -> Path:
    """The folder, absolute. Raises InputError if it is a file, or if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise InputError("--track: needs the extra: pip install 'fedkper[track]'")
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise InputError(f"--track {folder}: is a file; name a folder")
    return folder.absolute()


def place(folder: Path, run: Path) -> Path:
    """Where below `folder` a run's curves are: two parts of its path, to tell those of a comparison apart."""
    return folder.joinpath(*run.resolve().parts[1:][-2:])


@contextmanager
def tracked(on_round: OnRound, folder: Path | None, run: Path) -> Iterator[OnRound]:
    """`on_round`, which also writes the numbers of a round for TensorBoard; as it is where `folder` is None.

    A resumed run may do rounds again that are there already: points from its first round on are declared
    void, so that none is shown twice. Raises RunError if a file cannot be written.
    """
    if folder is None:
        yield on_round
        return
    from torch.utils.tensorboard import SummaryWriter

    there, writer = place(folder, run), None

    def written(round: int, line: dict[str, Any]) -> None:
        nonlocal writer
        on_round(round, line)
        try:
            if writer is None:
                writer = SummaryWriter(str(there), purge_step=round)
            for name, value in line.items():
                if name != "round" and value is not None:
                    group = next((g for g in GROUPS if name.endswith(g)), "scores")
                    writer.add_scalar(f"{group}/{name}", value, round)
            writer.flush()
        except OSError as error:
            raise RunError(f"--track {there}: cannot be written ({error.strerror})") from error

    try:
        yield written
    finally:
        if writer is not None:
            writer.close()
