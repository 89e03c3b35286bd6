"""Per-lane losses, in nats: logits [L, B, C] and a batch -> [L]."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Batch(NamedTuple):
    """One mini-batch a lane."""

    x: Tensor  # [L, B, ...] float, what the model takes
    y: Tensor  # [L, B] int64
    w: Tensor  # [L, B] float, 0 on padding, else 1
    i: Tensor  # [L, B] int64, position in the site's data: frozen outputs are looked up, not computed again


def mean(values: Tensor, b: Batch) -> Tensor:
    """Mean of [L, B] over the real samples of each lane: [L]."""
    w = b.w.to(values.dtype)
    return (values * w).sum(1) / w.sum(1)


def ce(logits: Tensor, b: Batch) -> Tensor:
    """Cross entropy."""
    nll = F.cross_entropy(logits.flatten(0, 1), b.y.flatten(), reduction="none")
    return mean(nll.view(b.y.shape), b)


def kl(teacher: Tensor, student: Tensor, b: Batch, tau: float = 1.0) -> Tensor:
    """tau^2 KL(softmax(teacher / tau) || softmax(student / tau)), summed over classes, batch mean: [L]."""
    p, q = (teacher / tau).log_softmax(-1), (student / tau).log_softmax(-1)
    return tau * tau * mean((p.exp() * (p - q)).sum(-1), b)


def entropy(counts: Tensor) -> Tensor:
    """Entropy of label counts [L, C] over the log of the number of classes: [L] in [0, 1]; 0 if empty."""
    p = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    nats: Tensor = torch.special.entr(p).sum(-1)
    return nats / math.log(max(counts.shape[-1], 2))
