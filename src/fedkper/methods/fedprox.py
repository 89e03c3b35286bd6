"""FedProx: a proximal term ties the local model to the received one.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith (2020), Federated optimization in heterogeneous networks, MLSys.
Specification 4.4:

    loss = CE + (mu / 2) ||w - theta^t||^2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fedkper.descent import SGD
from fedkper.losses import Batch
from fedkper.method import Method, towards, unstable
from fedkper.ranges import Range
from fedkper.task import Task
from fedkper.tree import Tree, prefix, sqdist, sub


@dataclass(frozen=True)
class FedProx(Method):
    """The term is added to the loss, so the common optimiser's momentum acts on it too."""

    mu: Annotated[float, Range(0)] = 1.0
    """Strength of the term; 0 is FedAvg."""

    def check(self, sgd: SGD) -> str:
        return unstable("mu", self.mu, sgd)

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        return shared, prefix("received", task.model.parameters(shared))

    def objective(self, task: Task, theta: Tree, fixed: Tree, b: Batch) -> Tensor:
        return super().loss(task, theta, fixed, b)

    def pull(self, task: Task, fixed: Tree, theta: Tree, grads: Tree) -> Tree:
        return towards(sub("received", fixed), theta, grads, self.mu)

    def loss(self, task: Task, theta: Tree, fixed: Tree, b: Batch) -> Tensor:
        drift = sqdist(task.model.parameters(theta), sub("received", fixed))
        return super().loss(task, theta, fixed, b) + self.mu / 2 * drift
