"""FedAS: the head stays at the site, the received body is first aligned with what the site knew, and the
server weighs a site by its Fisher information.

Yang, Huang, Ye (2024), FedAS: bridging inconsistency in personalized federated learning, CVPR.
Specification 4.6:

    p_c     mean feature of class c under the site's previous body
    align   sum over the classes c of a batch of MSE(f(x; body), p_c), an epoch, on the received body
    f_k     sum over mini-batches of ||grad of the batch's mean NLL||^2, after training
    merge   body = sum_k f_k body_k / sum_k f_k
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkper.descent import SGD
from fedkper.lanes import Lanes
from fedkper.losses import Batch
from fedkper.method import Update, seen, visits
from fedkper.methods.fedper import FedPer
from fedkper.ranges import Range
from fedkper.task import Task
from fedkper.tree import Tree, choose, prefix, rest, sub


@dataclass(frozen=True)
class FedAS(FedPer):
    """FedPer with alignment before the training and with other weights."""

    epochs: Annotated[int, Range(0)] = 1
    """Epochs of the alignment, plain SGD; 0 aligns nothing."""
    lr: Annotated[float, Range(0)] = 0.01
    """Learning rate of the alignment, the same in every round."""
    fisher: bool = True
    """Weigh by Fisher information; off: by samples."""

    def init(self, model: Lanes, params: Tree) -> tuple[Tree, Tree]:
        body, head = model.split(params)
        return body, head | prefix("previous", body) | seen(0)

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        head, visited = rest(own), visits(own) > 0
        if bool(visited.any()) and self.epochs:
            shared = choose(visited, self.aligned(task, shared, sub("previous", own), head), shared)
        return shared | head, {}

    def aligned(self, task: Task, body: Tree, previous: Tree, head: Tree) -> Tree:
        """The received body, closer to the prototypes of the previous one."""
        prototypes = _class_means(task, task.predict(previous | head).features)

        def loss(t: Tree, b: Batch) -> Tensor:
            goal = prototypes.gather(1, b.y[..., None].expand(-1, -1, prototypes.shape[-1]))
            off = (task.model(t | head, b.x).features - goal).square().mean(-1) * b.w
            same = F.one_hot(b.y, task.classes).to(off.dtype) * b.w[..., None]
            return (off / (same @ same.sum(1)[..., None]).squeeze(-1).clamp(min=1)).sum(1)

        return task.fit(loss, body, self.epochs, "alignment", SGD(self.lr, 0.0, 0.0))

    def finish(self, task: Task, theta: Tree, fixed: Tree, own: Tree) -> Update:
        body, head = task.model.split(theta)
        weight = task.fisher_trace(theta) if self.fisher else task.n.float()
        return Update(body, weight, head | prefix("previous", body) | seen(visits(own) + 1), task.n)

    def shares(self, update: Update) -> Tensor:
        return super().shares(update._replace(samples=torch.ones_like(update.samples)))  # alike if all are 0

    def global_model(self, model: Lanes, shared: Tree, update: Update) -> Tree:
        return super().global_model(model, shared, update._replace(own=rest(update.own)))

    def local_model(self, task: Task, shared: Tree, update: Update) -> Tree:
        return update.shared | rest(update.own)

    def personal_model(self, model: Lanes, shared: Tree, own: Tree) -> Tree:
        return sub("previous", own) | rest(own)


def _class_means(task: Task, features: Tensor) -> Tensor:
    """Mean feature of each class over the real samples: [L, N, D] -> [L, C, D], 0 for an absent class."""
    member = F.one_hot(task.y, task.classes).to(features.dtype) * task.mask[..., None]
    return member.transpose(1, 2) @ features / member.sum(1).clamp(min=1)[..., None]
