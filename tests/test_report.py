"""The report: numbers equal to those of the runs, sentences no stronger than the seeds, names as they are."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedkper import metrics, runfiles, tables
from fedkper.flower.settings import read_federation
from fedkper.report import verdict
from fedkper.report.chart import _label, _ticks, line_chart
from fedkper.report.collect import collect
from fedkper.report.html import breakable
from fedkper.report.shape import COLUMNS, SCORE_COLUMNS
from terminal import TINY, fedkper, strict, write_data

ROOT = Path(__file__).parents[1]
METHODS = ["fedavg", "fedkper"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds each, five rounds of five clients."""
    folder = tmp_path_factory.mktemp("report")
    data = write_data(folder / "tiny.npz")
    words = ["compare", "--dataset", data, *TINY, "--rounds", 5, "--methods", *METHODS, "--seeds", 1, 2]
    assert fedkper(*words, "--out", folder / "runs") == 0
    return folder / "runs"


class Page(HTMLParser):
    """What a browser would show of a page, and the JSON in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.text, self.scripts, self.tags = "", [""], []
        self.cells: dict[str, list[float | None]] = {}
        self._in, self._method = "", ""
        self.attributes: list[tuple[str, str]] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag in ("script", "style"):
            self._in = "json" if values.get("type") == "application/json" else tag
            self.scripts.append("")
        if tag == "tr":
            self._method = values.get("data-method") or ""
        if tag == "td" and self._method:
            value = values["data-v"] or ""
            self.cells.setdefault(self._method, []).append(float(value) if value else None)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "json":
            self.scripts[-1] += data
        elif not self._in:
            self.text += data

    @property
    def shown(self) -> str:
        return " ".join(self.text.split())

    def table(self, method: str) -> dict[str, float | None]:
        """The seven columns of a method, in the first table of the page."""
        return dict(zip(COLUMNS, self.cells[method], strict=False))


def reported(*runs: Path, out: Path) -> Page:
    assert fedkper("report", *runs, "--out", out) == 0
    return Page(out)


# --- a run made by hand --------------------------------------------------------------------------------


def made(
    folder: Path,
    method: str = "fedavg",
    seed: int = 1,
    acc: list[float | None] | None = None,
    local: list[float | None] | None = None,
    rounds: int | None = None,
    **data: Any,
) -> Path:
    """A run's folder: the global accuracy of each round, and of each client its local accuracy, always."""
    acc, local = acc or [0.5, 0.6], local or [0.9, 0.8, 0.7]
    experiment = {"method": method, "seed": seed, "clients": len(local), "fraction": 1.0}
    experiment |= {"rounds": rounds or len(acc), "dataset": "made.npz"}
    described = {"name": "made", "hash": "h", "classes": ["one", "two"], "train": 10, "test": 5} | data
    stored = {"experiment": experiment, "data": described, "partition": {"hash": "p"}}
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(stored))
    lines = [f"{t},{'' if a is None else a},1,0.5,2,1000,1000" for t, a in enumerate(acc, 1)]
    head = "round,global_acc,train_seconds,merge_seconds,eval_seconds,down_bytes,up_bytes"
    (folder / "rounds.csv").write_text("\n".join([head, *lines]) + "\n")
    lines = [
        f"{t},{k},1,{100 * (k + 1)},30,{1 / len(local)},{'' if a is None else a},{'' if k == 0 else 0.75},0.5"
        for t in range(1, len(acc) + 1)
        for k, a in enumerate(local)
    ]
    head = "round,client,sampled,samples,test_samples,weight,local_acc,local_auc,global_on_local_acc"
    (folder / "clients.csv").write_text("\n".join([head, *lines]) + "\n")
    return folder


def first_screen(*runs: Path) -> verdict.Verdict:
    return collect(runs).sections[0].verdict


# --- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_numbers_of_a_run_are_those_of_its_summary(runs: Path, method: str, tmp_path: Path) -> None:
    page = reported(runs / f"{method}-seed1", out=tmp_path / "r.html")
    summary = strict(runs / f"{method}-seed1" / "summary.json")
    name = {"fedavg": "FedAvg", "fedkper": "FedKPer"}[method]
    assert page.table(name) == {key: summary[key]["mean"] for key in COLUMNS}
    columns = len(COLUMNS) + 2 * 4  # the table, then two of the spread over clients, then the scores
    spread = page.cells[name][len(COLUMNS) : columns]
    want = [summary["spread"][model] for model in ("local_acc", "global_on_local_acc")]
    assert spread == [part[key] for part in want for key in ("mean", "std_clients", "percentile10", "worst")]
    assert page.cells[name][columns:] == [summary["scores"][key]["mean"] for key in SCORE_COLUMNS]


def test_several_seeds_are_averaged(runs: Path, tmp_path: Path) -> None:
    page = reported(runs, out=tmp_path / "r.html")
    for method, name in zip(METHODS, ("FedAvg", "FedKPer"), strict=True):
        curves = [runfiles.read_curves(runs / f"{method}-seed{seed}") for seed in (1, 2)]
        want = metrics.over_runs(curves)
        assert page.table(name) == {key: want[key]["mean"] for key in COLUMNS}
    assert "2 seeds" in page.shown


def test_three_digits_of_each_number_are_printed(runs: Path, tmp_path: Path) -> None:
    page = reported(runs / "fedkper-seed2", out=tmp_path / "r.html")
    for value in (v for v in page.cells["FedKPer"] if v is not None):
        printed = f"{value:.3f}".replace("-", "−")
        assert f">{'0.000' if printed == '−0.000' else printed}<" in page.source


def test_the_interval_over_seeds_is_students() -> None:
    draw = np.random.default_rng(3)
    for n in (2, 3, 10, 16):
        values = draw.normal(0.1, 0.05, n).tolist()
        found = verdict.over_seeds(values)
        low, high = stats.t.interval(0.95, n - 1, np.mean(values), stats.sem(values))
        assert found is not None
        assert found.low is not None
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert verdict.over_seeds([0.1]) == (0.1, None, None, 1)
    assert verdict.over_seeds([]) is None


def test_a_line_ends_inside_long_words_only_and_at_signs() -> None:
    assert breakable("FedProx: mu=0.01") == "FedProx: mu=0.01"
    assert breakable("FedKPer: aggregation=false") == "FedKPer: aggregation=<wbr>false"
    assert (
        breakable("granulocytes(myelocytes, <b>x</b>") == "granulocytes(<wbr>myelocytes, &lt;b&gt;x&lt;/b&gt;"
    )
    assert breakable("") == ""


# --- the first screen ----------------------------------------------------------------------------------


def test_a_lead_that_rounds_to_nothing_is_not_called_zero(tmp_path: Path) -> None:
    made(tmp_path / "a", acc=[0.5, 0.5])
    made(tmp_path / "b", "fedkper", acc=[0.5, 0.5002])
    assert first_screen(tmp_path).cards[0].lines == ("Ahead of FedAvg by less than 0.1 points.",)


def test_one_seed_is_said_to_show_no_spread(tmp_path: Path) -> None:
    made(tmp_path / "a", acc=[0.5, 0.5])
    made(tmp_path / "b", "fedkper", acc=[0.6, 0.6])
    found = first_screen(tmp_path)
    assert found.headline == (
        "FedKPer comes first on every question below (3 of them together with others). "
        "One seed does not show whether that is chance."
    )
    assert found.cards[0].lines == ("Ahead of FedAvg by 10.0 points.",)
    assert "no spread over seeds is known" in found.care[0]


def test_equal_methods_are_called_equal(tmp_path: Path) -> None:
    made(tmp_path / "a")
    made(tmp_path / "b", "ditto")
    found = first_screen(tmp_path)
    assert found.headline == "All methods are equal on every question that has an answer."
    assert {card.best for card in found.cards} == {("FedAvg", "Ditto")}


def test_one_method_is_compared_with_nothing(tmp_path: Path) -> None:
    page = reported(made(tmp_path / "a"), out=tmp_path / "r.html")
    assert "One method was run, FedAvg, so there is nothing to compare it with." in page.shown
    assert "Is a difference more than chance?" not in page.shown


def test_other_partitions_have_a_table_of_their_own(tmp_path: Path) -> None:
    made(tmp_path / "a", acc=[0.5, 0.5])
    other = made(tmp_path / "b", acc=[0.7, 0.7])
    stored = strict(other / "run.json")
    stored["experiment"]["partition_seed"], stored["partition"]["hash"] = 2, "q"
    (other / "run.json").write_text(json.dumps(stored))
    section = collect([tmp_path]).sections[0]
    assert section.rows[0].cells["global_acc"].value == 0.5
    assert [(seed, a.value) for _, seed, a, _, _ in section.partitions] == [("1", 0.5), ("2", 0.7)]


@pytest.mark.parametrize(
    ("fedavg", "fedkper", "said", "certain"),
    [
        ((0.40, 0.60), (0.65, 0.45), "smaller than the spread over seeds (14.1), no difference shown", False),
        ((0.40, 0.42), (0.44, 0.52), "larger than the spread over seeds (5.7), not certain", False),
        ((0.40, 0.42), (0.60, 0.62), "Ahead of FedAvg by 20.0 points (95% interval 20.0 to 20.0", True),
    ],
    ids=["noise", "uncertain", "clear"],
)
def test_a_lead_is_held_against_the_seeds(
    fedavg: tuple[float, float], fedkper: tuple[float, float], said: str, certain: bool, tmp_path: Path
) -> None:
    for method, values in (("fedavg", fedavg), ("fedkper", fedkper)):
        for seed, value in enumerate(values, 1):
            made(tmp_path / f"{method}{seed}", method, seed, acc=[value, value])
    card = first_screen(tmp_path).cards[0]
    assert card.best == ("FedKPer",)
    assert said in card.lines[0]
    assert card.certain is certain


def test_a_lead_is_that_of_the_seeds_which_both_have(tmp_path: Path) -> None:
    """Seed 2 of FedAvg alone is bad luck: it may neither widen a lead nor make one, at no client either."""
    made(tmp_path / "a1", acc=[0.5, 0.5], local=[0.6, 0.6, 0.6])
    made(tmp_path / "a2", seed=2, acc=[0.1, 0.1], local=[0.2, 0.2, 0.2])
    made(tmp_path / "b", "fedkper", acc=[0.6, 0.6], local=[0.7, 0.5, 0.6])
    made(tmp_path / "c", "ditto", acc=[0.4, 0.4], local=[0.4, 0.4, 0.4])
    found = first_screen(tmp_path)
    assert found.cards[0].lines == (
        "Ahead of Ditto by 20.0 points.",
        "Ahead of FedAvg by 10.0 points on the seed that both have.",
    )
    assert found.cards[1].lines[1] == "Ahead of FedAvg by 0.0 points on the seed that both have."
    assert "1 of 3 clients do better" in found.whom[0]
    assert "1 does worse, 1 the same" in found.whom[0]
    assert "It costs most at client 1 (−10.0 points)." in found.whom


def test_a_method_that_other_seeds_put_first_shares_the_place(tmp_path: Path) -> None:
    made(tmp_path / "a1", acc=[0.7, 0.7])
    made(tmp_path / "a2", seed=2, acc=[0.1, 0.1])
    made(tmp_path / "b", "fedkper", acc=[0.6, 0.6])
    card = first_screen(tmp_path).cards[0]
    assert card.best == ("FedKPer", "FedAvg")
    assert card.lines == ("By all seeds FedKPer is first, on those that both have FedAvg.",)
    assert card.certain is False


def test_methods_without_a_common_seed_are_not_compared(tmp_path: Path) -> None:
    for seed in (1, 2):
        made(tmp_path / f"a{seed}", "fedavg", seed, acc=[0.5, 0.5])
        made(tmp_path / f"b{seed}", "fedkper", seed + 2, acc=[0.6, 0.6])
    found = first_screen(tmp_path)
    assert found.cards[0].lines == ("Not compared with FedAvg: no seed has both.",)
    assert found.whom[0] == "No client can be compared with FedAvg: no seed has both."
    assert found.headline.endswith("The seeds they share do not show whether that is chance.")
    assert (found.pairs[0].better, found.pairs[0].worse) == (0, 0)


def test_some_leads_may_be_certain_where_others_rest_on_one_seed(tmp_path: Path) -> None:
    for seed in (1, 2):
        made(tmp_path / f"a{seed}", "fedavg", seed, acc=[0.4 + seed / 100, 0.4], local=[0.6, 0.6, 0.6])
        made(tmp_path / f"b{seed}", "fedkper", seed, acc=[0.6 + seed / 100, 0.6], local=[0.8, 0.8, 0.8])
    made(tmp_path / "c", "ditto", acc=[0.1, 0.1], local=[0.7, 0.7, 0.7])
    found = first_screen(tmp_path)
    assert [card.certain for card in found.cards[:2]] == [True, None]
    assert found.headline.endswith("1 of these leads over the next method is certain with these seeds.")


def test_a_method_that_never_merged_has_no_rank(tmp_path: Path) -> None:
    """It cannot have forgotten anything: what it did not learn."""
    made(tmp_path / "a", acc=[0.5, 0.5])
    idle = made(tmp_path / "b", "fedkper", acc=[0.9, 0.9])
    table = (idle / "clients.csv").read_text().splitlines()
    lines = [f"{table[0]},weight", *(f"{row},0.0" for row in table[1:])]
    (idle / "clients.csv").write_text("\n".join(lines) + "\n")
    events = [{"event": "kept", "round": t, "reason": "no update"} for t in (1, 2)]
    (idle / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    found = first_screen(tmp_path)
    assert {card.best for card in found.cards} == {("FedAvg",)}
    assert "FedKPer never merged an update: it has no rank." in found.care


def test_refused_updates_are_on_the_first_screen(tmp_path: Path) -> None:
    made(tmp_path / "a")
    folder = made(tmp_path / "b", "fedkper")
    event = {"event": "rejected", "round": 1, "client": 1, "reason": "not finite"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert (
        "Updates were refused in FedKPer, whose numbers rest on fewer; see Warnings."
        in first_screen(tmp_path).care
    )


def test_a_run_with_one_damaged_file_is_left_out_by_name(tmp_path: Path) -> None:
    made(tmp_path / "a")
    (made(tmp_path / "b", "fedkper") / "events.jsonl").write_text('{"round": 1}\n')
    found = collect([tmp_path])
    assert [row.name for row in found.sections[0].rows] == ["FedAvg"]
    assert "b/events.jsonl: damaged in line 1" in found.notes[0]


def test_for_whom_names_those_who_lose(tmp_path: Path) -> None:
    made(tmp_path / "a", local=[0.5, 0.5, 0.9])
    made(tmp_path / "b", "fedkper", acc=[0.7, 0.8], local=[0.8, 0.7, 0.6])
    said = " ".join(first_screen(tmp_path).whom)
    assert (
        "With FedKPer, 2 of 3 clients do better on their own patients than with FedAvg, 1 does worse" in said
    )
    assert "It costs most at client 2 (−30.0 points)" in said
    assert "Lowest local accuracy with FedKPer: client 2 (60.0%)" in said


def test_the_price_is_that_of_all_clients_and_held_against_the_other(tmp_path: Path) -> None:
    made(tmp_path / "a")
    made(tmp_path / "b", "fedkper", acc=[0.7, 0.8])
    assert first_screen(tmp_path).price == (
        "FedKPer: 2.0 kB sent in a round, down and up (1.00 times FedAvg); "
        "1.00 s of training in a round on the machine that ran it (1.00 times FedAvg)."
    )


def test_another_partition_that_turns_the_order_round_is_on_the_first_screen(tmp_path: Path) -> None:
    for seed, plain in {1: 0.5, 2: 0.7, 3: 0.5}.items():
        for method, acc in (("fedavg", plain), ("fedkper", 0.6)):
            folder = made(tmp_path / f"{method}{seed}", method, acc=[acc, acc])
            stored = strict(folder / "run.json")
            stored["experiment"]["partition_seed"], stored["partition"]["hash"] = seed, f"{seed}"
            (folder / "run.json").write_text(json.dumps(stored))
    first, *rest = first_screen(tmp_path).care
    assert first == (
        "With the data dealt out otherwise (partition seed 2), FedAvg and not FedKPer does best "
        "for patients of no client: 70.0% against 60.0%."
    )
    assert not any("dealt out otherwise" in line for line in rest)


def test_a_busy_machine_makes_no_method_dear(tmp_path: Path) -> None:
    """Of each round the quickest seed counts: each of the two was disturbed in one round."""
    for seed, slow in ((1, 1), (2, 2)):
        table = made(tmp_path / f"a{seed}", seed=seed) / "rounds.csv"
        head, *rows = table.read_text().splitlines()
        cells = [row.split(",") for row in rows]
        cells[slow - 1][head.split(",").index("train_seconds")] = "100"
        table.write_text("\n".join([head, *map(",".join, cells)]) + "\n")
    price = collect([tmp_path]).sections[0].price[0].cells
    assert price["train_seconds"].value == 1.0
    assert price["down_bytes"].value == 1000


# --- what is missing -----------------------------------------------------------------------------------


def test_what_is_not_defined_is_a_dash_with_its_reason_and_a_gap(tmp_path: Path) -> None:
    made(tmp_path / "a", acc=[0.5, None, 0.4, 0.3], local=[0.9, None, 0.7])
    page = reported(tmp_path / "a", out=tmp_path / "r.html")
    assert page.table("FedAvg")["global_consistency"] is None
    assert "global consistency: no window: the curve has no second record high" in page.shown
    assert ("title", "not defined: no window: the curve has no second record high") in page.attributes
    assert "mean over 3 rounds" in page.source
    curve = re.search(r'class="line [^>]* d="([^"]*)"><title>FedAvg', page.source)
    assert curve is not None
    assert curve[1].count("M") == 2


def test_the_auc_says_over_how_many_clients_it_is(tmp_path: Path) -> None:
    page = reported(made(tmp_path / "a"), out=tmp_path / "r.html")
    assert "AUC over 2 of 3 clients" in page.shown


def test_runs_of_a_version_that_recorded_less(tmp_path: Path) -> None:
    run, old = ROOT / "results/blood/arms/bloodmnist_fedkper-aggregation-false_seed1", tmp_path / "old"
    old.mkdir()
    shutil.copy(run / "run.json", old)
    for name in ("rounds.csv", "clients.csv"):
        rows = runfiles.read_rows(run / name)
        kept = [c for c in rows[0] if not c.endswith(("_auc", "_f1", "_ece", "balanced_acc"))]
        lines = [",".join(row[c] for c in kept) for row in rows]
        (old / name).write_text("\n".join([",".join(kept), *lines]) + "\n")
    page = reported(old, out=tmp_path / "r.html")
    summary = strict(run / "summary.json")
    assert page.table("FedKPer: aggregation=false") == {key: summary[key]["mean"] for key in COLUMNS}
    for part in ("Confusion of the global model", "Calibration"):
        assert f"{part}: not recorded by the version that made these runs" in page.shown
    assert "CC BY 4.0" in page.shown
    assert "Every setting is that of the paper’s protocol" in page.shown
    assert (
        "the checksum (MD5 f2d19c2280cfff69eb01caea6cb93cc1) is not that of the official file" in page.shown
    )


def test_no_word_of_a_script_that_failed_and_every_json_is_strict(runs: Path, tmp_path: Path) -> None:
    made(tmp_path / "odd" / "a", acc=[0.0, None], local=[None, None, None])
    words = re.compile(r"\b(nan|inf|infinity|undefined|null)\b|\bNone\b(?!:)", re.IGNORECASE)
    old = ROOT / "results" / "methods-pneumonia"
    for number, folder in enumerate([runs, tmp_path / "odd", old]):
        page = reported(folder, out=tmp_path / f"{number}.html")
        assert not words.search(page.shown)
        for name, value in page.attributes:
            assert name == "content" or not words.search(value) or value == "none", (name, value)
        blocks = [text for text in page.scripts if text]
        for block in blocks:
            json.loads(block, parse_constant=lambda name: pytest.fail(name))
        assert blocks


def test_unfinished_runs_are_in_no_number(tmp_path: Path) -> None:
    made(tmp_path / "a")
    made(tmp_path / "b", "fedkper", rounds=2, acc=[0.9])
    section = collect([tmp_path]).sections[0]
    assert [row.name for row in section.rows] == ["FedAvg"]
    assert any("has done 1 of 2 rounds and is in no number here" in text for _, text in section.warnings)
    section = collect([tmp_path / "b"]).sections[0]
    assert [row.cells["global_acc"].value for row in section.rows] == [0.9]
    assert ("Runs", "no run is finished: all numbers are of the first 1 of 2 rounds") in section.warnings


# --- clients, classes, events --------------------------------------------------------------------------


def test_who_holds_what_is_counted_from_the_labels(runs: Path) -> None:
    section = collect([runs]).sections[0]
    assert section.holdings is not None
    stored = strict(runs / "fedavg-seed1" / "partition.json")
    with np.load(runs.parent / "tiny.npz") as data:
        labels = data["train_labels"].ravel()
    for k, counts in section.holdings.counts.items():
        own = labels[[*stored["train"][k], *stored["test"][k]]]
        assert list(counts) == np.bincount(own, minlength=3).tolist()


def test_without_the_data_the_local_test_parts_are_counted(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedavg-seed1", tmp_path / "run")
    stored = strict(tmp_path / "run" / "run.json")
    stored["experiment"]["dataset"] = "elsewhere.npz"
    (tmp_path / "run" / "run.json").write_text(json.dumps(stored))
    held = collect([tmp_path / "run"]).sections[0].holdings
    assert held is not None
    assert "local test parts, a fifth" in held.what
    sizes = runfiles.read_curves(tmp_path / "run").local_n
    assert {k: sum(counts) for k, counts in held.counts.items()} == {k: n for k, n in sizes.items() if n}


def test_other_data_under_the_same_name_are_not_counted(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedavg-seed1", tmp_path / "run")
    with np.load(runs.parent / "tiny.npz") as data:
        np.savez(tmp_path / "tiny.npz", **{k: v[:20] for k, v in data.items()})
    stored = strict(tmp_path / "run" / "run.json")
    stored["execution"]["folder"] = str(tmp_path)
    (tmp_path / "run" / "run.json").write_text(json.dumps(stored))
    held = collect([tmp_path / "run"]).sections[0].holdings
    assert held is not None
    assert "local test parts, a fifth" in held.what


def test_the_worst_client_comes_first_with_what_may_explain_it(tmp_path: Path) -> None:
    made(tmp_path / "a", local=[0.2, 0.9, 0.9, 0.9])
    (tmp_path / "a" / "confusion.csv").write_text(
        "round,model,client,true,predicted,count\n"
        "2,global,,0,1,10\n2,global,,1,1,10\n"
        "2,global_on_local,0,0,1,29\n2,global_on_local,0,1,1,1\n2,global_on_local,1,1,1,30\n"
    )
    worst, *others = collect([tmp_path / "a"]).sections[0].clients
    assert worst.client == 0
    assert worst.why == (
        "few training samples (100, median 250)",
        "nearly one class (one, 97%)",
        "much of what the global model finds badly (one, recall 0.00)",
    )
    assert [row.why for row in others if row.client == 3] == [()]


def test_the_classes_lost_in_a_fall_are_named(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", acc=[0.5, 0.75, 0.25, 0.8])
    right = [(5, 5), (10, 5), (0, 5), (10, 6)]
    rows = [f"{t},global,,{c},{c},{n}" for t, pair in enumerate(right, 1) for c, n in enumerate(pair) if n]
    rows += [
        f"{t},global,,{c},{1 - c},{10 - n}" for t, pair in enumerate(right, 1) for c, n in enumerate(pair)
    ]
    rows = [row for row in rows if not row.endswith(",0")]
    (folder / "confusion.csv").write_text(
        "\n".join(["round,model,client,true,predicted,count", *rows]) + "\n"
    )
    (fall,) = collect([folder]).sections[0].forgotten
    assert (fall.first, fall.lowest, fall.last, fall.high, fall.low, fall.ended) == (
        2,
        3,
        4,
        0.75,
        0.25,
        True,
    )
    assert fall.lost == (("one", 1.0, 0.0),)


def test_the_confusion_keeps_all_classes_in_their_order(runs: Path) -> None:
    section = collect([runs]).sections[0]
    assert {matrix.name for matrix in section.matrices} == {"FedAvg", "FedKPer"}
    for matrix in section.matrices:
        assert [c for c, _ in matrix.classes] == [0, 1, 2]
        assert matrix.totals == (100, 100, 100)  # ten of a class, five rounds, two seeds


def test_events_are_told_with_round_client_and_reason(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    events = [
        {"event": "rejected", "round": t, "client": 1, "reason": "a weight is not finite"} for t in (1, 2)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    warnings = dict(collect([folder]).sections[0].warnings)
    told = warnings["FedAvg, seed 1: an update was refused"]
    assert told == "2 times: a weight is not finite (round 1, client 1; round 2, client 1)"


def test_the_command_to_run_it_again_gives_the_same_experiments(runs: Path, tmp_path: Path) -> None:
    (command,) = collect([runs]).sections[0].commands
    words = shlex.split(command)
    assert words[0] == "fedkper"
    assert fedkper(*words[1:], "--workers", 1, "--out", tmp_path / "again") == 0
    for place in ("fedavg-seed1", "fedkper-seed2"):
        again = strict(tmp_path / "again" / place / "run.json")["experiment"]
        assert again == strict(runs / place / "run.json")["experiment"]


def test_the_command_of_a_federation_founds_one_with_the_same_settings(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    stored = strict(folder / "run.json")
    stored["experiment"]["fraction"] = 0.5
    rounds = {"minimum": 2, "wait": 30.0, "limit": 90.5, "tries": 1}
    stored["federation"] = {"sites": ["ams", "ber", "cph"], **rounds}
    del stored["partition"]
    (folder / "run.json").write_text(json.dumps(stored))
    (command,) = collect([tmp_path]).sections[0].commands
    given = {"FOLDER": tmp_path / "new", "made.npz": "synthetic"}
    assert fedkper(*[given.get(word, word) for word in shlex.split(command)[1:]]) == 0
    federation = read_federation(tmp_path / "new")
    assert dataclasses.asdict(federation.rounds) == rounds
    assert federation.experiment.fraction == 0.5


def test_ticks_are_labelled_as_they_are() -> None:
    for low, high in ((0.72, 0.82), (0.1, 0.9), (-0.02, 0.01), (0.5, 0.5), (0.8111, 0.8115)):
        ticks = _ticks(low, high)
        assert [float(_label(t, ticks).replace("−", "-")) for t in ticks] == pytest.approx(ticks, abs=1e-9)


def test_a_band_has_a_gap_where_a_value_is_missing() -> None:
    mean = (0.5, 0.5, None, 0.5, 0.5)
    chart = line_chart("global_acc", "t", "a", {"m": (mean, (0.1,) * 5)}, {"m": 0}, {"m"})
    assert chart is not None
    assert chart.lines[0].band.count("Z") == 2


# --- names, sizes, refusals ----------------------------------------------------------------------------

MARKUP = "<b>x</b><script>alert(1)</script>"


def test_markup_in_names_is_shown_as_it_is(tmp_path: Path) -> None:
    classes = [MARKUP, 'a"b&c</script><img src=x onerror=alert(1)>']
    folder = made(
        tmp_path / "a", "my<i>file</i>.py:Mine", classes=classes, licence=MARKUP, citation="</dd>" + MARKUP
    )
    (folder / "confusion.csv").write_text(
        "round,model,client,true,predicted,count\n1,global,,0,0,5\n2,global,,0,1,5\n"
    )
    page = reported(folder, out=tmp_path / "r.html")
    assert "i>.py:Mine" in page.shown  # a method is shown by the last part of its path
    for text in (*classes, MARKUP):
        assert text in page.shown
    assert not {"i", "img"} & set(page.tags)
    assert page.source.count("<script") == 2  # the values of the curves, and the page's own
    assert html.escape(MARKUP) in page.source


def test_it_asks_for_nothing_outside(runs: Path, tmp_path: Path) -> None:
    page = reported(runs, out=tmp_path / "r.html")
    links = [value for name, value in page.attributes if name in ("href", "src", "srcset", "action", "data")]
    assert all(link.startswith("#") or link == "data:," for link in links)
    assert not re.search(r"@import|url\(|https?://", page.source)
    assert "default-src 'none'" in page.source
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link != "data:,"} <= set(ids)


def test_many_clients_and_methods_are_cut_worst_first(tmp_path: Path) -> None:
    local = [round(0.99 - 0.0005 * k, 4) for k in range(1000)]
    made(tmp_path / "a", local=list(local))
    made(tmp_path / "b", "fedkper", acc=[0.7, 0.8], local=[*(a + 0.005 for a in local[:-1]), 0.01])
    page = reported(tmp_path, out=tmp_path / "r.html")
    assert "The 40 clients of 1000 with the lowest local accuracy under FedKPer are shown" in page.shown
    section = collect([tmp_path]).sections[0]
    assert section.clients[0].client == 999
    assert len(section.clients) == 40
    assert len(page.source) < 300_000


def test_settings_have_sections_of_their_own(tmp_path: Path) -> None:
    made(tmp_path / "a" / "x", acc=[0.5, 0.5])
    made(tmp_path / "b" / "deep" / "x", acc=[0.5, 0.5, 0.5])
    page = reported(tmp_path, out=tmp_path / "r.html")
    assert "made, 3 clients, 2 rounds" in page.shown
    assert "made, 3 clients, 3 rounds" in page.shown


def test_without_out_it_goes_into_the_first_folder(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables.out, "_width", 200)
    assert fedkper("report", runs) == 0
    assert capsys.readouterr().out == f"report: {runs / 'report.html'}\n"
    assert (runs / "report.html").is_file()
    assert fedkper("report", runs) == 0  # again, over the one before


def test_wrong_input_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    for words, naming in (
        (["report"], "RUNS is missing"),
        (["report", tmp_path / "none"], "none: no such folder"),
        (["report", tmp_path / "empty"], "holds no run"),
        (["report", tmp_path / "broken"], "run.json: damaged"),
        (["report", tmp_path / "a", "--out", tmp_path], "is a folder; name a file"),
        (["report", tmp_path / "a", "--out", tmp_path / "no" / "r.html"], "there is no folder"),
        (["report", tmp_path / "a", "--colour"], "--colour: no such option"),
    ):
        assert fedkper(*words) == 2, words
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1, said.err
        assert naming in said.err
    assert not list(tmp_path.rglob("*.html"))


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "runs" / "a")
    broken = made(tmp_path / "runs" / "b", "fedkper")
    (broken / "rounds.csv").write_text("round,global_acc\n1,nan\n")
    page = reported(tmp_path / "runs", out=tmp_path / "r.html")
    assert "rounds.csv: damaged in line 2" in capsys.readouterr().err
    assert "Left out of this report" in page.shown
    assert not math.isnan(page.table("FedAvg")["global_acc"] or math.nan)
