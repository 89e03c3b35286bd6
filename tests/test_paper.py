"""The paper's table and figures: numbers of hand-made runs, what is beside what, and how it is written."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedkper import cli_paper, tables
from fedkper.data import partition_file
from fedkper.errors import InputError
from fedkper.experiment import Experiment
from fedkper.paper import efficiency as paper_efficiency
from fedkper.paper import figures as paper_figures
from fedkper.paper import runs as paper_runs
from fedkper.paper import table as paper_table
from fedkper.paper.runs import Setting
from fedkper.paper.table import Block, number
from terminal import TINY, fedkper, strict, typed, write_data

ROOT = Path(__file__).parents[1]
LOW, HIGH = [0.2, 0.4] * 50, [0.4, 0.6] * 50


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and a terminal of 114 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables.out, "_width", 114)
    monkeypatch.setattr(tables.err, "_width", 114)
    return tmp_path


def make(
    folder: Path,
    acc: Sequence[float | None],
    method: str = "fedavg",
    seconds: Sequence[float] = (1.0, 0.5, 0.25),
    stored: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """A run whose global accuracy is `acc`; client 0 is sampled each round and its local accuracy is 0.5."""
    fields = {"dataset": "bloodmnist", "method": method, "rounds": len(acc)} | options
    experiment = Experiment(**fields)
    folder.mkdir(parents=True)
    partition = {"hash": f"of seed {experiment.partition_seed}"}
    run = {"experiment": experiment.to_json(), "data": {"hash": "d"}, "partition": partition}
    (folder / "run.json").write_text(json.dumps(run | dict(stored or {})))
    lines = ["round,global_acc,train_seconds,merge_seconds,eval_seconds"]
    lines += [f"{t},{'' if a is None else a},{','.join(map(str, seconds))}" for t, a in enumerate(acc, 1)]
    (folder / "rounds.csv").write_text("\n".join(lines) + "\n")
    lines = ["round,client,sampled,test_samples,local_acc,global_on_local_acc"]
    lines += [f"{t},0,1,10,0.5,0.5" for t in range(1, len(acc) + 1)]
    (folder / "clients.csv").write_text("\n".join(lines) + "\n")
    return folder


def shown(*folders: Path) -> list[Setting]:
    return paper_runs.settings(paper_runs.find(folders)[0])[0]


def block_of(folder: Path) -> Block:
    (setting,) = shown(folder)
    return paper_table.block(setting)


def row(block: Block, method: str) -> paper_table.Row:
    return next(r for r in block.rows if r.method == method)


def written(folder: Path) -> list[dict[str, str]]:
    with open(folder / "table1.csv", newline="") as file:
        return list(csv.DictReader(file))


# --- the published numbers ----------------------------------------------------------------------------


def test_table1_is_in_the_package_and_consistent() -> None:
    table = paper_table.published()
    assert list(table) == ["bloodmnist", "organsmnist", "organcmnist"]
    for rows in table.values():
        assert tuple(rows) == paper_runs.STRATEGIES
        for values in rows.values():
            assert tuple(values) == paper_table.COLUMNS
            both = (values["global_acc"].mean or 0) + (values["local_acc"].mean or 0)
            assert values["balance"].mean == pytest.approx(both / 2, abs=0.00051)
        for column in ("global_acc", "global_bwt", "global_consistency", "balance"):
            assert rows["FedKPer"][column].rank == 1
        assert (rows["FedALA"]["worst_client_acc"].rank, rows["FedKPer"]["worst_client_acc"].rank) == (1, 2)
    assert table["bloodmnist"]["FedAvg"]["global_acc"][:3] == (0.409, 0.147, None)  # over rounds
    assert table["bloodmnist"]["FedAvg"]["worst_client_acc"][:3] == (0.664, None, 0.024)  # over seeds


@pytest.mark.parametrize(
    ("value", "signed", "text"),
    [
        (0.638, False, ".638"),
        (-0.1325, False, "-.133"),
        (1.0, False, "1.000"),
        (-0.0001, False, ".000"),
        (-0.0001, True, "+.000"),
        (0.064, True, "+.064"),
        (-1.25, False, "-1.250"),
        (None, True, "–"),
    ],
)
def test_a_number_in_a_table(value: float | None, signed: bool, text: str) -> None:
    assert number(value, signed) == text


# --- what is in the table -----------------------------------------------------------------------------


def test_means_deviations_and_difference_by_hand(tmp_path: Path) -> None:
    make(tmp_path / "a" / "deep" / "one", LOW, seed=1)
    make(tmp_path / "b", HIGH, seed=2)
    one = row(block_of(tmp_path), "FedAvg")
    value = one.here["global_acc"]
    assert one.seeds == (1, 2)
    assert value.mean == pytest.approx(0.4)
    assert value.std_rounds == pytest.approx(0.1)  # of the curve .3 .5 .3 .5 ...
    assert value.std_seeds == pytest.approx(0.2 / 2**0.5)  # of .3 and .5
    assert one.difference("global_acc") == pytest.approx(0.4 - 0.409)
    assert one.difference("balance") == pytest.approx(0.45 - 0.592)


def test_missing_rows_have_a_dash_and_the_reason(tmp_path: Path) -> None:
    make(tmp_path / "a", LOW)
    make(tmp_path / "b", LOW[:40], "fedntd", rounds=100)
    make(tmp_path / "c", LOW, "moon", partition_seed=2)
    block = block_of(tmp_path)
    assert [r.method for r in block.rows] == list(paper_runs.STRATEGIES)
    assert row(block, "FedNTD").here["balance"][:1] == (None,)
    notes = "\n".join(block.notes)
    assert "– unfinished, 40 of 100 rounds: FedNTD" in notes
    assert "– only on partition seed 2: MOON" in notes
    assert "– not run: FedCurv, FedProx" in notes
    assert row(block, "FedKPer").published["global_acc"].mean == 0.645


def test_best_and_second_of_ours_without_variants(tmp_path: Path) -> None:
    for level, method in enumerate(("fedavg", "fedntd", "fedkper", "fedkper:cap=3", "./mine.py:Mine")):
        make(tmp_path / str(level), [0.1 * (level + 1)] * 100, method)
    block = block_of(tmp_path)
    ranks = {r.method: r.here["global_acc"].rank for r in block.rows if r.seeds}
    assert ranks == {"FedAvg": 0, "FedNTD": 0, "FedKPer": 2, "FedKPer: cap=3.0": 0, "mine.py:Mine": 1}
    assert all(r.here["local_acc"].rank == 1 for r in block.rows if r.seeds and ": " not in r.method)


def test_fields_at_their_default_make_no_row_of_their_own(tmp_path: Path) -> None:
    make(tmp_path / "a", LOW, "fedkper:cap=10", seed=1)
    make(tmp_path / "b", HIGH, "fedkper", seed=2, stored={"method": {"name": "FedKPer", "cap": 10.0}})
    make(tmp_path / "c", HIGH, "fedkper", seed=3, stored={"method": {"name": "FedKPer", "cap": 7.0}})
    (setting,) = shown(tmp_path)
    names = {r.experiment.seed: r.method for r in setting.runs}
    assert names == {1: "FedKPer", 2: "FedKPer", 3: "FedKPer: cap=7.0"}  # that of an older version


def test_what_cannot_be_compared_is_apart(tmp_path: Path) -> None:
    make(tmp_path / "a", LOW)
    make(tmp_path / "b", LOW[:20], "fedkper")
    make(tmp_path / "c", LOW, "fedkper", stored={"data": {"hash": "other"}})
    make(tmp_path / "d", LOW, "fedkper", dataset="pneumoniamnist", clients=10)
    make(tmp_path / "e", LOW, "fedkper", lr=0.1)
    settings = shown(tmp_path)
    assert [len(s.runs) for s in settings] == [1] * 5
    blocks = [paper_table.block(s) for s in settings]
    assert [any(r.published for r in b.rows) for b in blocks] == [True, True, False, True, False]
    notes = ["\n".join(b.notes) for b in blocks]
    assert "not the paper's protocol" not in notes[0] + notes[1]
    assert "the paper has no numbers for pneumoniamnist" in notes[2]
    assert "lr 0.1 (paper: 0.01)" in notes[3]
    assert "rounds 20 (paper: 100)" in notes[4]


def test_a_run_that_lies_twice_counts_once(tmp_path: Path) -> None:
    make(tmp_path / "a", LOW)
    make(tmp_path / "b", LOW)
    make(tmp_path / "c", HIGH)
    settings, notes = paper_runs.settings(paper_runs.find([tmp_path])[0])
    assert [r.folder.name for r in settings[0].runs] == ["a"]
    assert notes == [
        f"left out: {tmp_path / 'c'}, the same experiment as {tmp_path / 'a'} with other numbers"
    ]


def test_partitions_are_a_spread_of_their_own(tmp_path: Path) -> None:
    for seed in (1, 2):
        make(tmp_path / f"s{seed}", LOW, seed=seed)
    make(tmp_path / "p2", HIGH, partition_seed=2, seed=1)
    make(tmp_path / "p3", [0.8] * 100, partition_seed=3, seed=1)
    block = block_of(tmp_path)
    assert row(block, "FedAvg").here["global_acc"].std_seeds == pytest.approx(0)
    (spread,) = block.spreads
    assert spread.seeds == (1,)
    assert [seed for seed, _ in spread.each] == [1, 2, 3]
    over = spread.over("global_acc")
    assert over.mean.value == pytest.approx((0.3 + 0.5 + 0.8) / 3)
    assert over.std_sample.value == pytest.approx(0.2516611478)
    assert any("partition seed 1; other partitions stand apart" in note for note in block.notes)


def test_undefined_numbers_are_dashes_with_reasons(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    falling = [0.9 - 0.005 * t for t in range(100)]
    make(here / "runs" / "a", falling)
    make(here / "runs" / "b", [None] * 100, "fedkper")
    assert fedkper("paper", "all", "runs") == 0
    said = capsys.readouterr()
    assert "– global consistency: no window: the curve has no second record high (FedAvg)" in said.out
    assert "– global acc: no round has a value (FedKPer)" in said.out
    for name in ("table1.csv", "table1.md", "table1.tex"):
        assert not re.search(r"\bnan\b|inf\b", (here / "runs/paper" / name).read_text(), re.IGNORECASE)
    for figure in (here / "runs/paper").glob("*.svg"):
        assert "nan" not in figure.read_text()


# --- how it is written --------------------------------------------------------------------------------


def test_csv_holds_both_deviations_and_the_published(here: Path) -> None:
    make(here / "runs" / "a", LOW, seed=1)
    make(here / "runs" / "b", HIGH, seed=2)
    assert fedkper("paper", "table1", "runs") == 0
    rows = written(here / "runs/paper")
    assert len(rows) == 12 * 7
    first = rows[0]
    assert (first["strategy"], first["seeds"], first["metric"]) == ("FedAvg", "1 2", "global_acc")
    assert float(first["mean"]) == pytest.approx(0.4)
    assert float(first["std_seeds"]) == pytest.approx(0.2 / 2**0.5)
    assert (first["published_mean"], first["published_std_rounds"]) == ("0.409", "0.147")
    assert float(first["difference"]) == pytest.approx(-0.009)
    missing = rows[7]
    assert (missing["strategy"], missing["mean"], missing["reason"]) == ("FedCurv", "", "not run")
    text = (here / "runs/paper/table1.md").read_text()
    assert "| FedAvg (seeds 1, 2) | .400 ± .100 (.141) |" in text
    assert "| *published* | .409 ± .147 |" in text
    assert "| *difference* | -.009 |" in text


def test_names_are_written_literally(here: Path) -> None:
    odd = "./a_b&c#$x^~|*<b>.py:Mine"
    make(here / "runs" / "a", LOW, odd)
    make(here / "runs" / "b", LOW, "fedavg")
    assert fedkper("paper", "table1", "runs") == 0
    page = (here / "runs/paper/table1.md").read_text()
    assert r"a\_b&c\#\$x^\~\|\*\<b\>.py:Mine" in page
    tex = (here / "runs/paper/table1.tex").read_text()
    shown = r"a\_b\&c\#$\$$x\^{}\~{}\textbar{}*\textless{}b\textgreater{}.py:Mine"
    assert shown in tex
    assert any(r["strategy"] == odd[2:] for r in written(here / "runs/paper"))


def test_latex_compiles(here: Path) -> None:
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex here")
    make(here / "runs" / "a", LOW, "./a_b&c#$x^~|*<b>.py:Mine")
    make(here / "runs" / "b", LOW)
    make(here / "runs" / "c", HIGH, partition_seed=2)
    assert fedkper("paper", "table1", "runs", "--out", "out") == 0
    command = re.search(r"^% pdflatex '(.*)'$", (here / "out/table1.tex").read_text(), re.MULTILINE)
    assert command
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-jobname=page", command[1]]
    done = subprocess.run(words, cwd=here / "out", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull \\hbox" not in done.stdout


@pytest.mark.parametrize("columns", [80, 114])
def test_the_terminal_is_wide_enough(
    here: Path, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables.out, "_width", columns)
    make(here / "runs" / "a", LOW, seed=1)
    make(here / "runs" / "b", HIGH, seed=2)
    make(here / "runs" / "c", HIGH, "fedkper:aggregation=false")
    make(here / "runs" / "d", HIGH, partition_seed=2)
    assert fedkper("paper", "table1", "runs") == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = [line for line in lines if re.search(r"\.\d\d\d", line)]
    assert len(numbers) >= 20
    assert max(map(len, numbers)) <= columns
    assert any(re.match(r"FedAvg \(1, 2\) +\.400", line) for line in lines)
    assert any(re.match(r"  published +\.409", line) for line in lines)
    assert any(re.match(r"  difference +-\.009", line) for line in lines)
    assert sum("(.141)" in line for line in lines) == 1


# --- the figures --------------------------------------------------------------------------------------


def test_fig3_marks_peaks_and_the_largest_drop(tmp_path: Path) -> None:
    make(tmp_path / "a", [0.8, 0.2, 0.8, 0.7, 0.9, 0.6])
    (setting,) = shown(tmp_path)
    runs = paper_figures.chosen(setting, ["FedAvg"], "fig3")
    (ax,) = paper_figures.peaks_and_drops(setting, runs).axes
    peaks = next(line for line in ax.lines if line.get_marker() == "^")
    assert list(peaks.get_xdata()) == [1, 3, 5]
    assert ax.texts[0].get_text() == "rounds 1 to 3: 38 % below the peak on average"  # .6 / .8 / 2
    assert len(ax.collections) == 3  # two windows and the tail
    # 1 - ((0 + .6 + 0) / .8 / 2 + (0 + .1 + .1) / .8 / 2) / 2
    assert "consistency 0.750 over 2 windows" in ax.get_title()


def test_fig4_has_four_arms_and_their_deviation(tmp_path: Path) -> None:
    for at, method in enumerate(cli_paper.ARMS):
        for seed in (1, 2):
            make(tmp_path / f"{at}{seed}", [0.1 * (at + seed)] * 100, method, seed=seed)
    make(tmp_path / "more", [0.9] * 100, "fedavg", seed=3)  # the others lack it
    (setting,) = shown(tmp_path)
    runs = paper_figures.chosen(setting, list(paper_figures.ARMS), "fig4")
    left, right = paper_figures.ablation(setting, runs).axes
    assert [bar.get_height() for bar in left.patches] == pytest.approx([0.15, 0.25, 0.35, 0.45])
    assert [bar.get_height() for bar in right.patches] == pytest.approx([0.5] * 4)
    upper = [segments[0][1][1] for segments in (c.get_segments() for c in left.collections)]
    assert upper[0] == pytest.approx(0.15 + 0.1 / 2**0.5)


def test_fig4_says_which_arm_is_missing(tmp_path: Path) -> None:
    make(tmp_path / "a", LOW)
    (setting,) = shown(tmp_path)
    with pytest.raises(InputError, match="no finished run of FedKPer: aggregation=false"):
        paper_figures.chosen(setting, list(paper_figures.ARMS), "fig4")


def test_fig5_compares_at_equal_times(tmp_path: Path) -> None:
    make(tmp_path / "a", [0.1, 0.2, 0.3, 0.4], seconds=(1.0, 0.0, 1.0))
    make(tmp_path / "b", [0.3, 0.5, 0.6, 0.7], "fedkper", seconds=(1.5, 0.5, 1.0))
    (setting,) = shown(tmp_path)
    runs = paper_figures.chosen(setting, ["FedAvg", "FedKPer"], "fig5")
    trained = [r for r in paper_efficiency.readings(runs) if r.clock == "training and merging"]
    assert [r.seconds for r in trained] == [1, 2, 3, 4]
    assert [r.baseline_acc for r in trained] == [0.1, 0.2, 0.3, 0.4]
    assert [r.acc for r in trained] == [None, 0.3, 0.3, 0.5]  # a round of FedKPer takes 2 s
    assert trained[1].points == pytest.approx(0.1)
    assert trained[1].relative == pytest.approx(0.5)
    assert paper_efficiency.seconds_a_round(runs["FedKPer"]) == (1.5, 0.5, 1.0)


def test_fig5_goes_by_the_quickest_seed(tmp_path: Path) -> None:
    """A machine that did other things meanwhile makes no method slower."""
    for method, acc in (("fedavg", [0.1, 0.2]), ("fedkper", [0.3, 0.4])):
        make(tmp_path / f"{method}1", acc, method, seconds=(1.0, 0.0, 1.0))
        make(tmp_path / f"{method}2", acc, method, seconds=(9.0, 0.0, 1.0), seed=2)
    (setting,) = shown(tmp_path)
    runs = paper_figures.chosen(setting, ["FedAvg", "FedKPer"], "fig5")
    assert paper_efficiency.seconds_a_round(runs["FedAvg"]) == (1.0, 0.0, 1.0)
    first, *_ = paper_efficiency.readings(runs)
    assert first.seconds == 0.5


def test_figures_are_the_same_bytes_again_and_xml(here: Path) -> None:
    for at, method in enumerate(cli_paper.ARMS):
        make(here / "runs" / str(at), [0.1 + 0.01 * t for t in range(50)], method)
    make(here / "runs" / "odd", LOW[:50], "./a$b$<c>&.py:Mine")
    for out in ("one", "two"):
        assert fedkper("paper", "all", "runs", "--out", out) == 0
    assert fedkper("paper", "fig3", "runs", "--out", "three", "--methods", "./a$b$<c>&.py:Mine") == 0
    names = sorted(p.name for p in (here / "one").iterdir())
    assert names == sorted(
        [f"fig{n}-bloodmnist.{kind}" for n in (3, 4, 5) for kind in ("svg", "pdf")]
        + ["table1.csv", "table1.md", "table1.tex"]
    )
    for name in names:
        assert (here / "one" / name).read_bytes() == (here / "two" / name).read_bytes()
    for path in [*here.glob("*/*.svg")]:
        assert ET.parse(path).getroot().tag.endswith("svg")
        assert "<script" not in path.read_text()


# --- what is there and what is missing ----------------------------------------------------------------


def test_committed_results(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fedkper("paper", "all", ROOT / "results" / "blood", "--out", "out") == 0
    said = capsys.readouterr()
    assert re.search(r"^FedKPer \(1-3\) +\.642¹±\.169 +-\.125¹±\.095", said.out, re.MULTILINE)
    assert re.search(r"^  difference +-\.003", said.out, re.MULTILINE)
    assert re.search(r"\d+ of 42 runs of bloodmnist, 20 clients, 100 rounds, seeds .*; about ", said.err)
    assert "--preset paper-blood --run" in said.err
    assert len(list((here / "out").glob("fig*.svg"))) == 3


def test_an_option_chooses_a_setting(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(here / "runs" / "a", LOW)
    make(here / "runs" / "b", LOW[:20])
    assert fedkper("paper", "table1", "runs", "--preset", "paper-blood", "--rounds", "20") == 0
    assert {r["rounds"] for r in written(here / "runs/paper")} == {"20"}
    assert fedkper("paper", "table1", "runs", "--preset", "paper-organc") == 2
    assert "holds no run of organcmnist" in capsys.readouterr().err


def test_another_partition_than_asked_for_is_never_shown(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(here / "runs" / "a", LOW)
    make(here / "runs" / "b", [0.9] * len(LOW), partition_seed=3)
    assert fedkper("paper", "table1", "runs", "--preset", "paper-blood", "--partition-seed", "3") == 0
    assert ".900" in capsys.readouterr().out
    assert fedkper("paper", "table1", "runs", "--preset", "paper-blood", "--partition-seed", "7") == 2
    said = capsys.readouterr().err
    assert "--partition-seed 7: runs holds none, but runs of partition seed 1, 3" in said


def test_a_link_that_leads_back_is_followed_once(here: Path) -> None:
    make(here / "runs" / "a", LOW)
    (here / "runs" / "again").symlink_to(here / "runs")
    (here / "runs" / "and again").symlink_to(here / "runs")
    assert fedkper("paper", "table1", "runs") == 0


def test_unfinished_runs_are_named_without_options(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(here / "runs" / "a", LOW)
    make(here / "runs" / "b", LOW[:7], seed=2, rounds=100)
    make(here / "runs" / "c", LOW[:8], "moon", rounds=100)
    assert fedkper("paper", "table1", "runs") == 0
    said = capsys.readouterr().out
    assert "– unfinished, 8 of 100 rounds: MOON" in said
    assert "unfinished, and in no mean: FedAvg, seed 2 (7 of 100 rounds)" in said


def test_settings_of_one_title_say_what_sets_them_apart(here: Path) -> None:
    make(here / "runs" / "a", LOW, fraction=0.1)
    make(here / "runs" / "b", LOW, fraction=0.5)
    shown, _ = paper_runs.settings(paper_runs.find([here / "runs"])[0])
    titles = [f"bloodmnist, 20 clients, 100 rounds, fraction {f}" for f in (0.1, 0.5)]
    assert [s.title for s in shown] == titles


def test_a_damaged_run_is_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(here / "runs" / "a", LOW)
    (make(here / "runs" / "b", LOW, "fedkper") / "rounds.csv").write_text("round,global_acc\n1,two\n")
    (make(here / "runs" / "c", LOW, "moon") / "run.json").write_text("{")
    assert fedkper("paper", "table1", "runs") == 0
    said = capsys.readouterr()
    assert "runs/b/rounds.csv: damaged in line 2" in said.err
    assert "runs/c/run.json: damaged" in said.err
    assert "– not run: FedCurv, MOON" in said.out


REFUSED = [
    (["paper", "table2", "runs"], "no such command; did you mean 'table1'?"),
    (["paper", "table1"], "RUNS is missing"),
    (["paper", "table1", "nowhere"], "nowhere: no such folder"),
    (["paper", "table1", "empty"], "empty: holds no run"),
    (["paper", "all", "runs", "--method", "fedavg"], "--method: has no use here; name them with --methods"),
    (["paper", "all", "runs", "--seed", "2"], "--seed: has no use here; name them with --seeds"),
    (["paper", "all", "runs", "--workers", "2"], "--workers: has no use here; --jobs"),
    (["paper", "fig3", "runs", "--methods", "fedavgg"], "did you mean 'fedavg'?"),
    (["paper", "fig4", "runs", "--methods", "fedavg"], "fig4 shows its four arms"),
    (["paper", "fig4", "runs"], "no finished run of FedKPer: aggregation=false"),
    (["paper", "all", "runs", "empty", "--run"], "--run: name one folder"),
    (["paper", "all", "runs", "--run"], "holds runs of 2 settings; choose one"),
    (["paper", "table1", "runs", "--jobs", "0"], "--jobs 0: must be at least 1"),
]


@pytest.mark.parametrize(("words", "naming"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_refusals(here: Path, words: list[str], naming: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "empty").mkdir()
    make(here / "runs" / "a", LOW)
    make(here / "runs" / "b", LOW[:20])
    assert fedkper(*words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert naming in said.err
    assert said.err.count("\n") == 1


def test_from_an_empty_folder_to_all_of_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs what is missing only when asked, and only what is missing; a half-done run goes on."""
    data = write_data(here / "tiny.npz")
    base = [*typed(TINY, "workers", 1)[:-2], "--dataset", data, "--rounds", 3, "--jobs", 2]
    four = ["--methods", *cli_paper.ARMS]
    assert fedkper("paper", "all", "new", *base, *four, "--seeds", 1) == 0
    said = capsys.readouterr()
    assert "running 4 of 4 runs of" in said.err
    assert "tiny, 5 clients, 3 rounds" in said.out
    assert "not run yet" not in said.err
    assert {p.name for p in (here / "new/paper").glob("*.svg")} == {f"fig{n}-tiny.svg" for n in (3, 4, 5)}

    runs = {p: p.read_bytes() for p in here.glob("new/*/rounds.csv")}
    assert fedkper("paper", "table1", "new", *base, *four, "--seeds", 1, 2) == 0  # not asked to run
    said = capsys.readouterr()
    assert "not run yet: 4 of 8 runs of" in said.err
    assert {p: p.read_bytes() for p in here.glob("new/*/rounds.csv")} == runs

    # As a kill after two of three rounds would leave it.
    two = [*typed(base[:-2], "rounds", 2), "--method", "fedntd", "--workers", 1]
    assert fedkper("run", *two, "--out", "new/half") == 0
    stored = strict(here / "new/half/run.json")
    stored["experiment"]["rounds"] = 3
    (here / "new/half/run.json").write_text(json.dumps(stored))
    capsys.readouterr()
    assert (
        fedkper("paper", "table1", "new", *base, "--methods", "fedavg", "fedntd", "--seeds", 1, "--run") == 0
    )
    said = capsys.readouterr()
    assert "running 1 of 2 runs of" in said.err
    assert "1 of them begun" in said.err
    assert (here / "new/half/rounds.csv").read_text().count("\n") == 4
    assert strict(here / "new/half/summary.json")["counts"]["rounds"] == 3
    assert {p: p.read_bytes() for p in runs} == runs
    assert re.search(r"^FedNTD +\.\d", said.out, re.MULTILINE)


def test_what_is_missing_of_a_sweep_has_its_partition_file(here: Path) -> None:
    data = write_data(here / "tiny.npz")
    base = [*typed(TINY, "workers", 1)[:-2], "--dataset", data, "--rounds", 1]
    assert fedkper("data", "split", *base[:-2], "--out", "dealt") == 0
    dealt = here / "dealt" / "partition.json"
    drawn = partition_file.load(dealt)
    partition_file.save(dataclasses.replace(drawn, train=drawn.train[::-1], test=drawn.test[::-1]), dealt)
    words = [*base, "--jobs", 1, "--methods", "fedavg", "fedkper"]
    assert fedkper("sweep", *words, "--partition-file", dealt, "--out", "new") == 0
    asked = (here / "new/sweep.json").read_bytes()
    folder = next(here.glob("new/*fedkper*"))
    whole = (folder / "partition.json").read_bytes()
    shutil.rmtree(folder)
    assert fedkper("paper", "table1", "new", "--run", "--methods", "fedavg", "fedkper", "--seeds", 1) == 0
    assert (folder / "partition.json").read_bytes() == whole
    assert (here / "new/sweep.json").read_bytes() == asked


def test_a_run_that_fails_is_named_and_tried_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_data(here / "tiny.npz")
    base = [*typed(TINY, "workers", 1)[:-2], "--dataset", data, "--rounds", 1, "--seeds", 1, "--jobs", 1]
    code = "class Mine(Method):\n    def merge(self, shared, update):\n        raise ValueError('no way')\n"
    head = "from dataclasses import dataclass\nfrom fedkper.method import Method\n@dataclass(frozen=True)\n"
    (here / "mine.py").write_text(head + code)
    assert fedkper("paper", "table1", "new", *base, "--methods", "./mine.py:Mine") == 1
    said = capsys.readouterr()
    assert "error: 1 run failed: ValueError: no way (mine.py:6)" in said.err
    assert "– unfinished, 0 of 1 rounds: mine.py:Mine" in said.out
    (here / "mine.py").write_text(head + "class Mine(Method):\n    pass\n")
    shutil.rmtree(next(here.glob("new/*Mine*")))  # the file is another one: the run starts anew
    assert fedkper("paper", "table1", "new", *base, "--methods", "fedavg", "--run") == 0
    said = capsys.readouterr()
    assert "running 1 of 1 runs of tiny" in said.err
    assert "and 1 unfinished run of the sweep in new" in said.err
    assert len(list(here.glob("new/*/summary.json"))) == 2


def test_help_is_about_this_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert fedkper("paper", "fig5", "--help") == 0
    said = capsys.readouterr().out
    assert "accuracy over seconds" in said
    assert "--run" in said
    assert "--workers" not in said
