"""FedCurv: a site stays close to what the other sites' last models hold dear, parameter by parameter.

Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef, Zeitak (2019), Overcoming forgetting in federated
learning on non-IID data, arXiv 1910.07796. Specification 4.2, F_j the diagonal Fisher information of site j:

    loss = CE + lam sum_{j != k} (w - theta_j)^T diag(F_j) (w - theta_j)
         = CE + lam (U w - 2 V) w + const,      U = sum_j F_j,  V = sum_j F_j theta_j

The server keeps and sends U and V only; a site subtracts its own part and sends what it changed of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedkper.lanes import Lanes
from fedkper.losses import Batch
from fedkper.method import Method, Update
from fedkper.ranges import Range
from fedkper.task import Task
from fedkper.tree import Tree, prefix, rest, sub, total


@dataclass(frozen=True)
class FedCurv(Method):
    """Fisher information from squared gradients of mini-batch means, after training, with the true labels."""

    lam: Annotated[float, Range(0)] = 1.0
    """Strength of the term; 0 is FedAvg."""
    size: Annotated[int, Range(1)] = 500
    """Fisher information from mini-batches until more than this number of samples were seen."""

    def init(self, model: Lanes, params: Tree) -> tuple[Tree, Tree]:
        zero = {k: torch.zeros_like(v) for k, v in model.parameters(params).items()}
        return params | prefix("U", zero) | prefix("V", zero), prefix("u", zero) | prefix("v", zero)

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        others = {
            big: {k: v - own[f"{small}/{k}"] for k, v in sub(big, shared).items()}
            for big, small in (("U", "u"), ("V", "v"))
        }
        return rest(shared), prefix("U", others["U"]) | prefix("V", others["V"])

    def loss(self, task: Task, theta: Tree, fixed: Tree, b: Batch) -> Tensor:
        w = task.model.parameters(theta)
        return super().loss(task, theta, fixed, b) + self.lam * self.penalty(
            w, sub("U", fixed), sub("V", fixed)
        )

    def objective(self, task: Task, theta: Tree, fixed: Tree, b: Batch) -> Tensor:
        return super().loss(task, theta, fixed, b)

    def pull(self, task: Task, fixed: Tree, theta: Tree, grads: Tree) -> Tree:
        u, v, twice = sub("U", fixed), sub("V", fixed), 2 * self.lam
        for k, leaf in u.items():
            grads[k].addcmul_(leaf, theta[k], value=twice).sub_(v[k], alpha=twice)
        return grads

    def penalty(self, w: Tree, u: Tree, v: Tree) -> Tensor:
        """sum (U w - 2 V) w: [L], the quadratic form less its constant."""
        return torch.stack(
            [((u[k] * x - 2 * v[k]) * x).reshape(len(x), -1).sum(1) for k, x in w.items()]
        ).sum(0)

    def finish(self, task: Task, theta: Tree, fixed: Tree, own: Tree) -> Update:
        fisher = task.fisher(theta, self.size)
        mine = prefix("u", fisher) | prefix("v", {k: f * theta[k] for k, f in fisher.items()})
        changed = {k[0].upper() + k[1:]: v - own[k] for k, v in mine.items()}
        return Update(theta, task.n.float(), mine, task.n, changed)

    def merge(self, shared: Tree, update: Update) -> Tree:
        sums = {k: shared[k] + v for k, v in total(update.sums).items()}
        return super().merge(shared, update) | sums
