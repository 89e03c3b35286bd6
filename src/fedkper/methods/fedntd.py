"""FedNTD: distils from the received model only what it says about the classes that are not true.

Lee, Jeong, Shin, Bae, Yun (2022), Preservation of the global knowledge by not-true distillation in federated
learning, NeurIPS. Specification 4.5:

    loss = CE + beta tau^2 KL(softmax(zg without y / tau) || softmax(z without y / tau))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from fedkper.losses import Batch, ce, kl
from fedkper.method import Method
from fedkper.ranges import Range
from fedkper.task import Task, look_up
from fedkper.tree import Tree

# Far below any logit, and finite: the masked class has probability 0 and 0 x (difference) stays 0.
NEVER = -1e9


@dataclass(frozen=True)
class FedNTD(Method):
    beta: Annotated[float, Range(0)] = 1.0
    """Strength of the distillation; 0 is FedAvg."""
    tau: Annotated[float, Range(0, above=True)] = 1.0
    """Temperature."""

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        return shared, {"teacher/logits": task.predict(shared).logits}

    def loss(self, task: Task, theta: Tree, fixed: Tree, b: Batch) -> Tensor:
        logits, teacher = task.model(theta, b.x).logits, look_up(fixed["teacher/logits"], b)
        true = F.one_hot(b.y, logits.shape[-1]).bool()
        # The true logit is masked after the division by tau, so it neither matters nor gets a gradient.
        known, learned = ((z / self.tau).masked_fill(true, NEVER) for z in (teacher, logits))
        return ce(logits, b) + self.beta * self.tau**2 * kl(known, learned, b)
