"""FedPer: the head stays at the site; only the body is shared and averaged.

Arivazhagan, Aggarwal, Singh, Choudhary (2019), Federated learning with personalization layers,
arXiv 1912.00818. Specification 4.9. Body and head are trained together; there is no global head, so the model
scored as "global" borrows one: the weighted mean of this round's heads, formed for the scoring only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedkper.lanes import Lanes
from fedkper.method import Method, Update
from fedkper.task import Task
from fedkper.tree import Tree, weighted_mean


@dataclass(frozen=True)
class FedPer(Method):
    scored: ClassVar[tuple[str, str]] = (
        "the shared body with a head formed for scoring (head_probe)",
        "the site's body and head after local training",
    )
    head_probe: Literal["mean", "initial"] = "mean"
    """Head of the model scored as global: the mean of this round's heads, or the initial one."""

    def init(self, model: Lanes, params: Tree) -> tuple[Tree, Tree]:
        return model.split(params)

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        return shared | own, {}

    def finish(self, task: Task, theta: Tree, fixed: Tree, own: Tree) -> Update:
        body, head = task.model.split(theta)
        return Update(body, task.n.float(), head, task.n)

    def global_model(self, model: Lanes, shared: Tree, update: Update) -> Tree:
        if self.head_probe == "initial":
            return shared | model.split(model.init())[1]
        return shared | weighted_mean(update.own, self.shares(update))

    def local_model(self, task: Task, shared: Tree, update: Update) -> Tree:
        return update.shared | update.own

    def personal_model(self, model: Lanes, shared: Tree, own: Tree) -> Tree:
        return shared | own
