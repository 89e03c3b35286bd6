"""Folders of runs: stopped anywhere, damaged, resumed, shared; always the numbers of an unbroken run."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from federation import run_site, site
from fedkper import folders, run
from fedkper.data import partition_file
from fedkper.errors import InputError
from fedkper.experiment import Experiment
from fedkper.metrics import NO_LOCAL
from fedkper.record import Record
from fedkper.run import Execution, Watch
from terminal import (
    TINY,
    children,
    column,
    fedkper,
    process,
    results,
    sampled,
    strict,
    typed,
    untimed,
    write_data,
)

ROUNDS = 40
LEARNING = ["--lr", 0.05, "--rounds", ROUNDS]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "tiny.npz")


@pytest.fixture(scope="module")
def command(tiny: Path) -> list[Any]:
    """The run of this file, less its --out."""
    return ["run", "--dataset", tiny, *TINY, *LEARNING]


@pytest.fixture(scope="module")
def whole(command: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That run, unbroken."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert fedkper(*command, "--out", folder) == 0
    assert len(set(column(folder, "rounds.csv", "global_acc"))) > 3, (
        "a run that learns nothing proves nothing"
    )
    return folder


@pytest.fixture
def half(command: list[Any], tmp_path: Path) -> Path:
    """The same after five rounds; the rest is left to --resume --rounds."""
    folder = tmp_path / "half"
    assert fedkper(*command[:-1], 5, "--out", folder) == 0
    return folder


def resume(folder: Path, *words: object) -> int:
    return fedkper("run", "--resume", folder, "--workers", 1, *words)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _rounds_in(folder: Path) -> int:
    """Complete lines of rounds.csv, while it is being written."""
    path = folder / "rounds.csv"
    return path.read_text().count("\n") - 1 if path.is_file() else 0


def _wait_for(folder: Path, rounds: int, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while _rounds_in(folder) < rounds and alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- stopped and resumed -------------------------------------------------------------------------------


def test_killed_at_any_moment_it_resumes_to_the_unbroken_run(
    command: list[Any], whole: Path, tmp_path: Path
) -> None:
    folder, log, draw = tmp_path / "run", tmp_path / "log", random.Random(1)
    process(log, "--version").join()  # the first process also loads the libraries
    reached = []
    for number in range(8):
        begun = (folder / "run.json").is_file()
        words = ["run", "--resume", folder] if begun else [*command, "--out", folder]
        child = process(log, *words, "--workers", 1) if begun else process(log, *words)
        if number % 2:  # while it starts, or soon after
            child.join(draw.uniform(0.1, 1.2))
        else:  # in the midst of the rounds
            _wait_for(folder, _rounds_in(folder) + 1, child.is_alive)
            child.join(draw.uniform(0, 0.1))
        child.kill()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL), log.read_text()
        reached.append(_rounds_in(folder))
    assert all(b >= a - 1 for a, b in pairwise(reached)), "no more than the round at hand is lost"
    assert len({t for t in reached if 0 < t < ROUNDS}) >= 2, reached
    if not (folder / "run.json").is_file():
        assert fedkper(*command, "--out", folder) == 0
    assert resume(folder) == 0
    assert results(folder) == results(whole)
    assert column(folder, "rounds.csv", "round") == [str(t) for t in range(1, ROUNDS + 1)]
    assert not [p for p in folder.rglob("*") if p.suffix == ".tmp"]


@pytest.mark.parametrize(
    "kept", ["", ".lock checkpoint rounds.csv", ".lock checkpoint clients.csv partition.json"]
)
def test_a_start_cut_short_can_be_started_again(kept: str, command: list[Any], half: Path) -> None:
    for path in list(half.iterdir()):
        if path.name == "checkpoint" and kept:
            shutil.rmtree(path)
            path.mkdir()
        if path.name == "rounds.csv" and kept:
            path.write_text(path.read_text().partition("\n")[0] + "\n")
        if path.name not in kept.split():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (half / "partition.json.99.tmp").touch()
    assert fedkper(*command[:-1], 1, "--out", half) == 0
    assert column(half, "rounds.csv", "round") == ["1"]
    assert not list(half.rglob("*.tmp"))


def test_more_rounds_extend_a_run_to_the_long_one(half: Path, whole: Path) -> None:
    assert resume(half, "--rounds", 7) == 0
    assert column(half, "rounds.csv", "round") == [str(t) for t in range(1, 8)]
    assert resume(half, "--rounds", ROUNDS) == 0
    assert results(half) == results(whole)
    assert strict(half / "run.json")["experiment"] == strict(whole / "run.json")["experiment"]
    resumed = [e for e in strict(half / "events.jsonl") if e["event"] == "resumed"]
    assert [(e["after_round"], e["rounds"]) for e in resumed] == [(5, 7), (7, ROUNDS)]


def test_a_finished_run_says_so_and_stays_as_it_is(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(half)
    for words in (["--resume", half], ["--resume", "--out", half], [f"--resume={half}"]):
        capsys.readouterr()
        assert fedkper("run", *words) == 0
        assert "finished already, 5 rounds" in capsys.readouterr().err
    assert contents(half) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr 0.5", "--lr 0.5 (the run has 0.05)"),
        ("--alpha 3", "--alpha 3.0 (the run has 1.0)"),
        ("--seed 2 --method fedavg", "--method fedavg (the run has fedkper); --seed 2 (the run has 1)"),
        ("--rounds 3", "--rounds 3: the run"),
        ("--preset paper-blood", "leave out --preset"),
        ("--config x.json", "leave out --config"),
        ("--partition-file x.json", "leave out --partition-file"),
        ("--device cuda:7", "--device cuda:7"),
    ],
)
def test_resuming_with_other_options_is_refused(
    words: str, said: str, half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(half)
    assert resume(half, *words.split()) == 2
    assert said in capsys.readouterr().err
    assert contents(half) == before


def test_resuming_with_other_data_is_refused(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--data, given at the start only, is remembered, from any working folder; other content is noticed."""
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)
    shutil.copy(tiny, tmp_path / "store" / "mine.npz")
    base = ["--dataset", "mine", *TINY, "--rounds", 2, "--data", "store", "--out", tmp_path / "r"]
    assert fedkper("run", *base) == 0
    monkeypatch.chdir(tmp_path / "store")
    assert resume(tmp_path / "r", "--rounds", 3) == 0
    write_data(tmp_path / "store" / "mine.npz", seed=7)
    before = contents(tmp_path / "r")
    capsys.readouterr()
    assert resume(tmp_path / "r", "--rounds", 4) == 2
    known = strict(tmp_path / "r" / "run.json")["data"]["hash"][:12]
    said = capsys.readouterr().err
    assert "mine holds other data" in said
    assert known in said
    assert contents(tmp_path / "r") == before


# --- damage --------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink])
@pytest.mark.parametrize("kind", ["shared-{:06d}.safetensors", "state-{:06d}.json"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    kind: str, damage: Callable[[Path], None], half: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(half / "checkpoint" / kind.format(5))
    capsys.readouterr()
    assert resume(half, "--rounds", 8) == 0
    said = capsys.readouterr().err
    if not (kind.startswith("state") and damage is Path.unlink):  # then it is as if killed before
        assert "00005" in said
        assert "went back to the checkpoint before" in said
    assert untimed(half) == "\n".join(untimed(whole).splitlines()[:9])
    assert column(half, "rounds.csv", "round") == [str(t) for t in range(1, 9)]


def test_two_damaged_checkpoints_are_refused(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _cut(half / "checkpoint" / "shared-000005.safetensors")
    _flip(half / "checkpoint" / "shared-000004.safetensors")
    before = contents(half)
    assert resume(half, "--rounds", 8) == 2
    said = capsys.readouterr().err
    assert "shared-000004.safetensors: damaged" in said
    assert "no other checkpoint is valid: start a new run" in said
    assert contents(half) == before


def test_without_checkpoints_the_curves_are_not_thrown_away(
    half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(half / "checkpoint")
    before = (half / "rounds.csv").read_bytes()
    assert resume(half, "--rounds", 8) == 2
    assert "no checkpoint is there" in capsys.readouterr().err
    assert (half / "rounds.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.json", b"{", "run.json: damaged, not valid JSON"),
        ("run.json", b"[]", "run.json: damaged, no JSON object"),
        ("run.json", b"{}", "run.json: damaged, it does not say what was run"),
        ("run.json", b'{"experiment": {"rouns": 1}}', "unknown key 'rouns'; did you mean 'rounds'?"),
        ("rounds.csv", b"", "rounds.csv: damaged, its first line"),
        ("rounds.csv", b"round,global_acc\n1,0.5\nx,0.5\n", "rounds.csv: damaged in line 3"),
        ("rounds.csv", b"round,global_acc\n1,0.5,0.5\n", "rounds.csv: damaged in line 2"),
        ("rounds.csv", b"round,global_acc\n1,nan\n", "rounds.csv: damaged in line 2"),
        ("rounds.csv", b"round\n1\n", "rounds.csv: damaged, its first line"),
        ("rounds.csv", b"round,global_acc,up_bytes\n1,0.5,many\n", "rounds.csv: damaged in line 2"),
        ("rounds.csv", None, "rounds.csv: cannot be read"),
        ("clients.csv", b"\xff\x00", "clients.csv: damaged"),
        ("clients.csv", None, "clients.csv: cannot be read"),
    ],
)
def test_a_damaged_folder_is_named(
    name: str, content: bytes | None, said: str, half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is None:
        (half / name).unlink()
    else:
        (half / name).write_bytes(content)
    for words in (["summary", half], ["run", "--resume", half, "--rounds", 6]):
        capsys.readouterr()
        assert fedkper(*words) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert said in err or (words[0] == "run" and f"{name}: damaged" in err)


def test_a_line_cut_short_is_dropped(half: Path, whole: Path) -> None:
    for name in ("rounds.csv", "clients.csv", "confusion.csv", "calibration.csv", "events.jsonl"):
        with open(half / name, "a") as file:
            file.write("6,0.5")
    with open(half / "rounds.csv") as file:
        assert file.read().endswith("6,0.5")
    assert resume(half, "--rounds", ROUNDS) == 0
    assert results(half) == results(whole)
    assert all(isinstance(event, dict) for event in strict(half / "events.jsonl"))


def test_a_full_disk(half: Path, whole: Path, tmp_path: Path) -> None:
    """Said in one sentence, with exit code 1; the run goes on from the old checkpoint."""
    log = tmp_path / "log"
    kept = contents(half / "checkpoint")
    child = process(log, "run", "--resume", half, "--rounds", ROUNDS, "--workers", 1, limit="full disk")
    child.join(60)
    said = log.read_text()
    assert child.exitcode == 1, said
    assert "Traceback" not in said
    assert f"error: {half / 'checkpoint'}: cannot be written (File too large)" in said
    assert f"fedkper run --resume {half}" in said
    assert contents(half / "checkpoint") == kept
    assert resume(half, "--rounds", ROUNDS) == 0
    assert results(half) == results(whole)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has other rights")
def test_a_folder_without_the_right_to_write(half: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:  # not below tmp_path, which is this user's alone
        folder = Path(name) / "run"
        shutil.copytree(half, folder)
        os.chmod(name, 0o755)
        os.chmod(folder / ".lock", 0o444)
        os.chmod(folder, 0o555)
        child = process(tmp_path / "log", "run", "--resume", folder, "--rounds", 9, limit="read-only")
        child.join(60)
        os.chmod(folder, 0o755)
        assert child.exitcode == 2
        assert (tmp_path / "log").read_text() == f"error: {folder}: cannot be written (Permission denied)\n"
        assert contents(folder) == contents(half)


def test_an_out_that_cannot_be_made(
    command: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert fedkper(*command, "--out", out) == 2
        assert f"--out {out}: cannot be made" in capsys.readouterr().err


# --- one folder a run ----------------------------------------------------------------------------------


def test_two_runs_of_the_same_second_have_a_folder_each(command: list[Any], tmp_path: Path) -> None:
    time.sleep(1.02 - time.time() % 1)  # both within one second
    children = [process(tmp_path / f"log{i}", *command, folder=tmp_path) for i in (1, 2)]
    for i, child in enumerate(children, 1):
        child.join(60)
        assert child.exitcode == 0, (tmp_path / f"log{i}").read_text()
    first, second = sorted((tmp_path / "runs").iterdir())
    assert results(first) == results(second)
    for folder in (first, second):
        assert len(column(folder, "rounds.csv", "round")) == ROUNDS
        assert re.fullmatch(r"tiny-fedkper-[0-9]{8}-[0-9]{6}(-2)?", folder.name)


def test_generated_names_are_distinct_and_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    names = ["x", "x", "x", "a/b:c*?é", "CON", "..", "", "y" * 400, "y" * 400]
    made = [folders.unique(tmp_path / "runs", name) for name in names]
    assert len(set(made)) == len(names)
    for folder in made:
        assert folder.parent == tmp_path / "runs"
        assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,97}[A-Za-z0-9]", folder.name)
        assert "20260101-000000" in folder.name


def test_a_folder_in_use_is_refused(
    command: list[Any], half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(half)
    assert fedkper(*command, "--out", half) == 2
    assert "holds a run already; go on with --resume" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    for name in ("notes.txt", "partition.json"):
        (tmp_path / "mine" / name).write_text("mine")
        assert fedkper(*command, "--out", tmp_path / "mine") == 2
        assert "is not empty" in capsys.readouterr().err
        assert contents(tmp_path / "mine") == {name: b"mine"}
        (tmp_path / "mine" / name).unlink()
    writer = Record.open(half)
    assert resume(half, "--rounds", 6) == 1
    assert "another process is writing this run" in capsys.readouterr().err
    writer.close()
    after = contents(half)
    assert after == before
    assert resume(half, "--rounds", 6) == 0


# --- signals -------------------------------------------------------------------------------------------


def _started(words: list[Any], log: Path, rounds: int) -> subprocess.Popen[bytes]:
    """A real program in a process group of its own, some rounds later."""
    out = Path(words[words.index("--out") + 1])
    program = [sys.executable, "-m", "fedkper.cli", *map(str, words)]
    with open(log, "wb") as file:
        # Another order of sets must not matter either.
        env = os.environ | {"PYTHONHASHSEED": "123"}
        child = subprocess.Popen(program, stdout=file, stderr=file, start_new_session=True, env=env)
    _wait_for(out, rounds, lambda: child.poll() is None)
    assert child.poll() is None, log.read_text()
    return child


def _nobody_left(group: int) -> bool:
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def _workers(parent: int) -> list[int]:
    return [pid for pid in children(parent) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the workers in /proc, which this system lacks")
def test_ctrl_c_and_a_killed_worker_leave_a_run_that_can_go_on(
    command: list[Any], whole: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    words = [*typed(command, "workers", 2), "--out", folder]
    child = _started(words, log, 3)
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(30) == 130
    assert _nobody_left(child.pid)
    said = log.read_text()
    assert f"Go on with:\n  fedkper run --resume {folder}\n" in said
    assert "Traceback" not in said
    done = len(column(folder, "rounds.csv", "round"))
    assert 3 <= done < ROUNDS - 5

    child = _started(["run", "--resume", "--out", folder, "--workers", 2], log, done + 3)
    os.kill(_workers(child.pid)[0], signal.SIGKILL)
    assert child.wait(30) == 1
    assert _nobody_left(child.pid)
    said = log.read_text()
    assert "ended with exit code -9" in said
    assert "try fewer --workers" in said
    assert f"fedkper run --resume {folder}" in said
    assert "Traceback" not in said
    assert resume(folder) == 0
    assert results(folder) == results(whole)


# --- reproducible, whatever the order of execution -----------------------------------------------------


def test_drawing_between_the_rounds_changes_nothing(whole: Path, tmp_path: Path) -> None:
    experiment = run.stored_experiment(whole)
    watch = Watch(on_round=lambda round, line: torch.rand(round))
    torch.manual_seed(99)
    run.start(experiment, tmp_path / "drawn", Execution(workers=1), watch=watch)
    assert results(tmp_path / "drawn") == results(whole)


def test_partition_and_clients_depend_on_their_seeds_only(command: list[Any], tmp_path: Path) -> None:
    base = typed(typed(command, "epochs", 0), "rounds", 12)

    def of(name: str, *words: object) -> tuple[str, list[list[int]]]:
        folder = tmp_path / name
        assert fedkper(*base, *words, "--out", folder) == 0
        partition = partition_file.load(folder / "partition.json").hash
        assert partition == strict(folder / "run.json")["partition"]["hash"]
        return partition, sampled(folder)

    first = of("fedkper")
    assert of("fedavg", "--method", "fedavg") == first
    assert of("seed", "--seed", 2) == first, "the official schedule is the same for every seed"
    seeded = [of(f"seeded{s}", "--sampling", "seeded", "--seed", s) for s in (1, 2)]
    assert of("again", "--sampling", "seeded", "--method", "fedavg") == seeded[0]
    assert seeded[0][1] != seeded[1][1]
    assert seeded[0][1] != first[1]
    assert seeded[0][0] == first[0]
    other = of("partition", "--partition-seed", 2)
    assert other[0] != first[0]
    assert other[1] == first[1]


# --- who takes part ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "clients", "expected"),
    [(0.1, 5, 1), (0.1, 20, 2), (0.1, 30, 3), (0.1, 50, 5), (0.29, 100, 29), (1.0, 7, 7), (0.05, 30, 1)],
)
def test_clients_of_a_round(fraction: float, clients: int, expected: int, tiny: Path, tmp_path: Path) -> None:
    words = ["--clients", clients, "--fraction", fraction, "--partition", "iid", "--min-size", 1]
    idle = ["--epochs", 0, "--rounds", 4, "--workers", 1, "--method", "fedavg"]
    assert fedkper("run", "--dataset", tiny, *words, *idle, "--out", tmp_path / "r") == 0
    rounds = sampled(tmp_path / "r")
    assert [len(drawn) for drawn in rounds] == [expected] * 4
    for drawn in rounds:
        assert len(set(drawn)) == expected
        assert set(drawn) <= set(range(clients))
    assert len({tuple(drawn) for drawn in rounds}) > 1 or expected == clients


def test_everyone_is_seen_over_many_rounds(tmp_path: Path) -> None:
    """With 2 of 20 in 120 rounds, a fair draw leaves someone out with a probability below 1e-4."""
    federation = site(sizes=(2,) * 20, test=1, fraction=0.1, epochs=0, rounds=120)
    run_site(federation, tmp_path / "r")
    rounds = sampled(tmp_path / "r")
    assert {k for drawn in rounds for k in drawn} == set(range(20))
    assert all(len(set(drawn)) == 2 for drawn in rounds)


def test_without_epochs_nothing_is_trained(tiny: Path, tmp_path: Path) -> None:
    words = ["--epochs", 0, "--rounds", 3, "--method", "fedavg", "--out", tmp_path / "r"]
    assert fedkper("run", "--dataset", tiny, *typed(list(TINY), "epochs", 0)[:-2], *words[2:]) == 0
    assert len(set(column(tmp_path / "r", "rounds.csv", "global_acc"))) == 1


# --- what is written -----------------------------------------------------------------------------------


def test_local_results_are_null_without_local_test_samples(tmp_path: Path) -> None:
    summary = run_site(site(test=0), tmp_path / "r")
    assert summary == strict(tmp_path / "r" / "summary.json")
    assert summary["local_acc"] == {
        "mean": None,
        "reason": NO_LOCAL,
        "std_rounds": None,
        "std_rounds_reason": "no round has a value",
    }
    assert summary["global_acc"]["mean"] > 0
    header, first, *_ = (tmp_path / "r" / "rounds.csv").read_text().splitlines()
    line = dict(zip(header.split(","), first.split(","), strict=True))
    for name in ("global_bwt", "local_acc", "local_acc_over_samples", "worst_client_acc"):
        assert line[name] == ""
    assert float(line["global_acc"]) > 0


def test_the_record_of_a_run_is_complete(whole: Path) -> None:
    told = strict(whole / "run.json")
    assert told["experiment"]["rounds"] == ROUNDS
    assert Experiment(**told["experiment"]) == run.stored_experiment(whole)
    assert told["method"] == {"name": "FedKPer"} | {
        k: told["method"][k] for k in told["method"] if k != "name"
    }
    assert told["data"]["train"] == 240
    assert told["execution"] == {"data": None, "folder": None, "device": "cpu", "workers": 1, "lanes": None}
    assert told["files"] == {}
    assert set(told["versions"]) >= {"fedkper", "python", "torch", "numpy"}
    files = {p.name for p in whole.iterdir()}
    written = {
        "run.json",
        "partition.json",
        "rounds.csv",
        "clients.csv",
        "confusion.csv",
        "calibration.csv",
        "summary.json",
        "checkpoint",
        ".lock",
    }
    assert written <= files <= written | {"events.jsonl"}
    kept = sorted(p.name for p in (whole / "checkpoint").iterdir())
    both = (ROUNDS - 1, ROUNDS)
    assert kept == [f"shared-{t:06d}.safetensors" for t in both] + [f"state-{t:06d}.json" for t in both]
    for path in [*whole.rglob("*.json"), *whole.glob("*.jsonl")]:
        strict(path)
    assert "nan" not in (whole / "rounds.csv").read_text().lower()


def test_a_folder_that_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no run"):
        Record.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- what a run was made of ----------------------------------------------------------------------------

OWN = """
from dataclasses import dataclass
from torch import nn
from fedkper.method import Method

@dataclass(frozen=True)
class Mine(Method):
    strength: float = 1

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.head = nn.Linear(shape[0] * shape[1] * shape[2], classes)

    def forward(self, x):
        return self.head(x.flatten(1))
"""


@pytest.mark.parametrize("edited", ["own.py", "net.py"])
def test_an_edited_file_of_the_users_is_noticed(
    edited: str, command: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("own.py", "net.py"):
        (tmp_path / name).write_text(OWN)
    own = ["--method", f"{tmp_path / 'own.py'}:Mine", "--model", f"{tmp_path / 'net.py'}:Net"]
    folder = tmp_path / "r"
    assert fedkper(*command[:-1], 2, *own, "--out", folder) == 0
    digest = hashlib.sha256(OWN.encode()).hexdigest()
    assert strict(folder / "run.json")["files"] == {"own.py": digest, "net.py": digest}
    assert resume(folder, "--rounds", 3) == 0
    (tmp_path / edited).write_text(OWN.replace("= 1", "= 2"))
    before = contents(folder)
    capsys.readouterr()
    assert resume(folder, "--rounds", 4) == 2
    said = capsys.readouterr().err
    assert f"{edited} was changed" in said
    assert contents(folder) == before
    (tmp_path / edited).write_text(OWN)
    assert resume(folder, "--rounds", 4) == 0


def test_a_relative_data_file_is_found_from_another_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a" / "sub").mkdir(parents=True)
    shutil.copy(tiny, tmp_path / "a" / "sub" / "x.npz")
    monkeypatch.chdir(tmp_path / "a")
    assert fedkper("run", "--dataset", "./sub/x.npz", *TINY, "--rounds", 1, "--out", tmp_path / "r") == 0
    monkeypatch.chdir(tmp_path)
    assert resume(tmp_path / "r", "--rounds", 2) == 0
    write_data(tmp_path / "a" / "sub" / "x.npz", seed=7)
    capsys.readouterr()
    assert resume(tmp_path / "r", "--rounds", 3) == 2
    assert "holds other data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "name", "value"),
    [
        ("clients.csv", "client", "x"),
        ("clients.csv", "client", "-1"),
        ("clients.csv", "client", "5"),
        ("clients.csv", "client", "9" * 12),
        ("clients.csv", "client", "9" * 5000),
        ("clients.csv", "test_samples", "1e9"),
        ("clients.csv", "test_samples", "9" * 30),
        ("clients.csv", "sampled", "2"),
        ("clients.csv", "global_on_local_acc", "1.5"),
        ("clients.csv", "local_acc", "inf"),
        ("clients.csv", "round", "9" * 5000),
        ("rounds.csv", "round", "9" * 5000),
        ("rounds.csv", "round", "4"),
        ("rounds.csv", "global_acc", "nan"),
        ("rounds.csv", "local_acc", "x"),
    ],
)
def test_a_damaged_cell_is_named(
    table: str, name: str, value: str, half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line.split(",") for line in (half / table).read_text().splitlines()]
    lines[3][lines[0].index(name)] = value
    (half / table).write_text("".join(",".join(line) + "\n" for line in lines))
    before = contents(half)
    for words in (["summary", half], ["run", "--resume", half, "--rounds", 6]):
        capsys.readouterr()
        assert fedkper(*words) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {half / table}: damaged in line 4")
        assert len(err) < 400
    assert contents(half) == before
