"""The paper's CNN, and a user's own model from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedkper import models
from fedkper.cli import main
from fedkper.errors import InputError

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        h, w, channels = shape
        self.features = nn.Sequential(nn.Conv2d(channels, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU())
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.LazyLinear(classes))
        self.classifier(self.features(torch.zeros(2, channels, h, w)))

    def forward(self, x):
        return self.classifier(self.features(x))

class Convolutional(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.stem = nn.Conv2d(shape[2], 4, 3, stride=2)
        self.top = nn.Conv2d(4, classes, 3, stride=2)

    def forward(self, x):
        return self.top(self.stem(x).relu()).mean((2, 3))

class Wrong(Convolutional):
    def forward(self, x):
        return super().forward(x)[:, :2]

class Broken(nn.Module):
    def __init__(self, shape):
        super().__init__()
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def run(tmp_path: Path, *options: str) -> int:
    small = ["--rounds", "2", "--epochs", "1", "--batch", "64", "--clients", "5", "--fraction", "0.4"]
    return main(["run", *small, "--out", str(tmp_path / "run"), *options])


def test_the_papers_cnn_has_the_papers_size() -> None:
    for shape, classes, expected in (((28, 28, 3), 8, 1_663_944), ((28, 28, 1), 11, 1_663_883)):
        tree = models.build("cnn", shape, classes, 1).init()
        assert sum(v[0].numel() for v in tree.values()) == expected
    bound = 1 / 75**0.5
    assert float(models.build("cnn", (28, 28, 3), 8, 1).init()["conv1.weight"].abs().max()) <= bound


def test_the_initial_model_depends_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    first = models.build("cnn", (28, 28, 3), 8, 1).init()
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)  # the global generator was put back
    again, other = (models.build("cnn", (28, 28, 3), 8, seed).init() for seed in (1, 2))
    assert all(torch.equal(v, again[k]) for k, v in first.items())
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


@pytest.mark.parametrize("shape", [(28, 28, 3), (224, 224, 1)])
def test_resnet18_is_of_its_size(shape: tuple[int, int, int]) -> None:
    model = models.build("resnet18", shape, 8, 1)
    assert 11.1e6 < sum(v[0].numel() for v in model.init().values()) < 11.3e6
    assert not model.buffers
    body, head = model.split(model.init())
    assert list(head) == ["head.weight", "head.bias"]
    assert len(body) + len(head) == len(model.init())


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_users_model_runs_under_methods_with_a_head(net: Path, tmp_path: Path, workers: str) -> None:
    assert run(tmp_path, "--model", f"{net}:Net", "--method", "fedper", "--workers", workers) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["model"]["head"] == ["classifier.2.weight", "classifier.2.bias"]


def test_a_model_without_a_linear_head_needs_a_prefix(
    net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"{net}:Convolutional"
    assert run(tmp_path, "--model", model, "--method", "fedper") == 2
    message = capsys.readouterr().err
    assert "stem.weight, stem.bias, top.weight, top.bias" in message.replace("\n", " ")
    assert not (tmp_path / "run").exists()
    assert run(tmp_path, "--model", model, "--method", "fedper", "--head", "top") == 0


def test_a_model_without_a_linear_head_runs_where_none_is_needed(net: Path, tmp_path: Path) -> None:
    assert run(tmp_path, "--model", f"{net}:Convolutional", "--method", "moon", "--workers", "1") == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("net.py:Wrong", "not 8 logits"),
        ("net.py:Broken", "cannot be built"),
        ("net.py:Nett", "it defines: Net, Convolutional, Wrong, Broken"),
        ("none.py:Net", "no such file"),
        ("cnnn", "did you mean 'cnn'"),
    ],
)
def test_models_that_cannot_be_used(
    net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    assert run(tmp_path, "--model", name if name == "cnnn" else f"{net.parent / name}") == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_images_that_are_too_small() -> None:
    with pytest.raises(InputError, match="2 x 2 x 3"):
        models.build("cnn", (2, 2, 3), 8, 1)
