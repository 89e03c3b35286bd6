"""The command line as a user types it: what is obeyed, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkper import options, run, tables
from fedkper.cli_data import COMMANDS as DATA_COMMANDS
from fedkper.cli_export import COMMANDS as EXPORT_COMMANDS
from fedkper.cli_report import COMMANDS as REPORT_COMMANDS
from fedkper.cli_run import COMMANDS, Run
from fedkper.cli_sweep import COMMANDS as SWEEP_COMMANDS
from fedkper.data import partition_file
from fedkper.errors import InputError
from fedkper.experiment import Experiment
from fedkper.losses import entropy
from fedkper.methods import parse
from terminal import TINY, column, fedkper, results, strict, typed, untimed, write_data


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "tiny.npz")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables.out, "_width", 80)
    monkeypatch.setattr(tables.err, "_width", 80)
    return tmp_path


@pytest.fixture
def refused(here: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Types a command that must be refused: one message, exit code 2, nothing left behind. -> the message"""
    before = sorted(here.rglob("*"))

    def type_it(*words: object, naming: str) -> str:
        assert fedkper(*words) == 2, words
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: ")
        assert said.err.count("\n") == 1, said.err
        assert naming in said.err
        return said.err

    yield type_it
    assert sorted(here.rglob("*")) == before


def stored(folder: Path) -> dict[str, Any]:
    return strict(folder / "run.json")["experiment"]  # type: ignore[no-any-return]


# --- every option --------------------------------------------------------------------------------------

RUN = [
    "--method",
    "--dataset",
    "--size",
    "--model",
    "--head",
    "--clients",
    "--fraction",
    "--rounds",
    "--epochs",
    "--batch",
    "--lr",
    "--lr-decay",
    "--momentum",
    "--weight-decay",
    "--grad-clip",
    "--partition",
    "--alpha",
    "--min-size",
    "--classes-per-client",
    "--column",
    "--split",
    "--partition-seed",
    "--sampling",
    "--score-clients",
    "--precision",
    "--seed",
    "--data",
    "--workers",
    "--device",
    "--lanes",
    "--partition-file",
    "--out",
    "--preset",
    "--config",
    "--track",
]
OPTIONS = {
    "run": [*RUN, "--resume"],
    "compare": [*RUN, "--methods", "--seeds"],
    "sweep": [*RUN, "--methods", "--datasets", "--seeds", "--vary", "--grid", "--jobs", "--ray"],
    "summary": ["RUNS"],
    "report": ["RUNS", "--out", "--data"],
    "export": ["RUNS", "--curves", "--model", "--client", "--format", "--data"],
    "predict": ["MODEL", "IMAGES", "--out", "--resize"],
    "data list": ["--data"],
    "data get": ["NAME", "--size", "--data"],
    "data show": ["NAME", "--size", "--data"],
    "data split": RUN,
}


def test_the_options_of_every_command() -> None:
    """Scripts rely on these: whoever changes the list breaks them, and must mean it."""
    found = {}
    for name, command in {
        **COMMANDS,
        **SWEEP_COMMANDS,
        **EXPORT_COMMANDS,
        **REPORT_COMMANDS,
        **{f"data {n}": c for n, c in DATA_COMMANDS.items()},
    }.items():
        fields = dataclasses.fields(command)
        found[name] = [
            f.name.upper() if f.default is dataclasses.MISSING else "--" + f.name.replace("_", "-")
            for f in fields
        ]
    assert found == OPTIONS


GOOD: dict[str, list[Any]] = {
    "method": ["fedavg", "fedkper:cap=2,distillation=no"],
    "size": [28],
    "model": ["cnn"],
    "head": ["head", "fc"],
    "clients": [1, 7],
    "fraction": [0.29, 1.0],
    "rounds": [1, 3],
    "epochs": [0, 2],
    "batch": [1, 500],
    "lr": [0.0, 0.25],
    "lr_decay": [1.0, 0.5],
    "momentum": [0.0, 0.5],
    "weight_decay": [0.0, 0.125],
    "grad_clip": [0.0, 5.0],
    "partition": ["iid", "dirichlet", "pathological"],
    "alpha": [0.5, 1000.0],
    "min_size": [1, 3],
    "classes_per_client": [1, 3],
    "column": ["site"],
    "split": ["official", "stratified"],
    "partition_seed": [0, 2**32 - 1],
    "sampling": ["official", "seeded"],
    "score_clients": [0, 3],
    "precision": ["float32", "bf16"],
    "seed": [0, 2**32 - 1],
}
# Options that have no effect without another.
NEEDS: dict[str, dict[str, Any]] = {
    "column": {"partition": "column", "clients": 4},
    "classes_per_client": {"partition": "pathological"},
}
WORDS = ["", " ", "words"]
INT = [*WORDS, "1.5", "nan", "inf", "-3", "1e3", "9" * 400]
FLOAT = [*WORDS, "nan", "inf", "-inf", "-0.5", "1e999"]
BAD: dict[str, list[str]] = {
    "score_clients": [*INT, "1000001"],
    "precision": [*WORDS, "fp32", "tf32"],
    "head": ["nosuch", "."],
    "method": [*WORDS, "fedkper:cap", "fedkper:cpa=1", "fedkper:cap=-1", "nosuch.py:Method"],
    "dataset": [*WORDS, "nosuch.npz"],
    "size": [*INT, "0", "7", "1025"],
    "model": WORDS,
    "clients": [*INT, "0", "1000001"],
    "fraction": [*FLOAT, "0", "1.5"],
    "rounds": [*INT, "0", "1000001"],
    "epochs": [*INT, "10001"],
    "batch": [*INT, "0"],
    "lr": FLOAT,
    "lr_decay": [*FLOAT, "0", "1.5"],
    "momentum": [*FLOAT, "1.5"],
    "weight_decay": FLOAT,
    "grad_clip": FLOAT,
    "partition": WORDS,
    "alpha": [*FLOAT, "0", "-1", "1e7"],
    "min_size": [*INT, "0"],
    "classes_per_client": [*INT, "0"],
    "column": ["", " "],
    "split": WORDS,
    "partition_seed": [*INT, "4294967296"],
    "sampling": WORDS,
    "seed": [*INT, "4294967296"],
    "workers": [*INT, "0", "1025", "None"],
    "lanes": [*INT, "0", "100001", "None"],
    "device": [*WORDS, "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "cuda:7777"],
    "data": [""],
    "partition_file": ["", "nosuch.json"],
    "out": ["", "a/b:c*?", "x" * 250, "x" * 400, "CON", "nul.txt", "..", "dot.", ".hidden", "two words"],
    "preset": WORDS,
    "config": ["", "nosuch.json"],
    "track": ["", __file__],
}
FAST = [
    "--clients",
    "3",
    "--rounds",
    "1",
    "--epochs",
    "0",
    "--batch",
    "64",
    "--workers",
    "1",
    "--partition",
    "iid",
    "--min-size",
    "1",
]


def test_every_option_is_in_both_tables() -> None:
    assert {"--" + name.replace("_", "-") for name in BAD} == set(RUN)
    assert {*GOOD, "dataset"} == {f.name for f in dataclasses.fields(Experiment)}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_value_is_stored_as_given(name: str, tiny: Path, here: Path) -> None:
    for number, value in enumerate(GOOD[name]):
        base = ["run", "--dataset", str(tiny), *FAST]
        needs = NEEDS.get(name, {})
        for option, needed in needs.items():
            base = typed(base, option, needed)
        folder = here / f"{number}"
        assert fedkper(*typed(base, name, value, equals=bool(number % 2)), "--out", folder) == 0
        assert stored(folder)[name] == value
        assert type(stored(folder)[name]) is type(value)
        expected = dataclasses.replace(
            Experiment(),
            dataset=str(tiny),
            clients=3,
            rounds=1,
            epochs=0,
            batch=64,
            partition="iid",
            min_size=1,
        )
        assert stored(folder) == dataclasses.asdict(expected) | needs | {name: value}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_by_name(name: str, tiny: Path, refused: Any) -> None:
    for number, value in enumerate(BAD[name]):
        base = ["run", "--dataset", str(tiny), *FAST, "--out", "new"]
        naming = value if name == "dataset" and value.strip() else "--" + name.replace("_", "-")
        text = refused(*typed(base, name, value, equals=bool(number % 2)), naming=naming)
        assert len(text) < 600
        assert "Error" not in text


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("run --aplha 1", ["--aplha", "did you mean '--alpha'?"]),
        ("run --partition_sed 1", ["--partition-sed", "did you mean '--partition-seed'?"]),
        ("run --partition dirichle", ["--partition", "did you mean 'dirichlet'?"]),
        ("run --method fedkpr", ["--method", "did you mean 'fedkper'?"]),
        ("run --method fedkper:distilation=1", ["--method", "did you mean 'distillation'?"]),
        ("run --preset paper-bloood", ["--preset", "did you mean 'paper-blood'?"]),
        ("run --no-resume", ["--no-resume"]),
        ("run -r 5", ["-r: no such option"]),
        ("run 5", ["'5' is not expected"]),
        ("run --rounds", ["--rounds: its value is missing"]),
        ("run --rounds --lr 1", ["--rounds: its value is missing"]),
        ("run --lr 1 --rounds 2 --lr 2", ["--lr: given twice"]),
        ("run --lr=1 --lr=1", ["--lr: given twice"]),
        ("run --partition-seed 1 --partition_seed 1", ["--partition-seed: given twice"]),
        ("run --fraction 1.5", ["--fraction 1.5", "above 0 and at most 1"]),
        ("run --rounds 0", ["at least 1 and at most 1,000,000"]),
        ("run --lr nan", ["at least 0 and finite"]),
        ("run --resume", ["--resume FOLDER"]),
        ("run --resume nosuch", ["--resume nosuch", "no run.json"]),
        ("run --resume=nosuch", ["--resume nosuch", "no run.json"]),
        ("run --resume nosuch --out other", ["--out: given twice"]),
        ("run --preset paper-blood --config x", ["--preset and --config"]),
        ("compare --methods", ["--methods: its value is missing"]),
        ("compare --methods fedavg nosuch", ["nosuch"]),
        ("compare --method fedavg", ["--method: compare takes --methods"]),
        ("compare --seeds 1 x", ["--seeds x"]),
        ("compare --seed 1 --seeds 1 2", ["--seed and --seeds"]),
        ("compare --resume", ["--resume: no such option"]),
        ("summary", ["RUNS is missing"]),
        ("summary nosuch", ["nosuch", "run.json"]),
        ("data get", ["NAME is missing"]),
        ("data show a b", ["'b' is one too many"]),
        ("data lst", ["data lst", "did you mean 'list'?"]),
        ("federation link x", ["federation link", "did you mean 'fedkper link'?"]),
        ("run --method fedprox:mu", ["--method fedprox:mu", "write mu=VALUE"]),
        ("run --method fedavg,fedkper", ["--method fedavg,fedkper", "separated by spaces"]),
        ("run --method ./mine.py", ["--method ./mine.py", "name the class in it, ./mine.py:CLASS"]),
        ("compare --methods fedavg --seeds 1,2", ["--seeds 1,2", "several are separated by spaces"]),
        ("data split --partition-file x", ["--partition-file"]),
        ("rnu", ["'rnu'", "did you mean 'run'?", "data split"]),
    ],
)
def test_a_slip_of_the_pen_is_refused_with_the_remedy(words: str, parts: list[str], refused: Any) -> None:
    text = refused(*words.split(), naming=parts[0])
    for part in parts:
        assert part in text


@pytest.mark.parametrize("word", ["true", "False", "0", "1", "no", "YES", "on", "off"])
def test_booleans_of_a_method(word: str, tiny: Path, here: Path) -> None:
    base = ["run", "--dataset", tiny, *FAST, "--out", here / "r"]
    assert fedkper(*base, "--method", f"fedkper:distillation={word}") == 0
    truth = word.lower() in ("true", "1", "yes", "on")
    assert strict(here / "r" / "run.json")["method"]["distillation"] is truth


def test_every_option_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, expected in OPTIONS.items():
        assert fedkper(*name.split(), "--help") == 0
        shown = capsys.readouterr().out
        assert [o for o in expected if o.startswith("--") and not re.search(rf"{o}\b", shown)] == []
        assert "None" not in shown
    assert fedkper("--help") == 0
    assert fedkper() == 2
    assert fedkper("data") == 2
    assert fedkper("--version") == 0
    assert "summary" in capsys.readouterr().out


def test_words_are_read_as_typed() -> None:
    read = options.read(Run, ["--lr=-1e-3", "--out", "a=b", "--seed", "7", "--resume"], "fedkper run")
    assert read == {"lr": -1e-3, "out": Path("a=b"), "seed": 7, "resume": True}


# --- files of options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ('{"aplha": 1}', ["unknown key 'aplha'", "did you mean 'alpha'?"]),
        ('{"partition-seed": 1}', ["'partition-seed'", "did you mean 'partition_seed'?"]),
        ('{"workers": 1}', ["unknown key 'workers'"]),
        ('{"rounds": "5"}', ["rounds", "must be a whole number"]),
        ('{"rounds": 1.5}', ["rounds 1.5", "must be a whole number"]),
        ('{"rounds": true}', ["rounds true", "must be a whole number"]),
        ('{"rounds": 0}', ["--rounds 0"]),
        ('{"lr": NaN}', ["--lr nan"]),
        ('{"lr": 1' + "0" * 400 + "}", ["lr", "must be a finite number"]),
        ('{"lr": [1]}', ["lr [1]", "must be a number"]),
        ('{"split": "offical"}', ["split 'offical'", "official, stratified"]),
        ('{"split": ["official"]}', ["split"]),
        ('{"method": 3}', ["method 3", "must be text"]),
        ("[1]", ["JSON object"]),
        ("", ["not valid JSON"]),
        ("[" * 100_000, ["not valid JSON"]),
        ("{'rounds': 1}", ["not valid JSON"]),
    ],
)
def test_a_bad_file_of_options_is_refused(
    content: str, parts: list[str], tmp_path_factory: pytest.TempPathFactory, refused: Any
) -> None:
    path = tmp_path_factory.mktemp("config") / "options.json"
    path.write_text(content)
    text = refused("run", "--config", path, naming=parts[0])
    for part in parts:
        assert part in text


def test_options_beside_a_preset_or_a_file_win(tiny: Path, here: Path) -> None:
    assert fedkper("run", "--preset", "paper-blood", "--dataset", tiny, *FAST, "--out", "preset") == 0
    assert stored(here / "preset")["clients"] == 3
    assert stored(here / "preset")["dataset"] == str(tiny)
    (here / "some.json").write_text(json.dumps({"dataset": str(tiny), "alpha": 5, "lr": 0.5, "clients": 4}))
    assert fedkper("run", "--lr", "0.25", *FAST, "--config", "some.json", "--out", "file") == 0
    given = stored(here / "file")
    assert (given["alpha"], given["lr"], given["clients"]) == (5.0, 0.25, 3)
    assert type(given["alpha"]) is float


def test_a_run_is_repeated_from_its_record(tiny: Path, here: Path) -> None:
    words = ["--rounds", 3, "--lr", 0.05, "--seed", 4, "--sampling", "seeded"]
    data = ["--dataset", tiny.name, "--data", os.path.relpath(tiny.parent)]
    assert fedkper("run", *data, *TINY, *words, "--out", "first") == 0
    assert fedkper("run", "--config", "first/run.json", "--workers", 1, "--out", "second") == 0
    assert results(here / "second") == results(here / "first")
    assert fedkper("run", "--config", "first/run.json", "--workers", 1, "--seed", 5, "--out", "third") == 0
    assert untimed(here / "third") != untimed(here / "first")


# --- partitions ----------------------------------------------------------------------------------------


def test_each_split_takes_effect_in_the_same_folder(
    here: Path, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory, refused: Any
) -> None:
    source = tmp_path_factory.mktemp("labels")
    y = np.repeat(np.arange(10), 1000)
    images = np.arange(16, dtype=np.uint8).reshape(1, 4, 4).repeat(len(y), 0)
    arrays = {"train_images": images, "train_labels": y, "test_images": images[:10], "test_labels": y[::1000]}
    np.savez(source / "ten.npz", **arrays)
    common = ["--dataset", source / "ten.npz", "--clients", 20]
    diversity, hashes = [], []
    for words in ("--alpha 0.05", "--alpha 0.5", "--alpha 5", "--alpha 1000", "--partition iid"):
        assert fedkper("data", "split", *common, *words.split(), "--out", source / "same") == 0
        partition = partition_file.load(source / "same" / "partition.json")
        asked = words.split()[-1]
        assert asked in (str(partition.request.kind), f"{partition.request.alpha:g}")
        said = capsys.readouterr().out
        assert partition.hash in said
        train, test = partition.counts(y, 10)
        diversity.append(float(entropy(torch.from_numpy(train + test)).mean()))
        hashes.append(partition.hash)
    assert diversity[0] < diversity[1] < diversity[2] < diversity[3]
    assert min(diversity[3:]) > 0.98
    assert len(set(hashes)) == 5
    assert (source / "same" / "partition.png").read_bytes().startswith(b"\x89PNG")
    stale = ["--partition-file", source / "same" / "partition.json", *FAST[2:6], "--workers", 1]
    text = refused("run", *common, "--alpha", 0.5, *stale, naming="partition.json")
    assert "--partition is iid in the stored partition, dirichlet in the request" in text
    assert fedkper("data", "split", *common, "--alpha", 0.5, "--out", source / "same") == 0
    capsys.readouterr()
    text = refused("run", *common, "--alpha", 5, "--partition-seed", 2, *stale, naming="partition.json")
    assert "--alpha is 0.5 in the stored partition, 5.0 in the request" in text
    assert "--partition-seed is 1 in the stored partition, 2 in the request" in text


def test_a_stored_partition_is_used(
    tiny: Path, here: Path, refused: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--dataset", tiny, *TINY, "--partition-seed", 7]
    out = tiny.parent / "split"
    assert fedkper("data", "split", *common, "--out", out) == 0
    run = tiny.parent / "run"
    assert (
        fedkper("run", *common, "--rounds", 1, "--partition-file", out / "partition.json", "--out", run) == 0
    )
    assert (run / "partition.json").read_bytes() == (out / "partition.json").read_bytes()
    assert partition_file.load(out / "partition.json").hash == strict(run / "run.json")["partition"]["hash"]
    capsys.readouterr()
    refused("data", "split", *common, "--out", run, naming="holds a run")


# --- several runs, and their table ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """A comparison, and the command that made it."""
    parent = tmp_path_factory.mktemp("compare") / "both"
    methods = ["fedavg", "fedkper:cap=2", "fedkper:cap=2.0"]
    words = ["compare", "--dataset", tiny, *TINY, "--rounds", 3, "--lr", 0.05]
    command = [*words, "--methods", *methods, "fedavg", "--seeds", 1, 2, 1, "--out", parent]
    assert fedkper(*command) == 0
    return command, parent


def test_compare_makes_every_run_once(compared: Any, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, parent = compared
    folders = sorted(p.parent for p in parent.glob("*/run.json"))
    assert len(folders) == 6
    assert {(stored(f)["method"], stored(f)["seed"]) for f in folders} == {
        (m, s) for m in ("fedavg", "fedkper:cap=2", "fedkper:cap=2.0") for s in (1, 2)
    }
    assert len({strict(f / "run.json")["partition"]["hash"] for f in folders}) == 1
    assert (parent / "curves.png").read_bytes().startswith(b"\x89PNG")
    before = {p: p.read_bytes() for f in folders for p in f.rglob("*") if p.is_file()}
    (parent / "curves.png").unlink()
    assert fedkper(*command) == 0
    said = capsys.readouterr()
    assert said.err.count("finished already, 3 rounds") == 6
    assert "round 3 of 3" not in said.err
    assert {p: p.read_bytes() for p in before} == before
    assert (parent / "curves.png").is_file()
    assert "2 seeds" in said.out
    assert all(len(line) <= 80 for line in said.out.splitlines() if "/" not in line)


def test_compare_with_other_options_is_refused(compared: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command, _ = compared
    assert fedkper(*typed(list(map(str, command)), "lr", 0.5)) == 2
    assert "--lr 0.5 (the run has 0.05)" in capsys.readouterr().err


def test_summary_prints_what_summary_json_holds(
    compared: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, parent = compared
    assert fedkper("summary", parent) == 0
    shown = capsys.readouterr().out
    for number, folder in enumerate(sorted(p.parent for p in parent.glob("*/run.json")), 1):
        assert f"{number}  {folder}: {stored(folder)['method']} (3 of 3 rounds)" in shown
        summary = strict(folder / "summary.json")
        means = [summary[key]["mean"] for key in tables.COLUMNS]
        cells = ["–" if value is None else f"{value:.3f}" for value in means]
        assert [line.split()[1:] for line in shown.splitlines() if line.startswith(f"{number} ")] == [cells]


def test_a_run_says_what_it_does_within_80_columns(
    tiny: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rounds", 12, "--method", "fedkper:cap=2,tau=1.5,aggregation=false", "--grad-clip", 5]
    assert fedkper("run", "--dataset", tiny, *TINY, *words) == 0
    said = capsys.readouterr()
    text = " ".join(said.err.split())
    assert "12 rounds, 5 clients, 0.5 a round, 1 epochs, batch 16, lr 0.01 x 0.99 a round" in text
    assert "dirichlet alpha 1, at least 5 samples, split official, partition seed 1" in text
    assert "gradients clipped at 5" in text
    assert "cpu, 1 worker" in text
    assert "round 10 of 12" in said.err
    assert "round 12 of 12" in said.err
    assert all(len(line) <= 80 for line in said.out.splitlines())
    (folder,) = Path("runs").iterdir()
    assert said.out.endswith(f"run folder: {folder}\n")
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,99}", folder.name)


def test_the_line_of_progress_fits_80_columns(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables.err, "_force_terminal", True)
    with tables.err.capture() as drawn, tables.progress() as bar:
        state = tables.state({"global_acc": 0.123, "local_acc": 0.456, "global_bwt": -0.125})
        name = tables.short("fedkper:cap=2,aggregation=false")
        bar.add_task(name, total=100, completed=100, state=state)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.get()).replace("\r", "\n").splitlines()
    shown = [line for line in lines if "100/100" in line]
    assert shown
    assert all(len(line) <= 80 and "BwT -0.125 -:--:-- left" in line for line in shown)


# --- data ----------------------------------------------------------------------------------------------


def test_what_data_there_is(here: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fedkper("data", "list", "--data", here) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("bloodmnist", "organcmnist", "organsmnist", "synthetic"))
    assert f"data folder: {here}" in shown
    assert fedkper("data", "show", tiny) == 0
    shown = capsys.readouterr().out
    assert "240 train and 30 test images, 8 x 8 x 3" in shown
    assert "column site: 4 values" in shown
    assert fedkper("data", "get", "synthetic") == 0
    assert "nothing to download" in capsys.readouterr().out


def test_tables_of_data_fit_80_columns(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("data list", "data show synthetic", "data split --clients 12 --alpha 1 --out split"):
        assert fedkper(*words.split()) == 0
        shown = capsys.readouterr().out
        assert [line for line in shown.splitlines() if len(line) > 80 and ": /" not in line] == []
        assert "…" not in shown


class Marker:
    """Loading this pickle would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_file_can_run_code(tiny: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = here / "marker"
    poison = pickle.dumps(Marker(marker))
    (here / "pickle.npz").write_bytes(poison)
    with np.load(tiny) as arrays:
        objects = np.array([Marker(marker)], dtype=object)
        np.savez(here / "objects.npz", **{**arrays, "train_labels": objects})
    (here / "options.json").write_bytes(poison)
    run = here / "run"
    assert fedkper("run", "--dataset", tiny, *FAST, "--out", run) == 0
    capsys.readouterr()

    def refused(file: str, *words: object) -> None:
        assert fedkper(*words) == 2
        assert file in capsys.readouterr().err
        assert not marker.exists()

    refused("pickle.npz", "run", "--dataset", "pickle.npz", *FAST)
    refused("objects.npz", "run", "--dataset", "objects.npz", *FAST)
    refused("options.json", "run", "--config", "options.json")
    refused("options.json", "run", "--dataset", tiny, *FAST, "--partition-file", "options.json")
    for path in (run / "checkpoint").iterdir():
        path.write_bytes(poison)
    refused("state-000001.json", "run", "--resume", run, "--rounds", 2)
    (run / "run.json").write_bytes(poison)
    refused("run.json", "run", "--resume", run)
    refused("run.json", "summary", run)
    pickle.loads(poison)
    assert marker.exists(), "the pickle does what it threatens"


def test_the_source_loads_no_pickle() -> None:
    """Messages between a run's own processes are the one exception; they never come from a file."""
    pattern = r"torch\.load|pickle\.loads?\b|allow_pickle=True|joblib|weights_only=False|[^.\w]eval\("
    source = Path(options.__file__).parent
    found = [p.name for p in source.rglob("*.py") if re.search(pattern, p.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "html"])
def test_a_damaged_data_file_is_named(damage: str, tiny: Path, refused: Any) -> None:
    content = tiny.read_bytes()
    middle = len(content) // 2
    spoilt = {
        "cut": content[:-60],
        "flipped": content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :],
        "empty": b"",
        "html": b"<html>404</html>",
    }[damage]
    path = tiny.parent / f"{damage}.npz"
    path.write_bytes(spoilt)
    assert "Error" not in refused("run", "--dataset", path, *FAST, naming=path.name)


# --- numbers that do not exist -------------------------------------------------------------------------


def test_without_local_test_samples_the_run_ends_well(
    tiny: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients of two or three samples have no local test part."""
    words = "--clients 100 --partition iid --min-size 1 --fraction 0.02 --rounds 2 --epochs 1 --workers 1"
    assert fedkper("run", "--dataset", tiny, *words.split(), "--out", "r") == 0
    summary = strict(here / "r" / "summary.json")
    for key in ("global_bwt", "local_acc", "worst_client_acc", "local_consistency", "balance"):
        assert summary[key]["mean"] is None
        assert summary[key]["reason"], key
    assert column(here / "r", "rounds.csv", "local_acc") == ["", ""]
    assert column(here / "r", "rounds.csv", "global_bwt") == ["", ""]
    assert set(column(here / "r", "clients.csv", "test_samples")) == {"0"}
    shown = capsys.readouterr().out
    assert f"– local accuracy: {summary['local_acc']['reason']}" in " ".join(shown.split())
    assert "nan" not in shown.lower()
    for path in [*(here / "r").rglob("*.json"), *(here / "r").glob("*.jsonl")]:
        strict(path)


def test_a_run_that_diverges_ends_well_and_says_so(
    tiny: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedkper import tree

    assert (
        fedkper("run", "--dataset", tiny, *TINY, "--epochs=5", "--rounds", 3, "--lr", 1e6, "--out", "r") == 2
    )
    capsys.readouterr()
    words = typed(list(TINY), "epochs", 5)
    assert fedkper("run", "--dataset", tiny, *words, "--rounds", 3, "--lr", 1e6, "--out", "r") == 0
    rejected = [e for e in strict(here / "r" / "events.jsonl") if e["event"] == "rejected"]
    assert rejected
    for event in rejected:
        assert event["round"] in (1, 2, 3)
        assert event["client"] in range(5)
        assert "finite" in event["reason"]
        assert "--lr" in event["reason"]
    said = " ".join(capsys.readouterr().err.split())
    assert f"{len(rejected)} updates in 3 rounds rejected" in said
    assert "try a smaller --lr" in said
    assert "events.jsonl" in said
    model = tree.load(here / "r" / "checkpoint" / "shared-000003.safetensors")
    assert bool(tree.finite(model).all())
    for path in [*(here / "r").rglob("*.json"), *(here / "r").glob("*.jsonl")]:
        strict(path)
    words = [*typed(words, "workers", 1)[:-2], "--jobs", 1, "--methods", "fedavg"]
    assert fedkper("sweep", "--dataset", tiny, *words, "--rounds", 3, "--lr", 1e6, "--out", "s") == 0
    assert f"{len(rejected)} updates in 3 rounds rejected" in " ".join(capsys.readouterr().err.split())


# --- as a program --------------------------------------------------------------------------------------


def test_help_does_not_wait_for_pytorch() -> None:
    code = "import sys; from fedkper.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_program_itself(tiny: Path, tmp_path: Path) -> None:
    """Results on standard output, the rest on standard error, the exit code for scripts."""
    program = [sys.executable, "-W", "error", "-m", "fedkper.cli"]
    words = [*program, "run", "--dataset", str(tiny), *FAST, "--out", "r"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "run folder: r"
    assert done.stderr.startswith("fedkper on ")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: --out r: holds a run already; go on with --resume, or name another folder\n"
    )


# --- text of the user's, in whatever terminal ----------------------------------------------------------

MINE = """
from dataclasses import dataclass
from typing import Annotated, Literal
from fedkper.method import Method
from fedkper.ranges import Range

@dataclass(frozen=True)
class A(Method):
    strength: float = 1
    share: Annotated[float, Range(0, 1)] = 0
    kind: Annotated[Literal["near", "far"], "which"] = "near"
    count: int = True
    name: str = ""
    often: bool = 0

@dataclass(frozen=True)
class Bare(Method):
    needed: float
    odd: list = None

@dataclass(frozen=True)
class Unknown(Method):
    field: "Nowhere" = 1
"""


def test_names_of_classes_are_shown_as_they_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(write_data(here / "names.npz")) as arrays:
        np.savez(here / "names.npz", **arrays, classes=np.array(["x [/b]", "lesion [benign]", "a:mu:b"]))
    assert fedkper("data", "show", "names.npz") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("x [/b]", "lesion [benign]", "a:mu:b"))
    split = ["--clients", 3, "--partition", "iid", "--min-size", 1, "--out", "b"]
    assert fedkper("data", "split", "--dataset", "names.npz", *split) == 0
    assert "lesion [benign]" in capsys.readouterr().out


def test_no_word_turns_into_an_emoji(tiny: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.py").write_text(MINE)
    assert fedkper("run", "--method", "mine.py:mu:[b]") == 2
    assert "mine.py:mu" in capsys.readouterr().err
    (here / "mine.py").write_text(MINE.replace("class A", "class mu").replace("strength", "m"))
    method = "mine.py:mu:m=2"
    assert fedkper("run", "--dataset", tiny, *FAST, "--method", method, "--out", "r") == 0
    said = capsys.readouterr()
    assert method in said.err
    assert method in said.out
    assert fedkper("summary", "r") == 0
    assert f"r: {method} (1 of 1 rounds)" in capsys.readouterr().out


def test_a_terminal_without_the_characters(tiny: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fedkper.cli", "run", "--dataset", str(tiny), *FAST, "--out", "r"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "means over rounds" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes on Linux only")
def test_a_path_that_is_not_utf_8(tiny: Path, here: Path) -> None:
    """As a folder of data it is remembered, and found again by --resume."""
    folder = os.fsdecode(os.fsencode(here / "d") + b"\xe9")
    os.mkdir(folder)
    shutil.copy(tiny, os.path.join(folder, "tiny.npz"))
    assert fedkper("run", "--dataset", "tiny", "--data", folder, *FAST, "--out", "r") == 0
    assert strict(here / "r" / "run.json")["execution"]["data"] == folder
    assert fedkper("run", "--resume", "r", "--rounds", 2, "--workers", 1) == 0
    words = ["--dataset", os.path.join(folder, "tiny.npz"), *FAST]
    assert fedkper("compare", *words, "--methods", "fedavg", "--out", "c") == 0
    assert fedkper("data", "split", *words, "--out", "s") == 0


# --- a user's own method -------------------------------------------------------------------------------


def test_a_field_has_the_type_of_its_hint(here: Path) -> None:
    (here / "mine.py").write_text(MINE)
    method: Any = parse("mine.py:A:strength=0.5,share=1e-1,kind=far,count=3,name=x y,often=yes")
    values = (method.strength, method.share, method.kind, method.count, method.name, method.often)
    assert values == (0.5, 0.1, "far", 3, "x y", True)
    assert [type(v) for v in values] == [float, float, str, int, str, bool]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("A:strength=x", "must be a number"),
        ("A:count=0.5", "must be a whole number"),
        ("A:share=2", "at most 1"),
        ("A:kind=fra", "must be one of near, far; did you mean 'far'?"),
        ("A:often=2", "must be true or false"),
        ("Bare", "needed has no default; add needed=VALUE"),
        ("Bare:needed=1,odd=2", "odd: a field of this type cannot be set here"),
        ("Bare:neded=1", "did you mean 'needed'?"),
        ("Unknown:field=1", "Nowhere"),
    ],
)
def test_a_field_that_cannot_be_set(fields: str, said: str, tiny: Path, refused: Any) -> None:
    (tiny.parent / "mine.py").write_text(MINE)
    assert said in refused("run", "--method", f"{tiny.parent / 'mine.py'}:{fields}", naming="--method")


def test_two_files_of_one_name(tiny: Path, here: Path) -> None:
    for folder in "ab":
        (here / folder).mkdir()
        (here / folder / "mine.py").write_text(MINE)
    words = typed(["compare", "--dataset", str(tiny), *FAST], "workers", 2)
    assert fedkper(*words, "--methods", "a/mine.py:A", "b/mine.py:A", "--out", "c") == 0
    assert len(list((here / "c").glob("*/summary.json"))) == 2


# --- said before anything is trained -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--size 64 --dataset synthetic", ["--size 64", "--dataset synthetic"]),
        ("--size 64 --dataset x.npz", ["--size 64", "--dataset x.npz"]),
        ("--column site", ["--column site", "--partition dirichlet"]),
        ("--column site --partition iid", ["--column site", "--partition iid"]),
        ("--classes-per-client 3", ["--classes-per-client 3", "--partition dirichlet"]),
    ],
)
def test_an_option_without_effect_is_refused(words: str, options: list[str], refused: Any) -> None:
    for command in (["run"], ["compare"], ["data", "split"]):
        text = refused(*command, *words.split(), naming=options[0])
        assert options[1] in text


def test_the_size_of_a_set_that_has_one(tiny: Path, refused: Any) -> None:
    for name in ("synthetic", tiny):
        assert str(name) in refused("data", "show", name, "--size", 64, naming="--size 64")


def test_workers_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "cores", lambda: 64)
    e = Experiment(clients=100, fraction=0.02)
    assert run.workers(run.Execution(), e) == 8
    assert run.workers(run.Execution(), dataclasses.replace(e, fraction=0.2)) == 20
    assert run.workers(run.Execution(), dataclasses.replace(e, fraction=1.0)) == 64
    assert run.workers(run.Execution(workers=3), e) == 3
    assert run.workers(run.Execution(device="cuda"), e) == 1
    monkeypatch.setattr(run.torch.cuda, "device_count", lambda: 1)
    run.check_device(run.Execution(workers=1, device="cuda"))
    with pytest.raises(InputError, match=r"--workers 2.*--device cuda"):
        run.check_device(run.Execution(workers=2, device="cuda"))


def test_compare_refuses_before_the_first_round(tiny: Path, here: Path, refused: Any) -> None:
    base = ["compare", "--dataset", tiny, *FAST, "--out", "c"]
    refused(*base, "--methods", "fedavg", "fedprox:mu=10", "--lr", 0.5, naming="fedprox:mu=10")


def test_compare_refuses_other_options_before_the_first_round(
    tiny: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["compare", "--dataset", tiny, *FAST, "--out", "c"]
    assert fedkper(*base, "--methods", "fedprox") == 0
    assert fedkper(*base, "--methods", "fedavg", "fedprox", "--lr", 0.5) == 2
    assert [p.parent.name for p in (here / "c").glob("*/run.json")] == ["fedprox-seed1"]
    (here / "c" / "moon-seed1").mkdir()
    (here / "c" / "moon-seed1" / "mine.txt").touch()
    assert fedkper(*base, "--methods", "fedavg", "moon") == 2
    assert len(list((here / "c").glob("*/run.json"))) == 1


def test_compare_takes_the_method_of_a_file(tiny: Path, here: Path) -> None:
    (here / "one.json").write_text(json.dumps({"dataset": str(tiny), "method": "moon"}))
    (here / "none.json").write_text(json.dumps({"dataset": str(tiny)}))
    for config, methods, expected in (
        ("one", [], ["moon"]),
        ("none", [], ["fedavg", "fedkper"]),
        ("one", ["--methods", "fedprox"], ["fedprox"]),
    ):
        out = here / f"{config}{len(methods)}"
        assert fedkper("compare", "--config", f"{config}.json", *FAST, *methods, "--out", out) == 0
        assert sorted(stored(p.parent)["method"] for p in out.glob("*/run.json")) == expected
    assert fedkper("compare", "--config", "one2/fedprox-seed1/run.json", "--workers", 1, "--out", "re") == 0
    assert [p.name for p in (here / "re").iterdir() if p.is_dir()] == ["fedprox-seed1"]


def test_summary_skips_folders_without_a_run(
    tiny: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedkper("run", "--dataset", tiny, *FAST, "--out", "runs/a") == 0
    assert fedkper("data", "split", "--dataset", tiny, *FAST, "--out", "runs/b") == 0
    capsys.readouterr()
    assert fedkper("summary", "runs/a", "runs/b") == 0
    said = capsys.readouterr()
    assert "note: runs/b: holds no run" in said.err
    assert "runs/a: fedkper" in said.out
    assert fedkper("summary", "runs/b") == 2
    assert "runs/b" in capsys.readouterr().err


# --- workers that cannot start -------------------------------------------------------------------------


def test_without_shared_memory_the_remedy_is_named(
    tiny: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object) -> None:
        raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    monkeypatch.setattr("torch.Tensor.share_memory_", full)
    assert fedkper(*typed(["run", "--dataset", str(tiny), *FAST], "workers", 2), "--out", "r") == 1
    said = capsys.readouterr().err
    assert "shared memory" in said
    assert "--workers 1" in said
    assert "No space left" in said
    assert not multiprocessing.active_children()


def test_a_process_that_cannot_be_started(
    tiny: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    start = SpawnProcess.start

    def once(self: Any) -> None:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(self)
        start(self)

    monkeypatch.setattr(SpawnProcess, "start", once)
    assert fedkper(*typed(["run", "--dataset", str(tiny), *FAST], "workers", 2), "--out", "r") == 1
    assert "--workers 1" in capsys.readouterr().err
    assert not multiprocessing.active_children()


def test_an_error_in_a_worker_that_starts_is_told(
    tiny: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here_only = "import multiprocessing\nif multiprocessing.parent_process():\n    raise ValueError('alas')\n"
    (here / "mine.py").write_text(here_only + MINE)
    words = typed(["run", "--dataset", str(tiny), *FAST, "--method", "mine.py:A"], "workers", 2)
    assert fedkper(*words, "--out", "r") == 1
    said = capsys.readouterr().err
    assert "mine.py: the file cannot be run (ValueError: alas)" in said
    assert "memory" not in said
