"""What a site has: a model, its data and the one loop that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedkper.lanes import Lanes, Out
from fedkper.losses import Batch
from fedkper.tree import Tree

Loss = Callable[[Tree, Batch], Tensor]

# Images a forward pass in evaluation: a constant, since another size rounds differently; 64 fits the caches.
CHUNK = 64


def pixels(x: Tensor) -> Tensor:
    """uint8 [..., H, W, channels] -> float32 [..., channels, H, W] in [-1, 1]: (x / 255 - 0.5) / 0.5.

    The memory stays as it is, which for the convolutions is the faster layout (channels last).
    Tables (floating point) pass unchanged.
    """
    return x if x.is_floating_point() else x.movedim(-1, -3).to(torch.float32).div_(127.5).sub_(1)


class Randomness(Protocol):
    """The random streams of one client in one round; rng.Stream is the one in use."""

    def seed(self, purpose: str) -> int: ...
    def orders(self, purpose: str, n: int, epochs: int) -> list[Tensor]: ...


@dataclass(frozen=True)
class SGD:
    """The optimiser of every method: torch's SGD, its momentum emptied every round (specification 1.1)."""

    lr: float
    momentum: float = 0.9
    weight_decay: float = 1e-5
    clip: float = 0.0
    """Largest gradient norm of a step; 0 clips nothing."""


@dataclass(frozen=True)
class Task:
    """One batch of sites: the sites' train data beside each other, padded to the largest."""

    model: Lanes
    x: Tensor
    """[L, N, H, W, channels] uint8 or [L, N, F] float"""
    y: Tensor
    """[L, N] int64"""
    n: Tensor
    """[L] int64, samples of each site; the rest is padding"""
    classes: int
    streams: Sequence[Randomness]
    """[L]"""
    sgd: SGD
    epochs: int = 5
    batch: int = 12
    round: int = 0
    """0-based"""
    rounds: int = 1

    def batches(self, epochs: int, purpose: str = "batches") -> Iterator[tuple[Batch, list[bool]]]:
        """Shuffled mini-batches, the last of an epoch may be short; with each, which lanes still train: [L].

        Every lane goes through its own epochs without waiting for longer ones. A lane that has run out
        replays its first batch, so no method ever sees an empty one.
        """
        plans = []
        for n, stream in zip(self.n.tolist(), self.streams, strict=True):
            orders = stream.orders(purpose, n, epochs)
            plans.append([part for order in orders for part in order.split(self.batch)])
        lane = torch.arange(len(plans), device=self.y.device)[:, None]
        for step in range(max(len(plan) for plan in plans)):
            alive = [step < len(plan) for plan in plans]
            parts = [plan[step if on else 0] for plan, on in zip(plans, alive, strict=True)]
            width = max(len(p) for p in parts)
            i = torch.zeros(len(parts), width, dtype=torch.int64)
            w = torch.zeros(len(parts), width)
            for row, part in enumerate(parts):
                i[row, : len(part)] = part
                w[row, : len(part)] = 1
            i, w = i.to(self.y.device), w.to(self.y.device)
            yield Batch(pixels(self.x[lane, i]), self.y[lane, i], w, i), alive

    def fit(
        self, loss: Loss, theta: Tree, epochs: int | None = None, purpose: str = "batches", lr: float = 0.0
    ) -> Tree:
        """SGD on `loss` from `theta`: the trained copy. A leaf that the loss does not reach stays as it is.

        Gradients of different lanes never meet: per-lane losses are summed and differentiated once.
        """
        theta = {k: v.detach().clone() for k, v in theta.items()}
        leaves = [v.requires_grad_() for k, v in theta.items() if self.model.trainable(k, v)]
        sgd = self.sgd
        optimiser = torch.optim.SGD(
            leaves, lr or sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay, fused=True
        )
        for b, alive in self.batches(self.epochs if epochs is None else epochs, purpose):
            grads = torch.autograd.grad(loss(theta, b).sum(), leaves, allow_unused=True)
            if sgd.clip:
                grads = clipped(grads, sgd.clip)
            for leaf, grad in zip(leaves, grads, strict=True):
                # The fused step pairs numbers by their place in memory, so both must lie alike.
                alike = grad is None or grad.stride() == leaf.stride()
                leaf.grad = grad if alike else torch.empty_like(leaf).copy_(grad)
            before = None if all(alive) else [leaf.detach().clone() for leaf in leaves]
            optimiser.step()
            if before is not None:
                _put_back(leaves, before, alive)
        return {k: v.detach() for k, v in theta.items()}

    @torch.no_grad()
    def predict(self, theta: Tree) -> Out:
        """Features [L, N, D] and logits [L, N, C] of the train data, in evaluation mode."""
        parts = [self.model(theta, pixels(x), train=False) for x in self.x.split(CHUNK, dim=1)]
        return Out(torch.cat([p.features for p in parts], 1), torch.cat([p.logits for p in parts], 1))

    @property
    def mask(self) -> Tensor:
        """[L, N] bool, true on real samples."""
        return torch.arange(self.y.shape[1], device=self.y.device) < self.n[:, None]

    def accuracy(self, theta: Tree) -> Tensor:
        """Share of the train data classified rightly after training, evaluation mode: [L]."""
        hits = (self.predict(theta).logits.argmax(-1) == self.y) & self.mask
        return hits.sum(1).double() / self.n.clamp(min=1)

    def label_counts(self) -> Tensor:
        """Label histogram of the train data: [L, C] int64."""
        counts = torch.zeros(len(self.n), self.classes, dtype=torch.int64, device=self.y.device)
        return counts.scatter_add_(1, self.y, self.mask.long())


def look_up(table: Tensor, b: Batch) -> Tensor:
    """The rows [L, B, ...] of a table [L, N, ...] that belong to a batch's samples."""
    return table[torch.arange(len(table), device=table.device)[:, None], b.i]


def clipped(grads: Sequence[Tensor | None], limit: float) -> list[Tensor | None]:
    """Gradients scaled down, per lane, to a norm of at most `limit`."""
    square = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in grads if g is not None]).sum(0)
    scale = (limit / square.sqrt().clamp(min=1e-12)).clamp(max=1)
    return [None if g is None else g * _across(scale, g) for g in grads]


@torch.no_grad()
def _put_back(leaves: list[Tensor], before: list[Tensor], alive: list[bool]) -> None:
    """Undoes a step in the lanes that have run out of data."""
    on = torch.tensor(alive, device=leaves[0].device)
    for leaf, old in zip(leaves, before, strict=True):
        leaf.copy_(torch.where(_across(on, leaf), leaf, old))


def _across(lanes: Tensor, leaf: Tensor) -> Tensor:
    """[L] shaped so that it multiplies a leaf [L, ...]."""
    return lanes.view(-1, *[1] * (leaf.dim() - 1))
