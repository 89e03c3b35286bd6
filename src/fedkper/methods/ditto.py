"""Ditto: beside FedAvg's model, a site trains a personal one that is pulled towards the received model.

Li, Hu, Beirami, Smith (2021), Ditto: fair and robust federated learning through personalization, ICML.
Specification 4.8:

    v <- v - lr (grad CE(v) + lam (v - theta^t))        theta^t is the model received in this round
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedkper.descent import SGD
from fedkper.lanes import Lanes
from fedkper.losses import ce
from fedkper.method import Method, Update, towards, unstable
from fedkper.ranges import Range
from fedkper.task import Task
from fedkper.tree import Tree, prefix, sub


@dataclass(frozen=True)
class Ditto(Method):
    """The personal model has an optimiser and a batch order of its own, so the global model is FedAvg's."""

    scored: ClassVar[tuple[str, str]] = ("the aggregate, FedAvg's", "the personal model v_k")
    lam: Annotated[float, Range(0)] = 1.0
    """Pull towards the received model; 0 is training alone."""
    epochs: Annotated[int, Range(0)] = 5
    """Epochs E_p of the personal model in a round."""

    def check(self, sgd: SGD) -> str:
        return unstable("lam", self.lam, sgd)

    def init(self, model: Lanes, params: Tree) -> tuple[Tree, Tree]:
        return params, prefix("personal", params)

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        return shared, prefix("received", task.model.parameters(shared))

    def finish(self, task: Task, theta: Tree, fixed: Tree, own: Tree) -> Update:
        received = sub("received", fixed)

        personal = task.fit(
            lambda v, b: ce(task.model(v, b.x).logits, b),
            sub("personal", own),
            self.epochs,
            "personal",
            pull=lambda v, grads: towards(received, v, grads, self.lam),
        )
        return Update(theta, task.n.float(), prefix("personal", personal), task.n)

    def local_model(self, task: Task, shared: Tree, update: Update) -> Tree:
        return sub("personal", update.own)

    def personal_model(self, model: Lanes, shared: Tree, own: Tree) -> Tree:
        return sub("personal", own)
