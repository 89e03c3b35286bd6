"""User modules as functions: frozen parameters, heads, randomness of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from federation import Small, lanes_of, run_site, site, task_of
from fedkper import models, tree
from fedkper.errors import InputError, RunError
from fedkper.lanes import Lanes
from fedkper.losses import ce
from fedkper.methods import METHODS


class Frozen(Small):
    """A body that is not to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)


class Dropping(Small):
    """Dropout as a function: no module tells of it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x.flatten(1)).relu(), 0.5, self.training))


class Backwards(Small):
    """The head is declared before the body."""

    def __init__(self, shape: Any = None, classes: int = 3) -> None:
        super().__init__(classes)
        del self.head, self.body
        self.top = torch.nn.Linear(5, classes)
        self.below = torch.nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.below(x.flatten(1)).relu())


def test_frozen_parameters_stay() -> None:
    model = lanes_of(Frozen)
    task, start = task_of(model, [9]), model.init()
    trained = task.fit(lambda t, b: ce(task.model(t, b.x).logits, b), start)
    assert torch.equal(trained["body.weight"], start["body.weight"])
    assert not torch.equal(trained["head.weight"], start["head.weight"])


@pytest.mark.parametrize("name", METHODS)
def test_a_models_own_randomness_is_seeded(name: str, tmp_path: Path) -> None:
    """Twice, with other numbers drawn before, and with two workers: the same run to the bit."""
    for folder, workers in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(len(folder) + workers)
        run_site(site(name, Dropping, rounds=2), tmp_path / folder, workers)
    for file in ("clients.csv", "summary.json"):
        assert len({(tmp_path / folder / file).read_text() for folder in "abc"}) == 1


def test_the_random_generator_of_the_program_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    run_site(site("fedbabu", Dropping, rounds=2), tmp_path / "run")
    assert torch.equal(torch.rand(2), expected)


def test_a_head_that_does_not_give_the_logits_is_not_guessed(monkeypatch: Any) -> None:
    monkeypatch.setitem(models.MODELS, "backwards", Backwards)
    model = models.build("backwards", (4, 4, 3), 3, 1)
    with pytest.raises(InputError, match="'below' does not give the logits"):
        model.split(model.init())
    named = models.build("backwards", (4, 4, 3), 3, 1, head="top")
    assert list(named.split(named.init())[1]) == ["top.weight", "top.bias"]
    cnn = models.build("cnn", (28, 28, 3), 8, 1)
    assert len(cnn.split(cnn.init())[1]) == 2


@pytest.mark.parametrize(
    ("head", "found"), [("fc", ["fc.weight"]), ("fc1", ["fc1.weight"]), ("f", ["fc.weight", "fc1.weight"])]
)
def test_a_name_of_a_module_means_that_module(head: str, found: list[str]) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = torch.nn.Linear(2, 2, bias=False)
            self.fc = torch.nn.Linear(2, 2, bias=False)
            self.fc1 = torch.nn.Linear(2, 2, bias=False)

    model = Lanes(Two(), head)
    assert list(model.split(model.init())[1]) == found


def test_a_scored_model_must_be_whole(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(METHODS["fedavg"], "global_model", lambda self, model, shared, update: {})
    monkeypatch.setattr(METHODS["fedavg"], "init", lambda self, model, params: (model.split(params)[0], {}))
    monkeypatch.setattr(METHODS["fedavg"], "start", lambda self, task, shared, own: (task.model.init(), {}))
    monkeypatch.setattr(METHODS["fedavg"], "local_model", lambda self, task, shared, update: {})
    with pytest.raises(RunError, match="lacks"):
        run_site(site("fedavg"), tmp_path / "run")


def test_when_every_update_is_refused_the_scored_model_stays(tmp_path: Path, monkeypatch: Any) -> None:
    """Also its head, which for this method is no part of what is shared."""
    lines: list[dict[str, Any]] = []

    def broken(round: int, line: dict[str, Any]) -> None:
        lines.append(line)
        if round == 2:
            monkeypatch.setattr("fedkper.rounds.refusal", lambda update, template: "broken")

    run_site(site("fedper", rounds=4), tmp_path / "run", on_round=broken)
    assert lines[1]["global_acc"] == lines[2]["global_acc"] == lines[3]["global_acc"]
    before, after = (tree.load(p) for p in sorted((tmp_path / "run" / "checkpoint").glob("shared-*"))[-2:])
    assert all(torch.equal(v, after[k]) for k, v in before.items())
