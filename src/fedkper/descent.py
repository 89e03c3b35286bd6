"""Stochastic gradient descent with momentum (specification 1.1), for one model and for many side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkper.tree import across

# Moves the leaves along their gradients, None where the loss does not reach, in the lanes [L] that are on.
Step = Callable[[Sequence[Tensor | None], Tensor], None]


@dataclass(frozen=True)
class SGD:
    """The optimiser of every method: torch's SGD, its momentum emptied every round (specification 1.1)."""

    lr: float
    momentum: float = 0.9
    weight_decay: float = 1e-5
    clip: float = 0.0
    """Largest gradient norm of a step, of each model on its own; 0 clips nothing."""


def descent(leaves: list[Tensor], sgd: SGD) -> Step:
    """A step function with an empty momentum. A leaf without a gradient stays as it is, without decay."""
    return _one(leaves, sgd) if len(leaves[0]) == 1 and not leaves[0].is_cuda else _many(leaves, sgd)


def _one(leaves: list[Tensor], sgd: SGD) -> Step:
    """A single lane on a CPU, always on: the library's fused kernel is quickest."""
    optimiser = torch.optim.SGD(
        leaves, sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay, fused=True
    )

    def step(grads: Sequence[Tensor | None], alive: Tensor) -> None:
        for leaf, grad in zip(leaves, grads, strict=True):
            # The fused step pairs numbers by their place in memory, so both must lie alike.
            if grad is not None and grad.stride() != leaf.stride():
                grad = torch.empty_like(leaf).copy_(grad)
            leaf.grad = grad
        optimiser.step()

    return step


def _many(leaves: list[Tensor], sgd: SGD) -> Step:
    """Lanes, each with a step size that is zero once it has run out; nothing waits for the accelerator."""
    momentum = [torch.zeros_like(leaf) for leaf in leaves]

    @torch.no_grad()
    def step(grads: Sequence[Tensor | None], alive: Tensor) -> None:
        on = [at for at, grad in enumerate(grads) if grad is not None]
        moved, speed = [leaves[at] for at in on], [momentum[at] for at in on]
        found = torch._foreach_add([g for g in grads if g is not None], moved, alpha=sgd.weight_decay)
        torch._foreach_mul_(speed, sgd.momentum)
        torch._foreach_add_(speed, found)
        rates = [across(alive, leaf).to(leaf.dtype) * -sgd.lr for leaf in moved]
        torch._foreach_addcmul_(
            moved, speed, [r.expand_as(leaf) for r, leaf in zip(rates, moved, strict=True)]
        )

    return step
