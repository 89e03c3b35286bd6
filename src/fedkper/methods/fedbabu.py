"""FedBABU: the head keeps its initial values while the body is trained; a site fine-tunes both for itself.

Oh, Kim, Yun (2021), FedBABU: towards enhanced representation for federated image classification,
arXiv 2106.06042. Specification 4.11. Every site has the head from the common initialisation, so it is never
sent, and the body with that head is a global model without further ado.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from fedkper.lanes import Lanes
from fedkper.losses import Batch, ce
from fedkper.method import Method, Update
from fedkper.ranges import Range
from fedkper.task import Task
from fedkper.tree import Tree, spread


@dataclass(frozen=True)
class FedBABU(Method):
    scored: ClassVar[tuple[str, str]] = (
        "the shared body with the common initial head",
        "a copy of the received model, fine-tuned on the site's data",
    )
    epochs: Annotated[int, Range(0)] = 5
    """Epochs F of the fine-tuning, of a copy and for scoring only; 0 scores what was received."""

    def init(self, model: Lanes, params: Tree) -> tuple[Tree, Tree]:
        return model.split(params)[0], {}

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        # Frozen by not being trained: with a zeroed gradient, weight decay and momentum would move it.
        return shared, _head(task.model, len(task.n))

    def loss(self, task: Task, theta: Tree, fixed: Tree, b: Batch) -> Tensor:
        return ce(task.model(theta | fixed, b.x).logits, b)

    def global_model(self, model: Lanes, shared: Tree, update: Update) -> Tree:
        return shared | _head(model, 1)

    def local_model(self, task: Task, shared: Tree, update: Update) -> Tree:
        received = shared | _head(task.model, len(task.n))
        return task.fit(lambda t, b: ce(task.model(t, b.x).logits, b), received, self.epochs, "fine-tuning")

    def untuned_model(self, task: Task, update: Update) -> Tree:
        return update.shared | _head(task.model, len(task.n))


def _head(model: Lanes, count: int) -> Tree:
    return spread(model.split(model.init())[1], count)
