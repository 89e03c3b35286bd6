"""What a long run needs stays bounded: memory, open files and processes, with many clients of own state.

Every case has a process of its own, which may hold 256 files open. It is looked at after chosen rounds,
together with its workers.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from federation import Small, run_site, site
from fedkper.methods import METHODS

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="measures through /proc")

CLIENTS, SAMPLED = 100, 10
OPEN_FILES = 256
# Bytes by which the memory of a run may differ between two looks: what allocators keep at hand, and the
# curves. A model that is held after every round makes 19 MB in 180 rounds, one after every visit 10 MB in 10.
SLACK = 6 << 20
_processes = multiprocessing.get_context("forkserver")


class Wide(Small):
    """A model of 0.1 MB, so that one that is held too long is seen."""

    def __init__(self) -> None:
        super().__init__(features=500)


class Look(NamedTuple):
    """A run after some rounds, all of its processes together."""

    memory: int
    """bytes that are no file and not shared"""
    files: int
    """open in the process that has most"""
    processes: int
    states: int
    """clients' files in the checkpoint"""
    images_once: bool
    """whether the images are one piece of memory in all processes"""


def look(folder: Path, images: int) -> Look:
    pids = [os.getpid(), *children()]
    status = [Path(f"/proc/{pid}/status").read_text().splitlines() for pid in pids]
    own = sum(int(line.split()[1]) << 10 for lines in status for line in lines if line.startswith("RssAnon"))
    files = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    states = len(list((folder / "checkpoint").glob("own-*")))
    return Look(own, files, len(pids), states, bool(set.intersection(*(mapped(pid, images) for pid in pids))))


def children() -> list[int]:
    """Every process whose parent is this one, whether multiprocessing knows of it or not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_bytes()
        except OSError:  # has ended meanwhile
            continue
        if parent == os.getpid() and b"resource_tracker" not in command:
            found.append(int(path.parent.name))
    return found


def mapped(pid: int, size: int) -> set[str]:
    """The files, by inode, of which a process maps `size` bytes or more and shares them."""
    rows = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    spans = ((row, [int(end, 16) for end in row[0].split("-")]) for row in rows if row[1].endswith("s"))
    return {row[4] for row, (start, end) in spans if end - start >= size}


def child(
    pipe: Connection, folder: Path, names: Sequence[str], rounds: Sequence[int], how: dict[str, int]
) -> None:
    """Runs each method; sends its looks after `rounds`, and how many processes are left at the end."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    for name in names:
        place = folder / name.partition(":")[0]
        settings: dict[str, Any] = {
            "fraction": SAMPLED / CLIENTS,
            "rounds": rounds[-1],
            "epochs": 1,
            "lr": 0.01,
        }
        federation = site(name, Wide, [4] * CLIENTS, 2, score_clients=SAMPLED, **settings)
        size, looks = federation.train_x.numel(), list[Look]()

        def note(done: int, _: Any, place: Path = place, size: int = size, looks: list[Look] = looks) -> None:
            if done in rounds:
                looks.append(look(place, size))

        run_site(federation, place, on_round=note, **how)
        pipe.send((name, looks, len(children())))
    pipe.close()


CASES: dict[str, tuple[tuple[str, ...], tuple[int, ...], dict[str, int]]] = {
    "long": (("ditto:epochs=1",), (20, 100, 200), {}),
    "pool": (("fedala",), (10, 20, 30), {"workers": 2}),
    "lanes": (("fedcurv",), (10, 20, 30), {"lanes": 4}),
    "the others": (("moon", "fedas", "fedper", "fedkd"), (6, 11, 16), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_needs_no_more_after_many_rounds(case: str, tmp_path: Path) -> None:
    names, rounds, how = CASES[case]
    ours, theirs = _processes.Pipe(duplex=False)
    process = _processes.Process(target=child, args=(theirs, tmp_path, names, rounds, how))
    process.start()
    theirs.close()
    for expected in names:
        name, (first, *later), left = ours.recv()
        assert name == expected
        assert left == 0, "a run leaves no process behind"
        assert first.processes == 1 + how.get("workers", 0)
        assert first.files < OPEN_FILES / 2
        assert first.images_once or not how.get("workers"), "every worker has images of its own"
        for look in later:
            assert look.memory - first.memory < SLACK, (
                f"{name}: {[one.memory >> 10 for one in (first, *later)]} kB"
            )
            assert look.files <= first.files + 2
            assert look.processes == first.processes
            # A client has its last state there, and what the checkpoint before needs too.
            assert look.states <= CLIENTS + SAMPLED
    process.join(60)
    assert process.exitcode == 0


def test_every_method_that_keeps_state_is_looked_at() -> None:
    federations = {name: site(name) for name in METHODS}
    keeping = {name for name, f in federations.items() if f.method.init(f.model, f.model.init())[1]}
    assert keeping == {name.partition(":")[0] for names, _, _ in CASES.values() for name in names}
