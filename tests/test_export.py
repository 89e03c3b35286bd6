"""Numbers and models out of runs: the model that was scored, its files, its card; the long table."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from fedkper import checkpoint, execute, folders, run, tree
from fedkper.data import partition_file
from fedkper.errors import InputError
from fedkper.export import export, onnxfile, predict, tidy
from fedkper.methods import METHODS
from fedkper.run import Execution
from fedkper.task import pixels
from terminal import TINY, column, fedkper, results, strict, write_data

PERSONAL = ("fedper", "fedas", "ditto", "fedkd", "fedala", "moon")
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.norm = nn.BatchNorm2d(shape[2])
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(shape[0] * shape[1] * shape[2], classes)

    def forward(self, x):
        return self.last(self.drop(self.norm(x)).flatten(1))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def tiny(place: Path) -> Path:
    return write_data(place / "tiny.npz")


@pytest.fixture(scope="module")
def runs(place: Path, tiny: Path) -> dict[str, Path]:
    """A run of every method, which learns."""
    words = ["compare", "--dataset", tiny, *TINY, "--lr", 0.05, "--rounds", 3, "--methods", *METHODS]
    assert fedkper(*words, "--out", place / "all") == 0
    return {name: place / "all" / f"{name}-seed1" for name in METHODS}


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Types a command that must be refused in one sentence, with nothing left behind. -> the message"""

    def type_it(*words: object, code: int = 2) -> str:
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert fedkper(*words) == code
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1, said
        assert sorted(tmp_path.rglob("*")) == before
        return said

    return type_it


def last(folder: Path, table: str, name: str, **where: int) -> float:
    """A cell of the last line of a table in which the other columns are as said."""
    rows = list(csv.DictReader((folder / table).read_text().splitlines()))
    return float([r for r in rows if all(int(r[k]) == v for k, v in where.items())][-1][name])


# --- the model that was scored -------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_global_model_is_the_one_that_was_scored(
    name: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    assert fedkper("export", runs[name], "--model", tmp_path / "m") == 0
    model = predict.load(tmp_path / "m")
    dataset = run.load(run.stored_experiment(runs[name]), Execution())
    accuracy = (model.probabilities(dataset.test_x).argmax(1) == dataset.test_y).mean()
    assert accuracy == pytest.approx(last(runs[name], "rounds.csv", "global_acc"))
    assert model.about["of"] == {
        "client": None,
        "model": METHODS[name].scored[0],
        "round": 3,
        "rounds_done": 3,
        "rounds_planned": 3,
    }


@pytest.mark.parametrize("name", PERSONAL)
def test_a_personal_model_is_the_one_of_the_last_visit(
    name: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    visits = checkpoint.restore(runs[name] / "checkpoint")[2]
    client, visit = max(visits.items(), key=lambda item: (-item[1], item[0]))  # the longest ago
    assert fedkper("export", runs[name], "--model", tmp_path / "m", "--client", client) == 0
    about = strict(tmp_path / "m" / "model.json")
    assert (about["of"]["client"], about["of"]["round"]) == (client, visit)

    model = predict.load(tmp_path / "m")
    dataset = run.load(run.stored_experiment(runs[name]), Execution())
    part = partition_file.load(runs[name] / "partition.json").test[client]
    accuracy = (model.probabilities(dataset.train_x[part]).argmax(1) == dataset.train_y[part]).mean()
    assert about["checks"]["local_test"]["accuracy"] == pytest.approx(accuracy)
    if name != "fedper":  # whose body has moved on since
        scored = last(runs[name], "clients.csv", "local_acc", client=client, round=visit)
        assert accuracy == pytest.approx(scored)


def test_fedper_gives_a_client_the_newest_body_with_its_own_head(runs: dict[str, Path]) -> None:
    done, shared, visits, _ = checkpoint.restore(runs["fedper"] / "checkpoint")
    client = next(k for k, visit in visits.items() if visit < done)
    own = tree.load(checkpoint.own_path(runs["fedper"] / "checkpoint", client, visits[client]))
    theta = export.take(runs["fedper"], client).theta
    assert {k for k in theta if torch.equal(theta[k], shared.get(k, torch.empty(0)))} == set(shared)
    assert {k for k in theta if torch.equal(theta[k], own.get(k, torch.empty(0)))} == set(own)


@pytest.mark.parametrize("name", [n for n in METHODS if n not in PERSONAL])
def test_a_method_without_personal_models_says_so(
    name: str, runs: dict[str, Path], tmp_path: Path, refused: Any
) -> None:
    said = refused("export", runs[name], "--model", tmp_path / "m", "--client", 0)
    assert f"--client 0: under {name} a client keeps no model" in said


def test_the_model_scored_last_survives_a_round_without_updates(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """Resumed, FedPer's mean head is at hand again; before, the initial one took its place."""
    folder = shutil.copytree(runs["fedper"], tmp_path / "run")
    state, done = tree.load(folder / "checkpoint" / "scored-000003.safetensors"), 3
    assert (
        checkpoint.differing(folder / "checkpoint", done).keys()
        == state.keys()
        == {"head.weight", "head.bias"}
    )
    before = last(folder, "rounds.csv", "global_acc")
    words = ["run", "--resume", folder, "--rounds", 4, "--workers", 1]
    values = strict(folder / "run.json")
    values["experiment"]["lr"] = 1e30  # every update of the round is refused
    (folder / "run.json").write_text(json.dumps(values))
    assert fedkper(*words) == 0
    assert last(folder, "rounds.csv", "global_acc") == before
    assert torch.equal(export.take(folder).theta["head.bias"], state["head.bias"])


def test_a_run_of_an_earlier_version(runs: dict[str, Path], tmp_path: Path, refused: Any) -> None:
    """Its checkpoint does not say what was scored: good enough where that is the aggregate."""
    for name in ("fedavg", "fedper"):
        folder = shutil.copytree(runs[name], tmp_path / name)
        for path in (folder / "checkpoint").glob("state-*.json"):
            state = json.loads(path.read_text())
            del state["scored"]
            path.write_text(json.dumps(state))
    assert fedkper("export", tmp_path / "fedavg", "--model", tmp_path / "m") == 0
    said = refused("export", tmp_path / "fedper", "--model", tmp_path / "n")
    assert "earlier version" in said
    assert "--rounds 4" in said
    assert fedkper("run", "--resume", tmp_path / "fedper", "--rounds", 4, "--workers", 1) == 0
    assert fedkper("export", tmp_path / "fedper", "--model", tmp_path / "n") == 0


def test_damage_to_what_was_scored_is_found(runs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    folder = shutil.copytree(runs["fedas"], tmp_path / "run")
    (folder / "checkpoint" / "scored-000003.safetensors").write_bytes(b"x")
    assert fedkper("export", folder, "--model", tmp_path / "m") == 0
    said = capsys.readouterr().err
    assert "scored-000003.safetensors" in said
    assert "2 of 3 rounds are done" in said
    assert fedkper("run", "--resume", folder, "--workers", 1) == 0
    assert results(folder) == results(runs["fedas"])


# --- the files -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(runs: dict[str, Path], place: Path) -> Path:
    assert fedkper("export", runs["fedkper"], "--model", place / "both", "--format", "both") == 0
    return place / "both"


def test_both_formats_give_the_probabilities_of_the_run(both: Path, runs: dict[str, Path]) -> None:
    taken = export.take(runs["fedkper"])
    dataset = run.load(taken.experiment, Execution())
    images = torch.from_numpy(dataset.test_x)
    ours = execute.logits(taken.model, taken.theta, images[None])[0].softmax(1).numpy()
    session = onnxruntime.InferenceSession(both / "model.onnx")
    for count in (1, 7, len(images)):  # the batch is free
        batch = pixels(images[:count]).contiguous().numpy()
        (theirs,) = session.run(None, {"images": batch})
        assert theirs.dtype == np.float32
        np.testing.assert_allclose(theirs, ours[:count], atol=1e-6)
    for name in ("model.safetensors", "model.onnx"):
        np.testing.assert_allclose(predict.load(both, name).probabilities(dataset.test_x), ours, atol=1e-6)
    about = strict(both / "model.json")
    assert about["checks"]["images"] == 30
    assert max(about["checks"]["largest_difference"].values()) < 1e-6
    assert {p.name for p in both.iterdir()} == {*about["files"], "model.json", "MODEL_CARD.md"}


def test_the_onnx_file_says_what_it_takes_and_nothing_of_this_machine(both: Path) -> None:
    model = onnx.load(both / "model.onnx")
    onnx.checker.check_model(model)
    told = {p.key: p.value for p in model.metadata_props}
    assert json.loads(told["classes"]) == strict(both / "model.json")["classes"]
    assert "[-1, 1]" in told["input"] or "/ 255" in told["input"]
    data = (both / "model.onnx").read_bytes()
    assert str(Path(export.__file__).parent).encode() not in data
    assert b"site-packages" not in data


def test_the_code_on_the_card_runs(
    both: Path, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(both)
    text = (both / "MODEL_CARD.md").read_text()
    codes = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(codes) == 2
    dataset = run.load(run.stored_experiment(runs["fedkper"]), Execution())
    images = pixels(torch.from_numpy(dataset.test_x)).contiguous()
    found = []
    for code, given in zip(codes, (images, images.numpy()), strict=True):
        names: dict[str, Any] = {"images": given}
        exec(code, names)
        found.append(np.asarray(torch.as_tensor(names["probabilities"]).detach()))
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    accuracy = (found[0].argmax(1) == dataset.test_y).mean()
    assert f"accuracy {accuracy:.4f}" in text


def test_the_card_says_what_matters(both: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    text = (both / "MODEL_CARD.md").read_text()
    assert "Not a medical device" in text
    assert "licence: not known to fedkper" in text
    assert "cap = 10.0" in text
    summary = strict(runs["fedkper"] / "summary.json")
    assert f"| local accuracy | {summary['local_acc']['mean']:.4f} ±" in text
    assert "split by image, not by patient" in text
    # The command repeats the run.
    (words,) = re.findall(r"^    fedkper (run .*)$", text, re.MULTILINE)
    assert fedkper(*words.split(), "--workers", 1, "--out", tmp_path / "again") == 0
    assert results(tmp_path / "again") == results(runs["fedkper"])


def test_a_users_model_travels_with_its_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    assert fedkper("run", "--dataset", tiny, *TINY, "--rounds", 2, "--model", "net.py:Net", "--out", "r") == 0
    assert fedkper("export", "r", "--model", "m", "--format", "both") == 0
    dataset = run.load(run.stored_experiment(Path("r")), Execution())
    Path("net.py").unlink()
    parts = [
        predict.load(Path("m"), name).probabilities(dataset.test_x)
        for name in ("model.safetensors", "model.onnx")
    ]
    np.testing.assert_allclose(*parts, atol=1e-6)
    accuracy = (parts[0].argmax(1) == dataset.test_y).mean()
    assert accuracy == pytest.approx(last(Path("r"), "rounds.csv", "global_acc"))
    assert load_file("m/model.safetensors")["norm.num_batches_tracked"].shape == ()
    with Path("m/net.py").open("a") as file:  # never run: not the file that was exported
        file.write("raise SystemExit('run')\n")
    capsys.readouterr()
    np.save("x.npy", dataset.test_x)
    assert fedkper("predict", "m", "x.npy") == 2
    assert "net.py: not as it was exported" in capsys.readouterr().err


def test_a_changed_model_file_is_refused(tiny: Path, tmp_path: Path, refused: Any) -> None:
    net = tmp_path / "net.py"
    net.write_text(NET)
    base = ["run", "--dataset", tiny, *TINY, "--rounds", 1, "--model", f"{net}:Net"]
    assert fedkper(*base, "--out", tmp_path / "r") == 0
    net.write_text(NET + "\n# another\n")
    assert "was changed since" in refused("export", tmp_path / "r", "--model", tmp_path / "m")


def test_a_run_in_bfloat16_is_exported_in_single_precision(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["run", "--dataset", tiny, *TINY, "--rounds", 1, "--precision", "bf16", "--out", tmp_path / "r"]
    assert fedkper(*words) == 0
    assert fedkper("export", tmp_path / "r", "--model", tmp_path / "m", "--format", "both") == 0
    assert "computes in float32" in capsys.readouterr().err
    about = strict(tmp_path / "m" / "model.json")
    assert about["precision"] == {"exported": "float32", "of the run": "bf16"}
    assert max(about["checks"]["largest_difference"].values()) < 1e-6
    assert "The run computed in bf16" in (tmp_path / "m" / "MODEL_CARD.md").read_text()


def test_a_difference_is_a_failure_and_leaves_nothing(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    right = export._files

    def wrong(taken: export.Taken, formats: tuple[str, ...]) -> dict[str, bytes]:
        taken.theta["head.bias"][0, 0] += 0.01
        files = right(taken, formats)
        taken.theta["head.bias"][0, 0] -= 0.01
        return files

    monkeypatch.setattr(export, "_files", wrong)
    said = refused("export", runs["fedavg"], "--model", tmp_path / "m", code=1)
    assert "model.safetensors is off by up to" in said


@pytest.mark.parametrize(
    ("a", "b", "off"),
    [
        ([0.5, 0.5], [0.5, 0.25], 0.25),
        ([np.nan, 1], [np.nan, 1], 0.0),
        ([np.nan, 1], [0.0, 1], np.inf),
        ([], [], 0.0),
    ],
)
def test_the_largest_difference(a: list[float], b: list[float], off: float) -> None:
    assert export.largest(np.array(a), np.array(b)) == off


# --- refusals ------------------------------------------------------------------------------------------


def test_what_cannot_be_exported(runs: dict[str, Path], place: Path, tmp_path: Path, refused: Any) -> None:
    out = tmp_path / "m"
    for words, naming in [
        ([runs["ditto"]], "what is wanted?"),
        ([place / "all", "--model", out], "takes one run, but 12"),
        ([runs["ditto"], "--model", out, "--client", 5], "--client 5: the run has the clients 0 to 4"),
        ([runs["ditto"], "--model", out, "--client", -1], "--client -1"),
        ([runs["ditto"], "--client", 1, "--curves", "x.csv"], "--client: has no effect without --model"),
        ([runs["ditto"], "--format", "onnx", "--curves", "x.csv"], "--format: has no effect without --model"),
        ([runs["ditto"], "--model", out, "--format", "onxx"], "did you mean 'onnx'?"),
        ([runs["ditto"], "--model", place], "not empty"),
        ([tmp_path, "--model", out], "holds no run"),
        ([tmp_path / "nosuch", "--model", out], "nosuch"),
        ([runs["ditto"], "--curves", tmp_path / "x.xlsx"], "must end in .csv or .parquet"),
        ([runs["ditto"], "--curves", tmp_path / "nosuch" / "x.csv"], "does not exist"),
    ]:
        assert naming in refused("export", *words), words


def test_a_client_that_never_took_part(tiny: Path, tmp_path: Path, refused: Any) -> None:
    words = ["run", "--dataset", tiny, *TINY, "--rounds", 1, "--method", "ditto", "--out", tmp_path / "r"]
    assert fedkper(*words) == 0
    visits = checkpoint.restore(tmp_path / "r" / "checkpoint")[2]
    client = next(k for k in range(5) if k not in visits)
    said = refused("export", tmp_path / "r", "--model", tmp_path / "m", "--client", client)
    assert f"these have: {', '.join(map(str, sorted(visits)))}" in said


def test_other_data_than_the_runs(runs: dict[str, Path], tmp_path: Path, refused: Any) -> None:
    folder = shutil.copytree(runs["fedavg"], tmp_path / "run")
    values = strict(folder / "run.json")
    values["experiment"]["dataset"] = str(write_data(tmp_path / "other.npz", seed=5))
    (folder / "run.json").write_text(json.dumps(values))
    assert "holds other data" in refused("export", folder, "--model", tmp_path / "m")


def test_a_run_without_a_finished_round(runs: dict[str, Path], tmp_path: Path, refused: Any) -> None:
    folder = shutil.copytree(runs["fedavg"], tmp_path / "run")
    shutil.rmtree(folder / "checkpoint")
    assert "no round is finished" in refused("export", folder, "--model", tmp_path / "m")


@pytest.mark.parametrize("library", onnxfile.NEEDED)
def test_without_the_extra_the_remedy_is_named(
    library: str, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    monkeypatch.setattr(onnxfile, "find_spec", lambda name: None if name == library else object())
    said = refused("export", runs["fedavg"], "--model", tmp_path / "m", "--format", "onnx")
    assert "pip install 'fedkper[onnx]'" in said
    assert library in said


# --- the long table ------------------------------------------------------------------------------------


def test_every_number_of_every_run_is_a_line(place: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    assert fedkper("export", place / "all", runs["moon"], "--curves", tmp_path / "all.csv") == 0
    rows = list(csv.DictReader((tmp_path / "all.csv").read_text().splitlines()))
    assert list(rows[0]) == [*tidy.Line._fields]
    assert {(r["run"], r["method"]) for r in rows} == {(str(f), m) for m, f in runs.items()}
    keys = [(r["run"], r["round"], r["client"], r["metric"]) for r in rows]
    assert len(set(keys)) == len(keys)
    found = dict(zip(keys, (r["value"] for r in rows), strict=True))
    expected = {}
    for folder in runs.values():
        for table in ("rounds.csv", "clients.csv"):
            for line in csv.DictReader((folder / table).read_text().splitlines()):
                t, client = line.pop("round"), line.pop("client", "")
                expected |= {(str(folder), t, client, name): cell for name, cell in line.items() if cell}
    assert found == expected


def test_parquet_holds_the_same(runs: dict[str, Path], tmp_path: Path) -> None:
    for ending in ("csv", "parquet"):
        assert fedkper("export", runs["fedkper"], "--curves", tmp_path / f"all.{ending}") == 0
    table = pyarrow.parquet.read_table(tmp_path / "all.parquet")
    assert [str(t) for t in table.schema.types] == ["string"] * 3 + ["int64"] * 4 + ["string", "double"]
    rows = [{k: "" if v is None else v for k, v in row.items()} for row in table.to_pylist()]
    plain = [
        {
            k: float(v) if k == "value" else int(v) if k.endswith(("seed", "round", "client")) and v else v
            for k, v in row.items()
        }
        for row in csv.DictReader((tmp_path / "all.csv").read_text().splitlines())
    ]
    assert rows == plain


def test_parquet_without_the_extra(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    monkeypatch.setattr(tidy, "find_spec", lambda name: None)
    assert "fedkper[parquet]" in refused("export", runs["fedavg"], "--curves", tmp_path / "x.parquet")


def test_a_damaged_run_is_named_and_the_old_table_stays(
    runs: dict[str, Path], tmp_path: Path, refused: Any
) -> None:
    folder = shutil.copytree(runs["fedavg"], tmp_path / "run")
    assert fedkper("export", folder, "--curves", tmp_path / "x.csv") == 0
    before = (tmp_path / "x.csv").read_text()
    cells = (folder / "rounds.csv").read_text().replace(column(folder, "rounds.csv", "global_acc")[0], "7", 1)
    (folder / "rounds.csv").write_text(cells)
    assert "damaged" in refused("export", folder, "--curves", tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text() == before


def test_runs_are_found_at_any_depth_once(tmp_path: Path) -> None:
    for name in ("b/c/r1", "b/c/r1/inner", "a/r2", "r3"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    os.symlink(tmp_path, tmp_path / "b" / "loop")
    os.symlink(tmp_path / "r3", tmp_path / "z")
    skipped: list[Path] = []
    found = folders.runs([tmp_path, tmp_path / "empty", tmp_path / "r3", tmp_path / "nosuch"], skipped.append)
    expected = [tmp_path / "a" / "r2", tmp_path / "b" / "c" / "r1", tmp_path / "r3"]
    assert sorted(found) == sorted([*expected, tmp_path / "nosuch"])
    assert skipped == [tmp_path / "empty"]
    with pytest.raises(InputError, match=r"empty: holds no run"):
        folders.runs([tmp_path / "empty"])
