"""Scores beyond accuracy: equal to scikit-learn's, and defined where a site lacks a class."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference

from fedkper import runfiles
from fedkper.errors import InputError
from fedkper.scores import BINS, Answers, balanced_accuracy, macro_f1, recalls
from terminal import TINY, fedkper


def answers(seed: int, n: int, classes: int, present: int | None = None, coarse: bool = False) -> Answers:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=draw)
    y = torch.randint(present or classes, (n,), generator=draw)
    return Answers(logits.round() if coarse else logits, y)


@pytest.mark.parametrize("coarse", [False, True], ids=["continuous", "ties"])
@pytest.mark.parametrize("classes", [2, 8])
def test_equal_to_the_reference(classes: int, coarse: bool) -> None:
    a = answers(classes, 400, classes, coarse=coarse)
    y, p = a.y.numpy(), a.probabilities()
    assert p is not None
    said = p.argmax(1)
    assert a.accuracy() == pytest.approx(reference.accuracy_score(y, said))
    counts = a.confusion()
    assert (counts[:, :-1] == reference.confusion_matrix(y, said, labels=range(classes))).all()
    assert balanced_accuracy(counts) == pytest.approx(reference.balanced_accuracy_score(y, said))
    assert macro_f1(counts) == pytest.approx(reference.f1_score(y, said, average="macro"))
    if classes == 2:
        assert a.auc() == pytest.approx(reference.roc_auc_score(y, p[:, 1]))
    else:
        assert a.auc() == pytest.approx(reference.roc_auc_score(y, p, multi_class="ovr"))
    assert recalls(counts) == pytest.approx(reference.recall_score(y, said, average=None))


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(2, 6))
def test_bounds(seed: int, n: int, classes: int) -> None:
    a = answers(seed, n, classes, coarse=True)
    for value in (a.auc(), a.calibration_error(), balanced_accuracy(a.confusion()), macro_f1(a.confusion())):
        assert value is None or 0 <= value <= 1
    assert a.confusion().sum() == n == sum(b.samples for b in a.bins())


def test_calibration_by_hand() -> None:
    # Two bins: two samples at .8 of which one is right, one at .6 that is right.
    p = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6]])
    a = Answers(p.log(), torch.tensor([0, 1, 1]))
    assert a.calibration_error() == pytest.approx((2 * 0.3 + 0.4) / 3)
    assert [(b.number, b.samples) for b in a.bins()] == [(9, 1), (12, 2)]
    sure = Answers(torch.tensor([[100.0, 0.0]]), torch.tensor([0]))
    assert sure.bins()[0].number == BINS - 1
    assert sure.calibration_error() == 0


def test_sites_that_lack_classes() -> None:
    """A fault of other systems: an undefined ranking counted as 0, 0.5 or 1, or the class axis shortened."""
    sites = [answers(site, 40, 5, present) for site, present in enumerate((1, 2, 5))]
    assert [s.auc() is None for s in sites] == [True, False, False]
    p, y = sites[1].probabilities(), sites[1].y.numpy()
    assert p is not None
    by_class = [reference.roc_auc_score(y == c, p[:, c]) for c in (0, 1)]
    assert sites[1].auc() == pytest.approx(np.mean(by_class))
    assert all(s.confusion().shape == (5, 6) for s in sites)
    assert recalls(sites[0].confusion())[1:] == [None] * 4
    assert balanced_accuracy(sites[0].confusion()) == sites[0].accuracy()


def test_no_answer_and_no_samples() -> None:
    broken = answers(0, 10, 3)
    broken.logits[4, 1] = float("nan")
    broken.logits[5] = float("inf")
    counts = broken.confusion()
    assert counts.sum() == 10
    assert counts[:, -1].sum() == 2
    assert broken.auc() is None
    assert broken.calibration_error() is None
    assert broken.bins() == []
    recall, whole = balanced_accuracy(counts), broken.accuracy()
    assert recall is not None
    assert whole == counts.diagonal().sum() / 10
    none = Answers(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    assert none.accuracy() is none.auc() is none.calibration_error() is None
    assert balanced_accuracy(none.confusion()) is macro_f1(none.confusion()) is None
    assert none.confusion().shape == (3, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores") / "run"
    assert fedkper("run", *TINY, "--method", "fedavg", "--rounds", 12, "--out", folder) == 0
    return folder


def test_what_a_run_records(folder: Path) -> None:
    with open(folder / "rounds.csv") as file:
        rounds = list(csv.DictReader(file))
    with open(folder / "clients.csv") as file:
        clients = list(csv.DictReader(file))
    found = runfiles.read_confusion(folder)
    assert Counter(model for _, model, _ in found) == {"global": 12, "local": 24, "global_on_local": 50}
    assert {t for t, model, _ in found if model == "global_on_local"} == set(range(1, 11))
    for row in rounds:
        counts = found[int(row["round"]), "global", None]
        assert counts.diagonal().sum() / counts.sum() == float(row["global_acc"])
        assert balanced_accuracy(counts) == float(row["global_balanced_acc"])
        assert macro_f1(counts) == float(row["global_f1"])
    for row in clients:
        here = int(row["round"]), "local", int(row["client"])
        assert (here in found) == (row["sampled"] == "1")
        if here in found:
            assert found[here].diagonal().sum() / found[here].sum() == float(row["local_acc"])
    bins = runfiles.read_calibration(folder)
    assert list(bins) == list(range(1, 11))
    size = found[10, "global", None].sum()
    gap = sum(b.samples * abs(b.confidence - b.accuracy) for b in bins[10]) / size
    assert gap == pytest.approx(float(rounds[9]["global_ece"]))
    scores = json.loads((folder / "summary.json").read_text())["scores"]
    assert scores["global_auc"]["final"] == float(rounds[-1]["global_auc"])


def test_spread_over_clients(folder: Path) -> None:
    with open(folder / "clients.csv") as file:
        last = {int(r["client"]): float(r["local_acc"]) for r in csv.DictReader(file) if r["local_acc"]}
    spread = json.loads((folder / "summary.json").read_text())["spread"]["local_acc"]
    values = list(last.values())
    assert spread["clients"] == len(values)
    assert spread["std_clients"] == pytest.approx(np.std(values))
    assert spread["percentile10"] == pytest.approx(np.quantile(values, 0.1))
    assert spread["worst"] == min(values)


@pytest.mark.parametrize(
    "line", ["1,global,,9,0,5", "1,global,,0,99,5", "1,other,,0,0,5", "1,global,,0,0,-1", "1,global,x,0,0,1"]
)
def test_a_damaged_table_is_named(folder: Path, line: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    (tmp_path / "confusion.csv").write_text(f"round,model,client,true,predicted,count\n{line}\n")
    with pytest.raises(InputError, match=r"confusion\.csv: damaged"):
        runfiles.read_confusion(tmp_path)
