"""The models. Any other nn.Module that maps a batch to logits will do."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedkper import rng
from fedkper.errors import InputError
from fedkper.lanes import Lanes


class CNN(nn.Module):
    """The four-layer CNN of the federated-learning literature (McMahan et al. 2017; specification 3.4).

    Two 5 x 5 convolutions (32 and 64 channels), each with ReLU and 2 x 2 pooling, a linear layer of 512
    and a linear head: 1,663,944 parameters for 28 x 28 RGB images of 8 classes.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        h, w, channels = shape
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc = nn.Linear(64 * (h // 4) * (w // 4), 512)
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, channels, H, W] -> [B, classes]
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits: Tensor = self.head(F.relu(self.fc(x.flatten(1))))
        return logits


MODELS = {"cnn": CNN}


def build(name: str, shape: tuple[int, int, int], classes: int, seed: int, head: str = "") -> Lanes:
    """The named model for images of `shape` (H, W, channels), initialised as PyTorch does, from `seed`."""
    if name not in MODELS:
        raise InputError(f"--model {name}: not known; choose from {', '.join(MODELS)}")
    if min(shape[:2]) < 4:
        raise InputError(
            f"--model {name}: images of {shape[0]} x {shape[1]} pixels are too small; 4 x 4 at least"
        )
    with rng.drawing(rng.seed(seed, "initialisation")):
        return Lanes(MODELS[name](shape, classes), head)
