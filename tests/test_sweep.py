"""Sweeps: every cell once and unbroken, whatever is killed; what is asked for and what is said."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fedkper import folders, run, runfiles
from fedkper.experiment import Experiment
from fedkper.run import Execution
from fedkper.sweep import grid, sweep
from fedkper.sweep.cells import Event
from fedkper.sweep.view import TimeLeft, duration
from terminal import TINY, children, fedkper, process, strict, typed, untimed, write_data

ROUNDS = 12
CELLS = ["--methods", "fedavg", "fedkper", "--seeds", 1, 2]
PLACES = [f"tiny_{method}_seed{seed}" for method in ("fedavg", "fedkper") for seed in (1, 2)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "tiny.npz")


@pytest.fixture(scope="module")
def base(tiny: Path) -> list[Any]:
    """The options of this file's runs, less what varies and --out."""
    at = TINY.index("--workers")
    return ["sweep", "--dataset", tiny, *TINY[:at], "--rounds", ROUNDS, "--lr", 0.05, "--jobs", 2]


@pytest.fixture(scope="module")
def whole(base: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods and two seeds, unbroken."""
    folder = tmp_path_factory.mktemp("whole") / "sweep"
    assert fedkper(*base, *CELLS, "--out", folder) == 0
    return folder


@pytest.fixture
def half(whole: Path, tmp_path: Path) -> Path:
    """A copy: the first cell is finished, the second lacks its summary, the others are not begun."""
    folder = tmp_path / "half"
    shutil.copytree(whole, folder)
    for place in PLACES[2:]:
        shutil.rmtree(folder / place)
    (folder / PLACES[1] / "summary.json").unlink()
    return folder


def results(folder: Path) -> dict[str, Any]:
    """All that must be equal in two sweeps of the same cells."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*/run.json")):
        cell = path.parent
        tables = [(cell / name).read_bytes() for name in ("summary.json", "clients.csv")]
        found[cell.name] = [strict(path)["experiment"], untimed(cell), *tables]
    return found


def rounds_in(folder: Path) -> int:
    return sum(max(0, p.read_bytes().count(b"\n") - 1) for p in folder.glob("*/rounds.csv"))


def wait_until(reached: Callable[[], bool], alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not reached() and alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers(parent: int) -> list[int]:
    """Worker processes: grandchildren, by way of the process that they are forked from."""
    return [pid for child in children(parent) for pid in children(child)]


# --- killed anywhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.long)])
def test_killed_at_any_moment_it_ends_with_the_same_table(
    base: list[Any], whole: Path, tmp_path: Path, kills: int
) -> None:
    folder, log, draw = tmp_path / "sweep", tmp_path / "log", random.Random(kills)
    reached = []
    for number in range(kills):
        child = process(log, *base, *CELLS, "--out", folder)
        if number % 2:  # while it checks, starts its workers or resumes
            child.join(draw.uniform(0.1, 2))
        else:
            aim = rounds_in(folder) + draw.randint(1, 8 if kills < 10 else 2)
            wait_until(lambda aim=aim: rounds_in(folder) >= aim, child.is_alive)  # type: ignore[misc]
            child.join(draw.uniform(0, 0.1))
        child.kill()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL), log.read_text()
        reached.append(rounds_in(folder))
    assert len({n for n in reached if 0 < n < 4 * ROUNDS}) >= 2, reached
    assert fedkper(*base, *CELLS, "--out", folder) == 0
    assert results(folder) == results(whole)
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "sweep.json", *PLACES]
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the workers in /proc, which this system lacks")
def test_a_killed_worker_costs_nothing(base: list[Any], whole: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "sweep", tmp_path / "log"
    child = process(log, *base, *CELLS, "--out", folder)
    wait_until(lambda: rounds_in(folder) >= 2, child.is_alive)
    assert child.pid is not None
    os.kill(workers(child.pid)[0], signal.SIGKILL)
    child.join(120)
    assert child.exitcode == 0, log.read_text()
    assert "ended with exit code -9 (out of memory?); it is tried again alone at the end" in log.read_text()
    assert results(folder) == results(whole)


def test_ctrl_c_ends_at_a_checkpoint_and_says_how_to_go_on(
    base: list[Any], whole: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "sweep", tmp_path / "log"
    program = [sys.executable, "-m", "fedkper.cli", *map(str, [*base, *CELLS, "--out", folder])]
    with open(log, "wb") as file:
        child = subprocess.Popen(program, stdout=file, stderr=file, start_new_session=True)
    wait_until(lambda: rounds_in(folder) >= 3, lambda: child.poll() is None)
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(60) == 130
    said = log.read_text()
    assert "stopping; a second Ctrl-C" in said
    assert f"Go on with:\n  fedkper sweep --grid {folder}/sweep.json\n" in said
    assert "Traceback" not in said
    for cell in folder.glob("tiny_*"):  # nothing was cut off: the tables hold what the checkpoint holds
        assert (cell / "summary.json").is_file()
    assert 3 <= rounds_in(folder) < 4 * ROUNDS
    assert fedkper("sweep", "--grid", folder / "sweep.json") == 0
    assert results(folder) == results(whole)


def test_what_is_finished_is_not_touched(
    base: list[Any], whole: Path, half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stamps(cell: Path) -> dict[str, tuple[int, int]]:
        return {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in [cell, *cell.rglob("*")]}

    before = stamps(half / PLACES[0])
    assert fedkper(*base, *CELLS, "--out", half) == 0
    assert "1 of 4 cells are finished already" in capsys.readouterr().err
    assert stamps(half / PLACES[0]) == before
    assert results(half) == results(whole)
    every = {cell: stamps(half / cell) for cell in PLACES}
    assert fedkper("sweep", "--grid", half / "sweep.json") == 0
    told = capsys.readouterr()
    assert "all 4 cells were finished already" in told.err
    assert "fedkper" in told.out
    assert {cell: stamps(half / cell) for cell in PLACES} == every


def test_more_seeds_and_more_rounds_go_on_in_the_same_folder(base: list[Any], half: Path) -> None:
    shutil.rmtree(half / PLACES[1])
    assert fedkper(*base, "--methods", "fedavg", "--seeds", 1, "--out", half) == 2, "cells would be lost"
    (half / "sweep.json").unlink()
    assert fedkper(*base, "--methods", "fedavg", "--seeds", 1, "--out", half) == 0
    assert (
        fedkper(*typed(base, "rounds", ROUNDS + 2), "--methods", "fedavg", "--seeds", 1, 2, "--out", half)
        == 0
    )
    assert [len(untimed(half / place).splitlines()) - 1 for place in PLACES[:2]] == [ROUNDS + 2] * 2
    assert fedkper(*base, "--methods", "fedavg", "--seeds", 1, 2, "--out", half) == 2, "rounds would be lost"


def test_a_single_value_becomes_several(base: list[Any], tmp_path: Path) -> None:
    """Names say what varies; what is there keeps the one that it has."""
    words = [*typed(base, "rounds", 1), "--method", "fedavg", "--out", tmp_path / "s"]
    assert fedkper(*words, "--vary", "momentum=0.5") == 0
    before = (tmp_path / "s/tiny_fedavg_seed1/rounds.csv").read_bytes()
    assert fedkper(*words, "--vary", "momentum=0.5,0.9") == 0
    assert sorted(p.parent.name for p in (tmp_path / "s").glob("*/summary.json")) == [
        "tiny_fedavg_momentum0.9_seed1",
        "tiny_fedavg_seed1",
    ]
    assert (tmp_path / "s/tiny_fedavg_seed1/rounds.csv").read_bytes() == before


def test_a_finished_run_that_was_cut_since_is_named(
    base: list[Any], whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "s")
    table = tmp_path / "s" / PLACES[0] / "rounds.csv"
    table.write_text("".join(line + "\n" for line in table.read_text().splitlines()[:5]))
    assert fedkper("sweep", "--grid", tmp_path / "s/sweep.json") in (1, 2)
    said = " ".join(capsys.readouterr().err.split())
    assert PLACES[0] in said
    assert "bring the file back, or start a new run" in said


def test_two_sweeps_in_one_folder(base: list[Any], half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with folders.locked(half):
        assert fedkper(*base, *CELLS, "--out", half) == 1
    assert f"{half}: another sweep runs in it" in capsys.readouterr().err
    assert not (half / PLACES[2]).exists()


# --- cells that fail -----------------------------------------------------------------------------------

FAILING = """
import os, signal
from dataclasses import dataclass
from fedkper.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Raises(FedAvg):
    def loss(self, *args):
        raise ValueError("no loss today")

@dataclass(frozen=True)
class Dies(FedAvg):
    def loss(self, *args):
        os.kill(os.getpid(), signal.SIGKILL)

@dataclass(frozen=True)
class Short(FedAvg):
    def loss(self, *args):
        raise MemoryError("too little")
"""


def test_a_cell_that_fails_leaves_the_others(
    base: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, folder = tmp_path / "mine.py", tmp_path / "sweep"
    mine.write_text(FAILING)
    methods = [f"{mine}:{name}" for name in ("Raises", "Dies", "Short")]
    asked = [*typed(base, "rounds", 2), "--methods", methods[0], "fedavg", *methods[1:], "--seeds", 1, 2]
    assert fedkper(*asked, "--out", folder) == 1
    told = capsys.readouterr()
    assert "6 of 8 cells failed" in told.err
    assert re.search(
        r"ValueError: no loss today \(mine.py:9\)\n    tiny_Raises_seed1\n    tiny_Raises_seed2", told.err
    )
    assert re.search(
        r"exit code -9 \(out of memory\?\)\n    tiny_Dies_seed1\n    tiny_Dies_seed2\n", told.err
    )
    assert "tiny_Short_seed1: MemoryError: too little (mine.py:19); it is tried again alone" in told.err
    assert f"go on with:\n  fedkper sweep --grid {folder}/sweep.json" in told.err
    assert "Traceback" not in told.err
    assert "fedavg" in told.out
    assert "Raises" not in told.out
    assert [sweep.finished(folder / f"tiny_{m}_seed1") for m in ("fedavg", "Raises", "Dies")] == [
        True,
        False,
        False,
    ]


def test_seeds_ride_together_where_there_are_lanes(base: list[Any], whole: Path, tmp_path: Path) -> None:
    """One worker has all seeds of a method; where they fail together, each is tried alone."""
    folder = tmp_path / "lanes"
    assert fedkper(*base, *CELLS, "--lanes", 8, "--out", folder) == 0
    for place in PLACES:
        ours, alone = (runfiles.read_curves(f / place) for f in (folder, whole))
        assert ours.sampled == alone.sampled
        assert ours.global_acc == pytest.approx(alone.global_acc, abs=0.1)  # a few images of a test set of 60
        assert json.loads((folder / place / "run.json").read_text())["execution"]["lanes"] == 8
    experiments = [run.stored_experiment(whole / place) for place in PLACES]
    events: list[Event] = []
    (folder / PLACES[1] / "checkpoint").rename(tmp_path / "away")
    longer = [dataclasses.replace(e, rounds=ROUNDS + 1) for e in experiments]
    cells = sweep.cells(longer)
    outcomes = sweep.run(cells, folder, Execution(lanes=8), 1, events.append)
    assert [o.state for o in outcomes] == ["finished", "failed", "finished", "finished"]
    assert {e.cell.place for e in events if e.kind == "again" and e.cell} == set(PLACES[:2])


def test_the_worker_of_a_killed_sweep_is_waited_for(half: Path, whole: Path) -> None:
    experiments = [run.stored_experiment(whole / place) for place in PLACES]
    told: list[Event] = []

    def release(event: Event) -> None:
        told.append(event)
        if event.kind == "begun" and event.cell and event.cell.place == PLACES[2]:
            lock.close()

    lock = folders.locked(half / PLACES[1])  # as the worker of a killed sweep holds it for a moment
    outcomes = sweep.run(sweep.cells(experiments), half, Execution(), 2, release)
    assert [outcome.state for outcome in outcomes] == ["finished"] * 4
    assert results(half) == results(whole)
    assert [event.kind for event in told if event.cell and event.cell.place == PLACES[0]] == ["skipped"]


# --- what is asked for ---------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


FIELDS = ("lr", "alpha", "seed")
GRID = """
[experiment]
clients = 5
lr = 1
[vary]
seed = [1, 2, 2]
partition = ["iid", "dirichlet"]
[[cells]]
method = "fedavg"
[[cells]]
method = "fedprox"
batch = 20
"""


def test_a_grid_in_a_file(here: Path) -> None:
    Path("grid.toml").write_text(GRID)
    read = grid.read(Path("grid.toml"))
    base = dataclasses.replace(Experiment(), clients=5, lr=1.0)
    assert read.base == {"clients": 5, "lr": 1.0}
    found = grid.experiments(base, read)
    expected = [
        dataclasses.replace(base, partition=partition, seed=seed, **cell)
        for partition in ("iid", "dirichlet")
        for seed in (1, 2)
        for cell in ({"method": "fedavg"}, {"method": "fedprox", "batch": 20})
    ]
    assert found == expected
    assert len(sweep.cells(found)) == 8


def test_the_example_of_the_documentation(here: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0]
    assert text
    Path("grid.toml").write_text(text)
    read = grid.read(Path("grid.toml"))
    found = grid.experiments(Experiment(**read.base), read)
    assert len({e.checked() for e in found}) == 12
    assert {e.rounds for e in found} == {50}


def test_presets_are_varied() -> None:
    vary = grid.words(["preset=paper-blood,paper-organs", "lr-decay=1,.5"])
    found = grid.experiments(Experiment(rounds=7), grid.Grid(vary))
    assert [(e.dataset, e.clients, e.lr_decay, e.rounds) for e in found] == [
        ("bloodmnist", 20, 1.0, 7),
        ("bloodmnist", 20, 0.5, 7),
        ("organsmnist", 50, 1.0, 7),
        ("organsmnist", 50, 0.5, 7),
    ]
    places = [cell.place for cell in sweep.cells(found)]
    assert places[0] == "bloodmnist_fedkper_clients20_lr_decay1_seed1"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("nosuch.toml", None, "cannot be read"),
        ("a.toml", "[vary", "not valid TOML"),
        ("a.toml", "a = " + "[" * 9999, "not valid TOML"),
        ("a.toml", b"\xff\xfe", "not a text in UTF-8"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[1]", "one JSON object"),
        ("a.toml", "vry = 1", "unknown key 'vry'; did you mean 'vary'?"),
        ("a.toml", "vary = 1", "vary must be a table"),
        ("a.toml", "[vary]\nlr = 1", "lr must be a list"),
        ("a.toml", "[vary]\nlr = []", "lr must be a list"),
        ("a.toml", "[vary]\nlr = ['x']", 'lr "x": must be a number'),
        ("a.toml", "[vary]\nlr = [[1]]", "lr must be one number or text, not a list"),
        ("a.toml", "[vary]\nlr = [2020-01-01]", "not a date"),
        ("a.toml", "[vary]\nclients = [1.5]", "clients 1.5: must be a whole number"),
        ("a.toml", "[vary]\nclients = [true]", "clients true: must be a whole number"),
        ("a.toml", "[vary]\nrounds = [0]", "--rounds 0: must be at least 1"),
        ("a.toml", "[vary]\nlr = [nan]", "--lr nan"),
        ("a.json", '{"vary": {"lr": [NaN]}}', "--lr nan"),
        ("a.toml", "[vary]\nrate = [1]", "unknown field 'rate'"),
        ("a.toml", "[vary]\npreset = ['paper-bloood']", "did you mean 'paper-blood'?"),
        ("a.toml", "[vary]\npartition = ['idd']", "partition 'idd': must be one of"),
        ("a.toml", "[vary]\nmethod = ['fedavgg']", "did you mean 'fedavg'?"),
        ("a.toml", "[experiment]\nalhpa = 1", "[experiment]: unknown field 'alhpa'; did you mean 'alpha'?"),
        ("a.toml", "experiment = 1", "[experiment]: must be a table"),
        ("a.toml", "cells = []", "cells must be a list of tables"),
        ("a.toml", "cells = [1]", "[[cells]] 1: must be a table"),
        ("a.toml", "[[cells]]\nlr = 'x'", "[[cells]] 1: lr"),
        ("a.toml", "[vary]\nlr = [1]\n[[cells]]\nlr = 2", "lr: is varied and set in [[cells]] too"),
        ("a.toml", "[experiment]\nlr = 1\n[vary]\nlr = [1]", "lr is in [experiment] and varied too"),
        ("a.toml", "[vary]\npreset = ['paper-blood']\nclients = [3]", "clients: is varied, and the presets"),
        ("a.toml", "data = 3", "data must be a path"),
        ("a.toml", "[vary]\ncolumn = ['site']\n", "--column site: has no effect"),
        ("a.toml", "[vary]\n" + "".join(f"{f} = {list(range(1, 31))}\n" for f in FIELDS), "27,000 cells"),
        ("a.toml", f"[experiment]\nrounds = {'9' * 5000}", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(
    name: str, text: Any, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    before = sorted(here.rglob("*"))
    assert fedkper("sweep", "--grid", name) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "nothing is varied"),
        ("--methods fedavg nosuch", "nosuch"),
        ("--methods fedavg --method fedavg", "--method: is varied too"),
        ("--vary lr", "must be FIELD=VALUE"),
        ("--vary", "its value is empty"),
        ("--vary lr=", "a value is empty"),
        ("--vary lr=1,,2", "a value is empty"),
        ("--vary rond=1,2", "unknown field 'rond'; did you mean 'rounds'?"),
        ("--vary lr=1,x", "--vary lr x: must be a number"),
        ("--vary lr=1,2 --vary lr=3", "--vary lr: given twice"),
        ("--vary method=fedavg,fedper", "name them with --methods"),
        ("--vary partition=iid,ii", "did you mean 'iid'?"),
        ("--vary lr=1,2 --lr 3", "--lr: is varied too"),
        ("--vary preset=paper-blood --clients 3", "--clients: is varied too"),
        ("--vary seed=1,2 --seeds 3", "--seeds and --vary seed: use one of them"),
        ("--vary lr=-1,.1", "--lr -1.0: must be at least 0"),
        ("--seeds 1 2 --workers 2", "--workers: a sweep runs each cell in one process"),
        ("--seeds 1 --jobs 0", "--jobs 0: must be at least 1"),
        ("--seeds 1 --resume", "--resume: no such option"),
        ("--datasets nosuch.npz nosuch", "nosuch.npz"),
        ("--vary alpha=.1,1 --min-size 5000", "--min-size"),
        ("--seeds 1 --partition iid --clients 3 --out CON", "CON"),
        ("--vary column=hospital partition=iid,column", "has no effect with --partition iid"),
    ],
)
def test_a_slip_of_the_pen(
    words: str, said: str, tiny: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = [] if "preset" in words or "datasets" in words else ["--dataset", tiny]
    assert fedkper("sweep", *words.split(), *data) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert not list(here.rglob("*"))


def test_all_that_is_wrong_is_said_at_once(
    base: list[Any], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = here / "bad.npz"
    bad.write_bytes(b"PK")
    dataset = base[base.index("--dataset") + 1]
    words = [w for w in base if w not in ("--dataset", dataset)]
    assert fedkper(*words, "--datasets", dataset, bad, "--vary", "momentum=0,2", "--seeds", 1, 2) == 2
    told = capsys.readouterr().err
    assert (
        "--momentum 2.0: must be at least 0 and at most 1 (cell tiny_fedkper_momentum2_seed1 and 3 more)"
        in told
    )
    assert "(cell bad_fedkper_momentum0_seed1 and 1 more)" in told
    assert not (here / "runs").exists()


def test_a_folder_with_something_else_in_it(
    base: list[Any], half: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*base, *CELLS, "--out"]
    assert fedkper(*asked, half / PLACES[0]) == 2
    assert "is the folder of a run" in capsys.readouterr().err
    (half / PLACES[2]).mkdir()
    (half / PLACES[2] / "thesis.txt").write_text("mine")
    assert fedkper(*asked, half) == 2
    assert "is not empty" in capsys.readouterr().err
    shutil.rmtree(half / PLACES[2])
    stored = strict(half / PLACES[1] / "run.json")
    stored["experiment"]["lr"] = 0.5
    (half / PLACES[1] / "run.json").write_text(json.dumps(stored))
    assert fedkper(*asked, half) == 2
    told = capsys.readouterr().err
    assert "--lr 0.05 (the run has 0.5)" in told
    assert f"(cell {PLACES[1]})" in told
    shutil.rmtree(half / PLACES[1])
    for damage in ("{", "[]", '{"experiment": {}, "cells": [1], "folders": ["a"]}', '{"cells": 3}'):
        (half / "sweep.json").write_text(damage)
        assert fedkper(*asked, half) == 2
        told = capsys.readouterr().err
        assert "sweep.json" in told
        assert "damaged" in told
    assert not (half / PLACES[2]).exists()


# --- names of folders ----------------------------------------------------------------------------------


def test_names_work_on_every_system() -> None:
    odd = [
        "fedavg",
        "FedAvg",
        "fedkper:cap=2",
        "./a/mine.py:Mine",
        "./b/mine.py:Mine",
        "./b/mine.py:mine",
        "über mut.py:Ü",
        "x.py:" + "N" * 250,
        "fedkper:" + ",".join(f"field{i}=1" for i in range(40)),
        "..",
        "a\udcffb.py:M",
    ]
    data = [
        "CON",
        "con.tar.npz",
        "nul.npz",
        "a/b:c*?.npz",
        "..npz",
        "é" * 300 + ".npz",
        "x/site.npz",
        "y/site.npz",
    ]
    base = Experiment()
    experiments = [
        dataclasses.replace(base, method=m, dataset=d, alpha=a, head=h, seed=s)
        for m, d in product(odd, data)
        for a, h, s in product((1e6, 1e-6, 0.1, 0.1000001), ("", "a b"), (0, 2**32 - 1))
    ]
    cells = sweep.cells([*experiments, *experiments])
    assert [cell.experiment for cell in cells] == experiments
    places = [cell.place for cell in cells]
    assert len({place.lower() for place in places}) == len(places)
    for place in places:
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,99}", place)
        assert place.strip(".") == place
        assert not re.fullmatch(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", place, re.IGNORECASE)


def test_names_say_what_varies_and_stay_when_more_is_asked_for() -> None:
    def named(methods: list[str], seeds: list[int]) -> dict[str, Experiment]:
        lists = {"method": methods, "seed": seeds, "lr": [0.1, 0.01], "sampling": ["official", "seeded"]}
        return {c.place: c.experiment for c in sweep.cells(grid.experiments(Experiment(), grid.Grid(lists)))}

    few, many = named(["fedavg"], [1]), named(["fedper", "fedavg"], [3, 1])
    assert next(iter(few)) == "synthetic_fedavg_lr0.1_sampling-official_seed1"
    assert len(many) == 16
    assert few.items() <= many.items()


# --- the time left -------------------------------------------------------------------------------------


def test_the_time_left_is_measured_not_guessed() -> None:
    base = Experiment(rounds=10)
    cells = sweep.cells(
        [dataclasses.replace(base, method=m, seed=s) for m in ("fedavg", "fedper") for s in (1, 2)]
    )
    a, b, c, d = cells
    now = [0.0]
    left = TimeLeft(cells, lambda: now[0])

    def at(second: float, kind: Any, cell: sweep.Cell | None, done: int = 0) -> float | None:
        now[0] = second
        left.add(Event(kind, cell, done))
        return left.seconds()

    assert at(0, "jobs", None, 2) is None
    at(0, "sent", a)
    at(0, "sent", b)
    at(5, "begun", a, 4)  # four rounds of an earlier sitting
    assert at(5, "begun", b, 0) is None, "rounds done before are no measure of speed"
    # 2 seconds a round: a has 5 left and b 10; then c comes after a, and d, the last, after b.
    assert at(7, "round", a, 5) == 10 * 2 + 10 * 2
    assert left.unmeasured() == ["fedper"]
    assert at(9, "round", b, 1) == pytest.approx(9 * 3 + 10 * 3), "two rounds took 6 seconds"
    at(19, "round", a, 10)
    pace = (20 + 4) / (6 + 1)  # a in all, with what loading took, and b's first round
    assert at(20, "finished", a, 10) == pytest.approx((9 + 10) * pace)
    at(20, "sent", c)
    at(21, "begun", c, 0)
    assert at(23, "round", c, 1) == pytest.approx(9 * 2 + 10 * 2), "fedper has a measure of its own now"
    assert left.unmeasured() == []
    assert at(24, "again", c) == pytest.approx(9 * 2 + 10 * 2)
    assert at(25, "failed", b) == pytest.approx(10 * 2), "c and d side by side"
    at(26, "finished", c)
    assert at(27, "skipped", d) == 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "5 s"),
        (42, "40 s"),
        (59, "1 min"),
        (3000, "50 min"),
        (3600 * 5 + 60, "5 h 1 min"),
        (86400 * 2.5, "2.5 days"),
    ],
)
def test_a_duration_is_as_exact_as_an_estimate(seconds: float, said: str) -> None:
    assert duration(seconds) == said
