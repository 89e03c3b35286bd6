"""The models. Any other nn.Module that maps a batch to logits will do."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkper import rng, userfile
from fedkper.errors import InputError
from fedkper.lanes import Lanes, Out
from fedkper.ranges import near


class CNN(nn.Module):
    """The four-layer CNN of the federated-learning literature (McMahan et al. 2017; specification 3.4).

    Two 5 x 5 convolutions (32 and 64 channels), each with ReLU and 2 x 2 pooling, a linear layer of 512
    and a linear head: 1,663,944 parameters for 28 x 28 RGB images of 8 classes.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        h, w, channels = shape
        if min(h, w) < 4:
            raise ValueError("4 x 4 pixels at least, for two poolings")
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc = nn.Linear(64 * (h // 4) * (w // 4), 512)
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, channels, H, W] -> [B, classes]
        # The maximum of the positive parts is the positive part of the maximum, of a quarter of the numbers.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.head(F.relu(self.fc(x.flatten(1))))
        return logits


class Block(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm around a shortcut (He et al. 2016, Wu and He 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(32, outputs)
        same = stride == 1 and inputs == outputs
        shorter = (nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs))
        self.shortcut = nn.Identity() if same else nn.Sequential(*shorter)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with GroupNorm, which needs no running statistics and so suits small and skewed sites.

    Images up to 64 pixels keep their size in the first layer; larger ones are halved twice, as for ImageNet.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        h, w, channels = shape
        if max(h, w) > 64:
            self.stem: nn.Module = nn.Sequential(
                nn.Conv2d(channels, 64, 7, 2, 3, bias=False),
                nn.GroupNorm(32, 64),
                nn.ReLU(),
                nn.MaxPool2d(3, 2, 1),
            )
        else:
            first = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
            self.stem = nn.Sequential(first, nn.GroupNorm(32, 64), nn.ReLU())
        widths = (64, 64, 128, 256, 512)
        self.blocks = nn.Sequential(
            *(
                Block(widths[i + (j > 0)], widths[i + 1], 2 if i > 0 and j == 0 else 1)
                for i in range(4)
                for j in range(2)
            )
        )
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, channels, H, W] -> [B, classes]
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


MODELS: dict[str, type[nn.Module]] = {"cnn": CNN, "resnet18": ResNet18}


def find(name: str) -> type[nn.Module]:
    """A model's class by name or as FILE.py:CLASS. Raises InputError if there is none."""
    if userfile.is_one(name):
        return userfile.load_class(name, nn.Module, "--model")
    if name not in MODELS:
        raise InputError(
            f"--model {name}: not known{near(name, MODELS)}; one of {', '.join(MODELS)}, or FILE.py:CLASS"
        )
    return MODELS[name]


def build(
    name: str,
    shape: tuple[int, int, int],
    classes: int,
    seed: int,
    head: str = "",
    precision: str = "float32",
) -> Lanes:
    """A model for images of `shape` (H, W, channels), initialised as PyTorch does, from `seed`.

    A class is called with (shape, classes) and must map [B, channels, H, W] to logits [B, classes].
    `head`: the prefix of the head's parameters where the last linear layer is not it. Raises InputError for a
    model that cannot be built or does not map so.
    """
    cls = find(name)
    with rng.drawing(rng.seed(seed, "initialisation")):
        try:
            model = Lanes(cls(shape, classes), head, precision)
            sample = torch.linspace(-1, 1, 2 * math.prod(shape)).view(1, 2, shape[2], *shape[:2])
            out = model(model.init(), sample, train=False)
        except Exception as error:  # whatever a user's own class raises
            size = f"{shape[0]} x {shape[1]} x {shape[2]} pixels and {classes} classes"
            raise InputError(f"--model {name}: cannot be built for {size} ({error})") from error
    logits = out.logits
    if logits.shape != (1, 2, classes):
        raise InputError(
            f"--model {name}: gives {list(logits.shape[2:])} numbers an image, not {classes} logits"
        )
    # A net may declare its classifier before another linear layer: the one that gives the logits is the head.
    model.misses_logits = not head and not _gives(model, out)
    model.random |= userfile.is_one(name)  # who knows what it draws
    if head:
        model.split(model.init())
    return model


def _gives(model: Lanes, out: Out) -> bool:
    """Whether the features through the head's linear layer are the logits."""
    leaves = [v[0] for k, v in model.init().items() if model.in_head(k)]
    weight = next((v for v in leaves if v.dim() == 2), None)
    if weight is None or weight.shape[1] != out.features.shape[-1] or weight.shape[0] != out.logits.shape[-1]:
        return False
    bias = next((v for v in leaves if v.dim() == 1), None)
    return torch.allclose(F.linear(out.features, weight, bias), out.logits, rtol=1e-2, atol=1e-3)
