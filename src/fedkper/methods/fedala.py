"""FedALA: before training, a site learns how to mix its last model and the received one, number by number.

Zhang, Hua, Wang, Song, Xue, Ma, Guan (2023), FedALA: adaptive local aggregation for personalized federated
learning, AAAI. Specification 4.7, for the parameters of the head (the body is taken as received):

    start = theta_old + (theta^t - theta_old) W,    W <- clip(W - eta grad(start) (theta^t - theta_old), 0, 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedkper.lanes import Lanes
from fedkper.losses import Batch, ce
from fedkper.method import Method, Update, seen, visits
from fedkper.ranges import Range
from fedkper.task import Task
from fedkper.tree import Tree, choose, prefix, rest, sub


@dataclass(frozen=True)
class FedALA(Method):
    """A site without a trained model of its own has nothing to mix: its first round starts as received."""

    share: Annotated[float, Range(0, 1, above=True)] = 0.8
    """Share of the train data on which W is learned, drawn anew each round; one mini-batch at least."""
    eta: Annotated[float, Range(0)] = 1.0
    """Learning rate of W."""
    threshold: Annotated[float, Range(0)] = 0.1
    """The first time, W is learned until the last 10 epochs' losses deviate by less than this (nats)."""
    most: Annotated[int, Range(1)] = 50
    """Bound of the epochs of the first time; later it is 1 epoch."""

    def init(self, model: Lanes, params: Tree) -> tuple[Tree, Tree]:
        ones = {k: torch.ones_like(v) for k, v in model.parameters(model.split(params)[1]).items()}
        return params, prefix("local", params) | prefix("mix", ones) | seen(0)

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        old, mix = {k: own[f"local/{k}"] for k in sub("mix", own)}, sub("mix", own)
        count = visits(own)
        visited = count > 0
        if bool(visited.any()):
            mix = choose(visited, self.learned(task, shared, old, mix, count), mix)
        return choose(visited, shared | self.mixed(shared, old, mix), shared), prefix("mix", mix)

    def mixed(self, shared: Tree, old: Tree, mix: Tree) -> Tree:
        return {k: old[k] + (shared[k] - old[k]) * w for k, w in mix.items()}

    def updated(self, mix: Tree, gap: Tree, grad: Tree) -> Tree:
        """One step of W, from the gradient with respect to the mixed parameters."""
        return {k: (w - self.eta * grad[k] * gap[k]).clamp(0, 1) for k, w in mix.items()}

    def learned(self, task: Task, shared: Tree, old: Tree, mix: Tree, count: Tensor) -> Tree:
        """W after this round's learning. Lanes at their second visit take as many epochs as they need."""
        gap, mix = {k: shared[k] - old[k] for k in mix}, {k: w.clone() for k, w in mix.items()}
        going, losses = torch.ones_like(count, dtype=torch.bool), []
        last = next(iter(mix.values())).new_zeros(len(count))

        def step(b: Batch, alive: Tensor) -> None:
            head = {k: v.requires_grad_() for k, v in self.mixed(shared, old, mix).items()}
            loss = ce(task.model(shared | head, b.x, train=False).logits, b)
            grads = torch.autograd.grad(loss.sum(), list(head.values()))
            moved = self.updated(mix, gap, dict(zip(head, grads, strict=True)))
            for k, w in choose(going & alive, moved, mix).items():
                mix[k].copy_(w)
            last.copy_(torch.where(alive, loss.detach(), last))

        for _ in range(self.most):
            task.each(task.plan(1, "mixing", self.share), step)
            losses.append(last.clone())
            settled = len(losses) > 10 and torch.stack(losses[-10:]).std(0, correction=0) < self.threshold
            going = going & (count == 1) & ~torch.as_tensor(settled, device=going.device)
            if not bool(going.any()):
                break
        return mix

    def finish(self, task: Task, theta: Tree, fixed: Tree, own: Tree) -> Update:
        kept = prefix("local", rest(theta)) | fixed | seen(visits(own) + 1)
        return Update(theta, task.n.float(), kept, task.n)

    def personal_model(self, model: Lanes, shared: Tree, own: Tree) -> Tree:
        return sub("local", own)
