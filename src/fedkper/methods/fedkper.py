"""FedKPer: a site distils from the global model as far as that model is right on the site's own data, and
the server weighs a site by reliability x label diversity.

Fowler, AlRegib (2026), FedKPer: Tackling generalization and personalization in medical federated learning
via knowledge personalization, arXiv 2605.00698. Specification 1:

    loss      CE(q_k, y) + lambda KL(q_g || q_k),   lambda = min(1 / (CE(q_g, y) + 1e-8), cap), a mini-batch
    score     s_k = accuracy on D_k after training x (eps + entropy of D_k's labels / ln C)
    merge     theta^{t+1} = sum_k (s_k / sum_j s_j) theta_k^t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedkper.losses import Batch, ce, entropy, kl
from fedkper.method import Method, Update
from fedkper.ranges import Range
from fedkper.task import Task, look_up
from fedkper.tree import Tree, prefix, sub


@dataclass(frozen=True)
class FedKPer(Method):
    """Both ideas on; with one of them off it is an arm of the paper's ablation (Figure 4)."""

    distillation: bool = True
    """Knowledge personalization in the loss (Equation 3)."""
    aggregation: bool = True
    """Reliability x diversity as the weight (Equation 6); off: the number of samples."""
    cap: Annotated[float, Range(0)] = 10.0
    """Upper bound of lambda."""
    tau: Annotated[float, Range(0, above=True)] = 1.0
    """Temperature of the distillation."""
    eps: Annotated[float, Range(0)] = 1e-6
    """What a site with a single class keeps of its weight."""

    cached: bool = True
    """The teacher, which is frozen, answers once a round for all data; false: anew for every mini-batch, as
    in the official code. The same numbers but for rounding, for 1.13 or 1.40 times FedAvg's operations."""

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        if not self.distillation:
            return shared, {}
        teacher = {"logits": task.predict(shared).logits} if self.cached else shared
        return shared, prefix("teacher", teacher)

    def loss(self, task: Task, theta: Tree, fixed: Tree, b: Batch) -> Tensor:
        logits = task.model(theta, b.x).logits
        if not self.distillation:
            return ce(logits, b)
        if self.cached:
            teacher = look_up(fixed["teacher/logits"], b)
        else:
            with torch.no_grad():
                teacher = task.model(sub("teacher", fixed), b.x, train=False).logits
        return ce(logits, b) + self.trust(ce(teacher, b)) * kl(teacher, logits, b, self.tau)

    def finish(self, task: Task, theta: Tree, fixed: Tree, own: Tree) -> Update:
        if not self.aggregation:
            return super().finish(task, theta, fixed, own)
        return Update(theta, self.score(task.accuracy(theta), task.label_counts()), {}, task.n)

    def trust(self, ce_global: Tensor) -> Tensor:
        """lambda [L] from the global model's cross entropy on the batch [L], in nats."""
        return (1 / (ce_global + 1e-8)).clamp(max=self.cap)

    def score(self, reliability: Tensor, counts: Tensor) -> Tensor:
        """s [L] from the accuracy on the train data [L] and its label histogram [L, C]."""
        return reliability.clamp(min=0) * (self.eps + entropy(counts))
