"""MOON: pulls a sample's features towards the received model's and away from the site's own last model's.

Li, He, Song (2021), Model-contrastive federated learning, CVPR. Specification 4.3:

    loss = CE + mu mean_i -log [ e^{cos(f, f_g) / tau} / (e^{cos(f, f_g) / tau} + e^{cos(f, f_prev) / tau}) ]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkper.lanes import Lanes
from fedkper.losses import Batch, ce, mean
from fedkper.method import Method, Update, seen, visits
from fedkper.ranges import Range
from fedkper.task import Task, look_up
from fedkper.tree import Tree, choose, prefix, sub


@dataclass(frozen=True)
class MOON(Method):
    """Features are what the head receives; there is no projection head, as in the first author's code."""

    mu: Annotated[float, Range(0)] = 0.1
    """Strength of the contrast; 0 is FedAvg."""
    tau: Annotated[float, Range(0, above=True)] = 0.5
    """Temperature."""

    def init(self, model: Lanes, params: Tree) -> tuple[Tree, Tree]:
        return params, prefix("previous", params) | seen(0)

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        # At first there is no previous model: the received one stands in, and the term is a constant.
        previous = choose(visits(own) > 0, sub("previous", own), shared)
        features = {"global": task.predict(shared).features, "previous": task.predict(previous).features}
        return shared, prefix("features", features)

    def loss(self, task: Task, theta: Tree, fixed: Tree, b: Batch) -> Tensor:
        out = task.model(theta, b.x)
        f_global, f_previous = (look_up(fixed[f"features/{of}"], b) for of in ("global", "previous"))
        return ce(out.logits, b) + self.mu * self.contrast(out.features, f_global, f_previous, b)

    def contrast(self, f: Tensor, f_global: Tensor, f_previous: Tensor, b: Batch) -> Tensor:
        """[L] from features [L, B, D]. Dead features (norm 0) have a cosine of 0."""
        cosines = [F.cosine_similarity(f, other, dim=-1, eps=1e-8) for other in (f_global, f_previous)]
        return mean(-(torch.stack(cosines, -1) / self.tau).log_softmax(-1)[..., 0], b)

    def finish(self, task: Task, theta: Tree, fixed: Tree, own: Tree) -> Update:
        return Update(theta, task.n.float(), prefix("previous", theta) | seen(visits(own) + 1), task.n)

    def personal_model(self, model: Lanes, shared: Tree, own: Tree) -> Tree:
        return sub("previous", own)
