"""What goes wrong between hospitals: bad updates, silent sites, contradictions, leaks, lost state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedkper import run, tree
from fedkper.errors import InputError, RunError
from fedkper.execute import logits
from fedkper.flower import contract
from fedkper.flower.parcel import Code, Parcel
from fedkper.flower.settings import Policy, Rounds, read_federation, read_site
from fedkper.flower.site import Hospital
from fedkper.methods import METHODS
from fedkper.run import Execution
from fedkper.scores import Answers
from fedkper.tree import Tree
from hospitals import NAMES, Rehearsal, app, changed, federation_of, rehearsal, write_small
from terminal import column, fedkper, results, strict


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("data"))


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    return [e for e in strict(path) if e["event"] == kind] if path.exists() else []


def shared(folder: Path, round: int) -> Tree:
    return tree.load(folder / "run" / "checkpoint" / f"shared-{round:06d}.safetensors")


# --- tensors on the way --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor(7),
        torch.tensor([10, 20]),
        torch.tensor(1.5),
        torch.zeros(1, 0, 3),
        torch.arange(24.0).view(4, 3, 2).transpose(0, 2),
        torch.tensor([float("nan"), float("inf")]),
        torch.tensor([True, False]),
        torch.tensor([1e-300], dtype=torch.float64),
    ],
    ids=["whole", "wholes", "scalar", "empty", "transposed", "not finite", "truth", "double"],
)
def test_a_tensor_arrives_as_it_left(leaf: torch.Tensor) -> None:
    sent = Parcel({"action": "x", "n": 3, "f": 0.1, "yes": True}, {"shared": {"a/b.c": leaf}})
    came = app.unpack(app.pack(sent))
    assert came.words == sent.words
    found = came.trees["shared"]["a/b.c"]
    assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
    assert torch.equal(found.nan_to_num(), leaf.nan_to_num())
    found.add_(1) if found.is_floating_point() else None  # memory of its own, to be written to


# --- updates that must not be merged -------------------------------------------------------------------


def with_leaf(reply: Parcel, change: Callable[[Tree], Tree]) -> Parcel:
    return reply._replace(trees=reply.trees | {"shared": change(dict(reply.trees["shared"]))})


def with_word(reply: Parcel, **words: Any) -> Parcel:
    return reply._replace(words=reply.words | words)


def poke(value: float) -> Callable[[Parcel], Parcel]:
    def change(found: Tree) -> Tree:
        found["fc.weight"] = found["fc.weight"].clone()
        found["fc.weight"].view(-1)[5] = value
        return found

    return lambda reply: with_leaf(reply, change)


BAD: dict[str, tuple[Callable[[Parcel], Parcel], str]] = {
    "NaN": (poke(float("nan")), "fc.weight is not finite"),
    "infinity": (poke(float("inf")), "fc.weight has numbers beyond 1e+06"),
    "huge": (poke(-3e7), "fc.weight has numbers beyond 1e+06"),
    "negative count": (lambda r: with_word(r, samples=-5), "-5 samples, but the site joined with"),
    "count of 1e18": (lambda r: with_word(r, samples=10**18), "but the site joined with"),
    "count as text": (lambda r: with_word(r, samples="12"), "12 samples, but the site joined with"),
    "NaN weight": (lambda r: with_word(r, weight=float("nan")), "weight nan"),
    "negative weight": (lambda r: with_word(r, weight=-1.0), "weight -1"),
    "huge weight": (lambda r: with_word(r, weight=1e18), "weight 1e+18 is beyond 1e+09"),
    "weight as text": (lambda r: with_word(r, weight="much"), "weight nan"),
    "a parameter less": (
        lambda r: with_leaf(r, lambda t: {k: v for k, v in t.items() if k != "head.bias"}),
        "other shared than expected: head.bias",
    ),
    "one more": (lambda r: with_leaf(r, lambda t: t | {"extra": torch.zeros(1)}), "than expected: extra"),
    "another shape": (
        lambda r: with_leaf(r, lambda t: t | {"head.bias": torch.zeros(1, 5)}),
        "head.bias is float32 [1, 5], not float32 [1, 3]",
    ),
    "another type": (
        lambda r: with_leaf(r, lambda t: t | {"head.bias": t["head.bias"].double()}),
        "head.bias is float64 [1, 3], not float32 [1, 3]",
    ),
    "oversized": (
        lambda r: with_leaf(r, lambda t: t | {"fc.weight": torch.zeros(1, 512, 4096)}),
        "fc.weight is float32 [1, 512, 4096], not float32 [1, 6, 192]",
    ),
    "a tree too many": (
        lambda r: r._replace(trees=r.trees | {"sums": {"U/x": torch.zeros(1)}}),
        "other sums than expected: U/x",
    ),
    "no tree": (lambda r: r._replace(trees={}), "other shared than expected"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_is_rejected_by_name(name: str, data: Path, tmp_path: Path) -> None:
    spoil, reason = BAD[name]
    here = rehearsal(tmp_path, federation_of(data, method="fedavg", rounds=2))
    kept: dict[str, Parcel] = {}

    def bend(site: str, request: Parcel, reply: Parcel) -> Parcel:
        if request.words["action"] != "train" or request.words["round"] != 1:
            return reply
        kept[site] = reply
        return spoil(reply) if site == "ber" else reply

    here.grid.bend = bend
    here.run()
    (rejected,) = events(tmp_path, "rejected")
    assert (rejected["round"], rejected["client"]) == (2, 1)
    assert reason in rejected["reason"]
    assert f"round 2: ber: update rejected: {rejected['reason']}" in here.said
    others = [kept[site] for site in ("ams", "cph")]
    weights = torch.tensor([float(reply.words["weight"]) for reply in others])
    expected = tree.weighted_mean(tree.stack([reply.trees["shared"] for reply in others]), weights)
    found = shared(tmp_path, 2)
    assert all(torch.equal(found[k], expected[k]) for k in expected)
    assert column(tmp_path / "run", "clients.csv", "weight")[-2] == "0.0"


def test_without_a_quorum_of_good_updates_the_global_model_stays(data: Path, tmp_path: Path) -> None:
    here = rehearsal(tmp_path, federation_of(data, method="fedavg", rounds=2))
    here.grid.bend = lambda site, request, reply: (
        poke(float("nan"))(reply)
        if request.words["action"] == "train" and request.words["round"] == 1 and site != "ams"
        else reply
    )
    here.run()
    (kept,) = events(tmp_path, "kept")
    assert kept["round"] == 2
    assert kept["reason"] == "1 of 2 needed updates could be used, of client 0: the global model stays"
    first, second = shared(tmp_path, 1), shared(tmp_path, 2)
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_fedcurv_cannot_be_fed_sums_under_the_name_of_weights(data: Path, tmp_path: Path) -> None:
    here = rehearsal(tmp_path, federation_of(data, method="fedcurv", rounds=1))

    def bend(site: str, request: Parcel, reply: Parcel) -> Parcel:
        if site != "cph" or request.words["action"] != "train":
            return reply
        moved = reply.trees["shared"] | reply.trees["sums"]
        return reply._replace(trees={"shared": moved})

    here.grid.bend = bend
    here.run()
    (rejected,) = events(tmp_path, "rejected")
    assert rejected["client"] == 2
    assert "other shared than expected" in rejected["reason"]


# --- sites that fail, and come back --------------------------------------------------------------------


def failing(sites: set[str], rounds: set[int]) -> Callable[[str, Parcel, Parcel], Parcel | None]:
    def bend(site: str, request: Parcel, reply: Parcel) -> Parcel | None:
        if request.words["action"] == "train" and site in sites and request.words["round"] in rounds:
            return Parcel({"code": int(Code.TRAINING)})
        return reply

    return bend


@pytest.mark.parametrize(
    ("sites", "rounds", "done"), [({"ams", "ber", "cph"}, {0}, 0), ({"ams", "cph"}, {1}, 1)]
)
def test_a_round_without_enough_answers_ends_the_run(
    sites: set[str], rounds: set[int], done: int, data: Path, tmp_path: Path
) -> None:
    waits = Rounds(minimum=2, wait=1, limit=20, tries=2)
    here = rehearsal(tmp_path, federation_of(data, waits=waits, method="fedavg"))
    here.grid.bend = failing(sites, rounds)
    with pytest.raises(RunError) as error:
        here.run()
    assert error.value.exit_code == 1
    assert f"round {done + 1}: {3 - len(sites)} of 3 sites answered, 2 needed" in str(error.value)
    assert "ams: TRAINING, training failed at the site" in str(error.value)
    assert f"The rounds before, {done}, are safe" in str(error.value)
    assert len(column(tmp_path / "run", "rounds.csv", "round")) == done
    assert {e["attempt"] for e in events(tmp_path, "unanswered")} == {1, 2}

    here.grid.bend = lambda site, request, reply: reply  # the sites are mended: it goes on
    here.run()
    assert column(tmp_path / "run", "rounds.csv", "round") == ["1", "2", "3"]


def test_with_enough_survivors_the_round_goes_on_and_the_site_comes_back(data: Path, tmp_path: Path) -> None:
    here = rehearsal(tmp_path, federation_of(data, method="ditto"))
    here.grid.bend = failing({"cph"}, {1})
    here.run()
    weights = column(tmp_path / "run", "clients.csv", "weight")
    assert [i for i, weight in enumerate(weights) if not weight] == [5]  # round 2, cph
    states = json.loads((tmp_path / "sites/cph/state/0123456789abcdef/own.json").read_text())
    assert set(states) == {
        "1",
        "3",
    }  # it had trained in round 2 too, from the first
    asked = [
        r.words["state"] for name, r in here.grid.asked if name == "cph" and r.words["action"] == "train"
    ]
    assert asked == [0, 1, 1]


def test_a_late_answer_is_dropped(data: Path, tmp_path: Path) -> None:
    limits = Rounds(minimum=2, wait=1, limit=1, tries=1)
    here = rehearsal(tmp_path, federation_of(data, waits=limits, method="fedavg"))
    late: list[tuple[str, Parcel]] = []

    def bend(site: str, request: Parcel, reply: Parcel) -> Parcel | None:
        if request.words["action"] == "train" and site == "cph" and request.words["round"] == 1:
            late.append((str(len(here.grid.asked) - 1), poke(1000.0)(reply)))
            return None
        if request.words["action"] == "train" and request.words["round"] == 2 and site == "ams":
            here.grid.deliver(*late[0])  # it comes in while the next round runs
        return reply

    here.grid.bend = bend
    here.run()
    weights = column(tmp_path / "run", "clients.csv", "weight")
    took_part = [[k for k in range(3) if weights[3 * t + k]] for t in range(3)]
    assert took_part == [[0, 1, 2], [0, 1], [0, 1, 2]]
    (unanswered,) = events(tmp_path, "unanswered")
    assert (unanswered["round"], unanswered["client"]) == (2, 2)
    assert unanswered["reason"] == "SILENT: no answer in time"
    assert list(here.grid.replies) == [late[0][0]]  # nobody has read it
    assert max(float(v.abs().max()) for v in shared(tmp_path, 3).values()) < 100


def test_a_site_that_is_still_busy_is_not_scored(data: Path, tmp_path: Path) -> None:
    """It does one thing after another: a round would last twice its limit."""
    here = rehearsal(
        tmp_path, federation_of(data, waits=Rounds(minimum=2, wait=1, limit=1, tries=1), method="fedavg")
    )
    here.grid.bend = lambda site, request, reply: (
        None if (site, request.words.get("round"), request.words["action"]) == ("cph", 1, "train") else reply
    )
    here.run()
    scored = [(n, r.words["round"]) for n, r in here.grid.asked if r.words["action"] == "score"]
    assert [round for name, round in scored if name == "cph"] == [0, 2]
    assert [round for name, round in scored if name == "ams"] == [0, 1, 2]


def test_one_that_does_not_answer_to_its_joining_keeps_nobody_waiting(data: Path, tmp_path: Path) -> None:
    waits = Rounds(minimum=2, wait=1, limit=1, tries=1)
    here = rehearsal(tmp_path, federation_of(data, waits=waits, method="fedavg", rounds=2))
    here.grid.bend = lambda site, request, reply: (
        None if (site, request.words["action"]) == ("ams", "join") else reply
    )
    here.run()
    assert [name for name, r in here.grid.asked if r.words["action"] == "join"] == ["ams", "ber", "cph"]
    assert "ams refused: SILENT, no answer in time" in here.said
    reasons = {e["reason"] for e in events(tmp_path, "unanswered")}
    assert reasons == {"AWAY: the site is not connected, or has not joined"}


def test_the_model_and_the_report_come_out_of_a_federations_folder(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = rehearsal(tmp_path / "f", federation_of(data, method="ditto"))
    here.run()
    folder = tmp_path / "f/run"
    assert fedkper("export", folder, "--model", tmp_path / "model") == 0
    assert "on 256 images of noise" in capsys.readouterr().out
    theta, exported = shared(tmp_path / "f", 3), load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(leaf, theta[name][0]) for name, leaf in exported.items())
    card = (tmp_path / "model/MODEL_CARD.md").read_text()
    assert "trained by the sites of a federation, on images that only they have" in card
    assert "by image" not in card
    assert fedkper("export", folder, "--model", tmp_path / "own", "--client", 0) == 2
    assert "the sites of a federation keep their own models" in capsys.readouterr().err
    assert fedkper("report", folder, "--out", tmp_path / "report.html") == 0
    page = (tmp_path / "report.html").read_text()
    assert "federation of ams, ber, cph" in page
    assert "was reported by the sites of a real federation" in page
    assert "simulated" not in page
    assert "Dirichlet" not in page


def test_too_few_sites_end_the_wait_with_their_names(data: Path, tmp_path: Path) -> None:
    waits = Rounds(minimum=3, wait=1, limit=5, tries=1)
    here = rehearsal(tmp_path, federation_of(data, waits=waits))
    here.grid.away = {"cph"}
    with pytest.raises(RunError, match=r"needs 3 of 3 sites, 2 joined \(ams, ber\) within 1 s"):
        here.run()
    assert any("needs 3 of 3 sites, 2 came (ams, ber); waiting for more until" in line for line in here.said)
    assert not (tmp_path / "run" / "run.json").exists()
    here.grid.away = set()
    here.run()  # and the folder is as good as new
    assert len(column(tmp_path / "run", "rounds.csv", "round")) == 3


@pytest.mark.parametrize(
    ("old", "new", "naming"),
    [
        ("minimum = 2", "minimum = 4", "minimum 4: the federation has 3 sites"),
        ("minimum = 2", "minimum = 0", "minimum 0: must be at least 1"),
        ("minimum = 2", 'minimum = "2"', "minimum '2': must be a whole number"),
        ("minimum = 2", "minimum = 2\nminimun = 3", "unknown entry 'minimun'; did you mean 'minimum'?"),
        ('sites = ["ams", "ber", "cph"]', 'sites = ["ams", "ber"]', "clients 3, but sites names 2"),
        ('sites = ["ams", "ber", "cph"]', 'sites = ["ams", "ber", "ber"]', "ber is named twice"),
        ('sites = ["ams", "ber", "cph"]', 'sites = ["ams", "../x", "cph"]', "../x: use up to 31"),
        ('address = "127.0.0.1:1"', 'address = "here"', "address here: must be HOST:PORT"),
        ("tries = 1", "tries = 1\n[round", "not valid TOML"),
        ('method = "fedkper"', 'method = "fedkpr"', "did you mean 'fedkper'?"),
        ("lr = 0.01", 'lr = "fast"', 'lr "fast": must be a number'),
        ("lr = 0.01", "lr = 2020-01-01", 'lr "2020-01-01": must be a number'),
        ("shape = [8, 8, 3]", "shape = [8, 8]", "must be [height, width, channels]"),
    ],
)
def test_contradictory_settings_are_refused(
    old: str, new: str, naming: str, data: Path, tmp_path: Path
) -> None:
    rehearsal(tmp_path, federation_of(data))
    changed(tmp_path / "federation.toml", old, new)
    with pytest.raises(InputError) as error:
        read_federation(tmp_path)
    assert naming in str(error.value)
    assert "federation.toml" in str(error.value) or "--method" in str(error.value)


def test_a_model_beyond_the_message_limit_is_refused_before_anything(data: Path, tmp_path: Path) -> None:
    here = rehearsal(tmp_path, federation_of(data, model="resnet18"))
    changed(tmp_path / "federation.toml", "largest_message = 1900", "largest_message = 1")
    here = Rehearsal(tmp_path, here.federation)
    with pytest.raises(InputError, match=r"messages of 44\.\d MB, more than largest_message = 1 MB"):
        here.run()
    assert here.grid.asked == []


# --- personal state ------------------------------------------------------------------------------------

OWN = ["ditto", "fedper", "fedala", "moon", "fedcurv", "fedas", "fedkd"]


@pytest.mark.parametrize("method", OWN)
def test_personal_state_lives_on_the_sites_disk(method: str, data: Path, tmp_path: Path) -> None:
    federation = federation_of(data, method=method)
    here = rehearsal(tmp_path / "f", federation)
    before: dict[int, bytes] = {}
    own = tmp_path / "f/sites/ams/state/0123456789abcdef"

    def bend(site: str, request: Parcel, reply: Parcel) -> Parcel:
        if site == "ams" and request.words["action"] == "train":
            t = int(request.words["round"])  # type: ignore[arg-type]
            assert request.words["state"] == t
            if t:  # what round t began from is, bit for bit, what round t - 1 left
                assert (own / f"own-000000-{t:06d}.safetensors").read_bytes() == before[t]
            before[t + 1] = (own / f"own-000000-{t + 1:06d}.safetensors").read_bytes()
        return reply

    here.grid.bend = bend
    here.run()
    run.start(federation.experiment, tmp_path / "s", Execution(workers=1))
    for index, name in enumerate(NAMES):
        file = f"own-{index:06d}-000003.safetensors"
        mine = tree.load(tmp_path / "f/sites" / name / "state/0123456789abcdef" / file)
        theirs = tree.load(tmp_path / "s/checkpoint" / file)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in theirs)
    assert not list((tmp_path / "f/run").rglob("own-*"))


def test_a_site_that_lost_its_disk_says_that_it_starts_afresh(data: Path, tmp_path: Path) -> None:
    here = rehearsal(tmp_path, federation_of(data, method="ditto"))

    def bend(site: str, request: Parcel, reply: Parcel) -> Parcel:
        if request.words["action"] == "score" and request.words["round"] == 1 and site == "ber":
            for path in (tmp_path / "sites/ber/state").rglob("own*"):
                path.unlink()
        return reply

    here.grid.bend = bend
    here.run()
    (fresh,) = events(tmp_path, "fresh")
    assert (fresh["round"], fresh["client"]) == (3, 1)
    assert "round 3: ber: the site has lost its own state and starts afresh" in here.said
    assert "starts afresh" in (tmp_path / "sites/ber/site.log").read_text()


def test_a_damaged_state_and_one_of_another_federation_are_not_used(data: Path, tmp_path: Path) -> None:
    here = rehearsal(tmp_path, federation_of(data, method="ditto", rounds=1))
    here.run()
    folder = tmp_path / "sites/ams/state/0123456789abcdef"
    path = folder / "own-000000-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    site = Hospital(tmp_path / "sites/ams")
    with pytest.raises(Exception, match="checksum") as error:
        site.own.find(1)
    assert error.value.code == Code.STATE  # type: ignore[attr-defined]
    changed(tmp_path / "sites/ams/federation.toml", '"0123456789abcdef"', '"fedcba9876543210"')
    assert Hospital(tmp_path / "sites/ams").own.find(1) is None


@pytest.mark.parametrize(
    ("method", "place"),
    [("ditto", "train"), ("ditto", "score"), ("ditto", "append"), ("ditto", "save"), ("fedcurv", "save")],
)
def test_a_coordinator_that_dies_anywhere_goes_on_without_a_lost_or_doubled_round(
    method: str, place: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedkper.record import Record

    class Killed(BaseException):
        pass

    federation = federation_of(data, method=method)
    unbroken = rehearsal(tmp_path / "unbroken", federation)
    unbroken.run()
    here = rehearsal(tmp_path / "broken", federation)

    def bend(site: str, request: Parcel, reply: Parcel) -> Parcel:
        if request.words["action"] == place and request.words["round"] == 1 and site == "ber":
            raise Killed
        return reply

    def die(self: Record, *args: Any) -> None:
        if len(self.curves().global_acc) == (1 if place == "append" else 2):
            raise Killed
        original(self, *args)

    with monkeypatch.context() as patch:
        if place in ("append", "save"):
            original = getattr(Record, place)
            patch.setattr(Record, place, die)
        here.grid.bend = bend
        with pytest.raises(Killed):
            here.run()
    again = Rehearsal(tmp_path / "broken", federation)
    again.run()
    assert "goes on after round 1" in again.said
    mine, theirs = (results(tmp_path / name / "run") for name in ("broken", "unbroken"))
    assert {k: v for k, v in mine.items() if k != "summary.json"} == {
        k: v for k, v in theirs.items() if k != "summary.json"
    }


def test_a_run_is_not_continued_under_another_contract(data: Path, tmp_path: Path) -> None:
    federation = federation_of(data, method="fedavg", rounds=2)
    here = rehearsal(tmp_path, federation)
    here.run()
    for path in (tmp_path, *(tmp_path / "sites" / name for name in NAMES)):
        changed(path / "federation.toml", "lr = 0.01", "lr = 0.02")
    with pytest.raises(InputError, match="was run with other settings"):
        Rehearsal(tmp_path, federation).run()


# --- the contract --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "old", "new", "naming"),
    [
        (
            "federation.toml",
            'classes = ["0", "1", "2"]',
            'classes = ["0", "1"]',
            "classes: '2' at the site, '3'",
        ),
        (
            "federation.toml",
            'classes = ["0", "1", "2"]',
            'classes = ["0", "2", "1"]',
            "class 1: '2' at the site",
        ),
        ("federation.toml", "shape = [8, 8, 3]", "shape = [8, 8, 1]", "image: '8 x 8 pixels, 1 channels'"),
        ("federation.toml", "lr = 0.01", "lr = 0.02", "experiment.lr: '0.02' at the site, '0.01'"),
        ("federation.toml", 'method = "ditto"', 'method = "ditto:lam=0.5"', "method: 'ditto:lam=0.5' at the"),
        ("federation.toml", "\nseed = 1\n", "\nseed = 2\n", "experiment.seed: '2' at the site"),
        ("federation.toml", "net.py:Net", "net.py:Other", "model: 'net.py:Other"),
        (
            "net.py",
            "self.head = nn.Linear(6, classes)",
            "self.head = nn.Linear(6, classes, bias=False)",
            "file net",
        ),
        ("net.py", "BatchNorm1d(6)", "LayerNorm(6)", "received norm.running_mean: missing at the site"),
    ],
)
def test_a_site_that_disagrees_is_refused_before_round_1(
    file: str, old: str, new: str, naming: str, data: Path, tmp_path: Path
) -> None:
    waits = Rounds(minimum=3, wait=5, limit=20, tries=1)
    here = rehearsal(tmp_path, federation_of(data, waits=waits, method="ditto"))
    path = tmp_path / "sites/ber" / file
    text = path.read_text()
    path.write_text(text.replace(old, new, 1) + ("\nOther = Net\n" if file == "net.py" else ""))
    if new.endswith("Other"):
        place = tmp_path / "sites/ber/net.py"
        place.write_text(place.read_text() + "\nclass Other(Net):\n    pass\n")
    assert path.read_text() != text
    with pytest.raises(RunError) as error:
        here.run()
    said = str(error.value)
    assert naming in said
    assert "needs 3 of 3 sites, 2 joined (ams, cph)" in said
    assert len(said.splitlines()) < 30
    assert not any(request.words["action"] == "train" for _, request in here.grid.asked)
    assert not (tmp_path / "run/run.json").exists()
    assert naming in json.loads((tmp_path / "sites/ber/status.json").read_text())["text"]


def test_layers_of_one_shape_in_another_order_are_told_apart(data: Path, tmp_path: Path) -> None:
    here = rehearsal(tmp_path, federation_of(data, method="fedavg", rounds=1))
    second, third = "        self.second = nn.Linear(6, 6)\n", "        self.third = nn.Linear(6, 6)\n"
    changed(tmp_path / "sites/ber/net.py", second + third, third + second)
    here.run()  # two of three are enough
    (refused,) = (line for line in here.said if line.startswith("ber refused: CONTRACT"))
    assert "received second.weight: '9: float32 [1, 6, 6]' at the site, '7: float32" in refused
    assert column(tmp_path / "run", "clients.csv", "weight")[1] == ""


@pytest.mark.parametrize(
    ("attribute", "value", "naming"),
    [("__version__", "9.9.9", "fedkper: '9.9.9'"), ("PREPROCESSING", "x / 255", "preprocessing: 'x / 255'")],
)
def test_another_version_or_preprocessing_is_refused(
    attribute: str, value: str, naming: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federation_of(data)
    rehearsal(tmp_path, federation)
    there = contract.Plan(read_federation(tmp_path)).entries()
    monkeypatch.setattr(contract, attribute, value)
    words = {"action": "join", "federation": federation.id, "contract": json.dumps(there)}
    reply = Hospital(tmp_path / "sites/ams").answer(Parcel(words))
    assert reply.words["code"] == Code.CONTRACT
    assert naming in str(reply.words["differences"])


def test_work_is_refused_without_a_contract_and_after_a_change(data: Path, tmp_path: Path) -> None:
    federation = federation_of(data, method="fedavg", rounds=1)
    here = rehearsal(tmp_path, federation)
    here.run()
    name, request = next((n, r) for n, r in here.grid.asked if r.words["action"] == "train")
    site = tmp_path / "sites" / name
    assert Hospital(site).answer(request).words["code"] == Code.DONE
    foreign = request._replace(words=request.words | {"federation": "ffff"})
    assert Hospital(site).answer(foreign).words["code"] == Code.MESSAGE
    forged = request._replace(words=request.words | {"contract": "0" * 64})
    assert Hospital(site).answer(forged).words["code"] == Code.CONTRACT
    changed(site / "federation.toml", "lr = 0.01", "lr = 0.02")
    assert Hospital(site).answer(request).words["code"] == Code.CONTRACT


# --- the hospital's policy -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy(methods=("fedavg",), smallest_train=1), "method fedper is not among the allowed"),
        (Policy(methods=()), "method fedper is not among the allowed"),
        (Policy(methods=("fedper",), smallest_train=10**6), "smallest_train is 1000000"),
        (Policy(methods=("fedper",), smallest_train=1, most_rounds=2), "3 rounds; most_rounds is 2"),
        (Policy(methods=("fedper",), smallest_train=1), "send_head is false"),
    ],
)
def test_a_policy_cannot_be_overridden(policy: Policy, why: str, data: Path, tmp_path: Path) -> None:
    here = rehearsal(tmp_path, federation_of(data, method="fedper"), policy)
    with pytest.raises(RunError, match="POLICY, the site's own policy does not allow it") as error:
        here.run()
    assert why not in str(error.value)  # the reason stays at the hospital
    assert why in (tmp_path / "sites/ams/site.log").read_text()
    assert why in json.loads((tmp_path / "sites/ams/status.json").read_text())["text"]


def test_a_coordinator_that_skips_the_joining_gets_no_further(data: Path, tmp_path: Path) -> None:
    federation = federation_of(data, method="fedavg", rounds=1)
    here = rehearsal(tmp_path, federation)
    here.run()
    name, request = next((n, r) for n, r in here.grid.asked if r.words["action"] == "train")
    changed(tmp_path / "sites" / name / "site.toml", 'methods = ["fedavg"]', 'methods = ["ditto"]')
    reply = Hospital(tmp_path / "sites" / name).answer(request)
    assert reply.words == {"code": int(Code.POLICY)}
    assert reply.trees == {}


def test_heads_are_kept_where_the_method_needs_none(data: Path, tmp_path: Path) -> None:
    policy = Policy(methods=("fedper",), smallest_train=1, smallest_test=1)
    here = rehearsal(tmp_path, federation_of(data, method="fedper:head_probe=initial", rounds=1), policy)
    seen: list[Parcel] = []
    here.grid.bend = lambda site, request, reply: seen.append(reply) or reply  # type: ignore[func-returns-value]
    here.run()
    assert {name for reply in seen for found in reply.trees.values() for name in found} == {
        f"{layer}.{kind}" for layer in ("fc", "second", "third") for kind in ("weight", "bias")
    } | {f"norm.{k}" for k in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize(("sends", "fewest"), [(False, 1), (True, 10**6)])
def test_scores_stay_where_the_policy_keeps_them(
    sends: bool, fewest: int, data: Path, tmp_path: Path
) -> None:
    policy = Policy(methods=("fedavg",), smallest_train=1, send_scores=sends, smallest_test=fewest)
    here = rehearsal(tmp_path, federation_of(data, method="fedavg", rounds=1), policy)
    here.run()
    for name in ("local_acc", "local_auc", "global_on_local_acc"):
        assert set(column(tmp_path / "run", "clients.csv", name)) == {""}
    assert all(row[3] for row in (line.split(",") for line in own_numbers(tmp_path / "sites/ams")))
    assert float(column(tmp_path / "run", "rounds.csv", "global_acc")[0]) > 0  # its own test set remains


def own_numbers(site: Path) -> list[str]:
    return (site / "numbers.csv").read_text().splitlines()[1:]


def test_patients_are_counted_where_the_data_name_them(data: Path, tmp_path: Path) -> None:
    rehearsal(tmp_path, federation_of(data, method="fedavg", rounds=1))
    with np.load(data) as found:
        arrays = dict(found) | {"classes": np.array(["0", "1", "2"])}
    arrays["train_patient"] = np.arange(240) // 40
    np.savez(tmp_path / "own.npz", **arrays)
    hospital = Hospital(tmp_path / "sites/ams", str(tmp_path / "own.npz"))
    assert hospital.data.patients == 6
    changed(tmp_path / "sites/ams/site.toml", "smallest_train = 1", "smallest_train = 7")
    with pytest.raises(RunError, match="6 patients to train on; smallest_train is 7"):
        Hospital(tmp_path / "sites/ams", str(tmp_path / "own.npz")).require_policy()


def test_data_named_in_site_toml_are_looked_for_from_the_sites_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federation_of(data)
    rehearsal(tmp_path, federation)
    site = tmp_path / "sites/ams"
    with np.load(data) as found:
        np.savez(site / "mine.npz", **dict(found), classes=np.array(list("012")))
    changed(site / "site.toml", f'"share:{federation.experiment.dataset}:0/3"', '"mine.npz"')
    monkeypatch.chdir(tmp_path)
    for folder in (site, Path("sites/ams")):
        assert len(Hospital(folder).data.train_y) == 240
    (site / "mine.npz").unlink()
    with pytest.raises(RunError, match=r"data .*sites/ams/mine\.npz: no such file"):
        _ = Hospital(site).data


# --- what leaves a site --------------------------------------------------------------------------------


def test_nothing_of_a_patient_leaves(data: Path, tmp_path: Path) -> None:
    federation = federation_of(data, method="fedkper", rounds=2)
    here = rehearsal(tmp_path, federation)
    secret = tmp_path / "sites/ber/ZZPATIENT Müller"
    secret.mkdir()
    with np.load(data) as found:
        arrays = dict(found) | {
            "train_patient": np.array(["ZZPATIENT"] * 240),
            "classes": np.array(list("012")),
        }
    np.savez(secret / "ZZPATIENT.npz", **arrays)
    own = json.dumps(str(secret / "ZZPATIENT.npz"), ensure_ascii=False)
    changed(tmp_path / "sites/ber/site.toml", f'"share:{federation.experiment.dataset}:1/3"', own)
    replies: list[bytes] = []

    def bend(site: str, request: Parcel, reply: Parcel) -> Parcel:
        leaves = [v.numpy().tobytes() for found in reply.trees.values() for v in found.values()]
        replies.append(repr(reply).encode() + b"".join(leaves))
        if site == "ber" and request.words["action"] == "score" and request.words["round"] == 0:
            (secret / "ZZPATIENT.npz").write_bytes(b"damaged")  # between two rounds
        return reply

    here.grid.bend = bend
    here.run()
    assert len(replies) == 3 * 6
    assert [e["reason"] for e in events(tmp_path, "unanswered")] == [f"DATA: {Code.DATA.meaning}"]
    assert "ZZPATIENT" in (tmp_path / "sites/ber/site.log").read_text()
    assert not any(b"ZZPATIENT" in reply for reply in replies)
    assert "ZZPATIENT" not in "\n".join(here.said) + json.dumps(here.noted)
    for file in (path for path in (tmp_path / "run").rglob("*") if path.is_file()):
        assert b"ZZPATIENT" not in file.read_bytes(), file
    for file in [*(tmp_path / "sites/ber/state").rglob("*"), tmp_path / "sites/ber/audit.jsonl"]:
        assert file.is_dir() or b"ZZPATIENT" not in file.read_bytes(), file


def test_the_audit_log_is_what_left(data: Path, tmp_path: Path) -> None:
    here = rehearsal(tmp_path, federation_of(data, method="fedas", rounds=2))
    sent: list[Parcel] = []
    here.grid.bend = lambda site, request, reply: (sent.append(reply) if site == "cph" else None) or reply  # type: ignore[func-returns-value]
    here.run()
    lines = strict(tmp_path / "sites/cph/audit.jsonl")
    assert [line["action"] for line in lines] == ["join", "train", "score", "train", "score", "end"]
    for line, reply in zip(lines, sent, strict=True):
        assert line["sent"] == reply.words
        assert {k: v["tensors"] for k, v in line["sent_tensors"].items()} == {
            k: list(v) for k, v in reply.trees.items()
        }
        assert {k: v["bytes"] for k, v in line["sent_tensors"].items()} == {
            k: tree.nbytes(v) for k, v in reply.trees.items()
        }
    assert set(lines[1]["sent_tensors"]) == {"shared", "head"}
    allowed = {"code", "round", "fresh", "weight", "samples", "local_accuracy", "local_auc"}
    assert set(lines[1]["sent"]) == allowed


def test_what_cannot_be_written_down_does_not_leave(data: Path, tmp_path: Path) -> None:
    here = rehearsal(tmp_path, federation_of(data, method="fedavg", rounds=1))
    here.run()
    name, request = next((n, r) for n, r in here.grid.asked if r.words["action"] == "train")
    audit = tmp_path / "sites" / name / "audit.jsonl"
    audit.unlink()
    audit.mkdir()
    reply = Hospital(tmp_path / "sites" / name).answer(request)
    assert reply == Parcel({"code": int(Code.STATE)})


@pytest.mark.parametrize("action", ["train", "score"])
def test_a_site_does_not_answer_without_end(action: str, data: Path, tmp_path: Path) -> None:
    policy = Policy(methods=("fedavg",), smallest_train=1, most_rounds=1)
    here = rehearsal(tmp_path, federation_of(data, method="fedavg", rounds=1), policy)
    here.run()
    name, request = next((n, r) for n, r in here.grid.asked if r.words["action"] == action)
    other = request._replace(words=request.words | {"round": 1})
    assert Hospital(tmp_path / "sites" / name).answer(other).words == {"code": Code.MESSAGE}
    codes = [Hospital(tmp_path / "sites" / name).answer(request).words["code"] for _ in range(2)]
    assert codes == [Code.DONE, Code.POLICY]


# --- which model a score belongs to --------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ditto", "fedper", "fedavg"])
def test_a_local_score_is_that_of_the_sites_own_model(method: str, tmp_path: Path) -> None:
    opposite = tmp_path / "opposite.npz"
    write_opposite(opposite)
    federation = federation_of(
        opposite,
        ("ams", "ber"),
        method=method,
        model="cnn",
        rounds=4,
        epochs=4,
        partition="column",
        column="site",
        lr=0.05,
    )
    federation = replace(federation, classes=("0", "1"))
    here = rehearsal(tmp_path / "f", federation)
    here.run()
    local = [float(v) for v in column(tmp_path / "f/run", "clients.csv", "local_acc")][-2:]
    on_global = [float(v) for v in column(tmp_path / "f/run", "clients.csv", "global_on_local_acc")][-2:]
    assert sum(on_global) / 2 <= 0.55
    assert min(local) > 0.9
    if method == "ditto":
        for index, name in enumerate(("ams", "ber")):
            hospital = Hospital(tmp_path / "f/sites" / name)
            own = tree.load(
                tmp_path / "f/sites" / name / f"state/0123456789abcdef/own-{index:06d}-000004.safetensors"
            )
            x = torch.from_numpy(hospital.data.test_x)[None]
            found = logits(hospital.plan.model, tree.sub("personal", own), x)[0]
            assert Answers(found, torch.from_numpy(hospital.data.test_y)).accuracy() == local[index]
    assert strict(tmp_path / "f/run/run.json")["scored"]["local"] == METHODS[method].scored[1]


def write_opposite(path: Path) -> None:
    """Two hospitals with the same images, whose labels are each other's opposite."""
    draw = np.random.default_rng(3)
    patterns = np.random.default_rng(9).integers(40, 215, (2, 8, 8, 3))
    y = np.arange(80) % 2
    x = np.clip(patterns[y] + draw.normal(0, 20, (80, 8, 8, 3)), 0, 255).astype(np.uint8)
    np.savez(
        path,
        train_images=np.concatenate([x, x]),
        train_labels=np.concatenate([y, 1 - y]),
        train_site=np.array(["a"] * 80 + ["b"] * 80),
        test_images=x,
        test_labels=y,
    )


def test_the_site_folder_is_read_with_its_faults_named(data: Path, tmp_path: Path) -> None:
    rehearsal(tmp_path, federation_of(data))
    site = tmp_path / "sites/ams"
    changed(site / "site.toml", "send_head = true", 'send_head = "yes"')
    with pytest.raises(InputError, match=r"policy: send_head 'yes': must be true or false"):
        read_site(site)
    shutil.copy(tmp_path / "sites/ber/site.toml", site / "site.toml")
    changed(site / "site.toml", 'name = "ber"', 'name = "rom"')
    with pytest.raises(InputError, match="name rom is none of the federation's sites"):
        _ = Hospital(site).settings
