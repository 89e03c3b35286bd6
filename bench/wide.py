"""The paper's CNN with other widths, to see what the size of a model costs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class _Wide(nn.Module):
    factor = 1.0

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        h, w, channels = shape
        first, second, third = (int(width * self.factor) for width in (32, 64, 512))
        self.conv1 = nn.Conv2d(channels, first, 5, padding=2)
        self.conv2 = nn.Conv2d(first, second, 5, padding=2)
        self.fc = nn.Linear(second * (h // 4) * (w // 4), third)
        self.head = nn.Linear(third, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits: Tensor = self.head(F.relu(self.fc(x.flatten(1))))
        return logits


class Half(_Wide):
    factor = 0.5


class Double(_Wide):
    factor = 2.0


class Triple(_Wide):
    factor = 3.0
