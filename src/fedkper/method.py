"""A federated method: its fields are its hyper-parameters, its functions say where it differs from FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedkper.descent import SGD
from fedkper.lanes import Lanes
from fedkper.losses import Batch, ce
from fedkper.task import Task
from fedkper.tree import Tree, finite, nbytes, rest, unlike, weighted_mean

# A site with more patients than this is taken for a faulty or a hostile message.
MOST_SAMPLES = 10**9


class Update(NamedTuple):
    """All that a client returns. Only `own` stays at the site. A tree without leaves is an empty one."""

    shared: Tree  # leaves the site; averaged with `weight`
    weight: Tensor  # [L] float, >= 0, any scale: the server normalises
    own: Tree  # stays at the site until its next round
    samples: Tensor  # [L] int64, n_k; the weights if no client's `weight` is usable
    sums: Tree = {}  # noqa: RUF012  leaves the site; added up, not averaged


@dataclass(frozen=True)
class Method:
    """Federated averaging; a method overrides the parts in which it differs. State in, state out."""

    needs_rounds: ClassVar[bool] = False
    """Whether a round depends on the number of rounds, so that a run cannot be made longer."""
    scored: ClassVar[tuple[str, str]] = ("the aggregate", "the model after local training")
    """Which model is scored as "global" and which as "local", in words, for the record of a run."""

    def init(self, model: Lanes, params: Tree) -> tuple[Tree, Tree]:
        """The server's first `shared` and what each client has of its `own` before its first round."""
        return params, {}

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        """From what a client received and kept: theta, which is trained, and `fixed`, which is not."""
        return shared, {}

    def loss(self, task: Task, theta: Tree, fixed: Tree, b: Batch) -> Tensor:
        """The loss of a mini-batch: [L]."""
        return ce(task.model(theta, b.x).logits, b)

    def objective(self, task: Task, theta: Tree, fixed: Tree, b: Batch) -> Tensor:
        """The part of the loss that is differentiated by a backward pass; `pull` has the rest."""
        return self.loss(task, theta, fixed, b)

    def pull(self, task: Task, fixed: Tree, theta: Tree, grads: Tree) -> Tree:
        """From the gradients of the objective those of the loss, where the rest has a closed form."""
        return grads

    def finish(self, task: Task, theta: Tree, fixed: Tree, own: Tree) -> Update:
        """From the trained theta: what is sent and what is kept."""
        return Update(theta, task.n.float(), {}, task.n)

    def merge(self, shared: Tree, update: Update) -> Tree:
        """The server's next `shared`, from this round's admitted updates, a lane a client, sorted."""
        return shared | weighted_mean(update.shared, self.shares(update))

    def shares(self, update: Update) -> Tensor:
        """What each client counts in the mean, summing to 1: [L]."""
        return weights(update)

    def global_model(self, model: Lanes, shared: Tree, update: Update) -> Tree:
        """The model scored as "global". Heads that are not shared may be averaged here, for scoring only."""
        return rest(shared)

    def local_model(self, task: Task, shared: Tree, update: Update) -> Tree:
        """The model scored as "local" after a client's round, from what it received and its update."""
        return rest(update.shared)

    def untuned_model(self, task: Task, update: Update) -> Tree | None:
        """A method whose local model is tuned for scoring also has the one before."""
        return None

    def personal_model(self, model: Lanes, shared: Tree, own: Tree) -> Tree | None:
        """A site's own model between rounds, from what server and site keep; None if it keeps none."""
        return None

    def sgd(self, task: Task) -> SGD:
        """The optimiser of a client's round."""
        return task.sgd

    def check(self, sgd: SGD) -> str:
        """Why the method must not be started with these settings; empty if it may."""
        return ""

    def payload(self, update: Update) -> int:
        """Bytes that a client sends: its tensors, and 4 for a weight that is not its number of samples."""
        extra = 0 if torch.equal(update.weight.double(), update.samples.double()) else 4
        return nbytes(update.shared) + nbytes(update.sums) + extra


def client_round(method: Method, task: Task, shared: Tree, own: Tree) -> Update:
    """One client's round, or a batch of clients': the same three lines in a simulation and in a hospital."""
    theta, fixed = method.start(task, shared, own)
    theta = task.fit(
        lambda t, b: method.objective(task, t, fixed, b),
        theta,
        sgd=method.sgd(task),
        pull=None if type(method).pull is Method.pull else partial(method.pull, task, fixed),
    )
    return method.finish(task, theta, fixed, own)


def weights(update: Update) -> Tensor:
    """What each client counts, summing to 1: [L]. By samples if no weight is usable (specification 1.4)."""
    raw = update.weight.double()
    if falls_back(update):
        raw = update.samples.double()
    if float(raw.sum()) <= 0:
        raw = torch.ones_like(raw)
    return raw / raw.sum()


def falls_back(update: Update) -> bool:
    """Whether `weights` had to use the numbers of samples."""
    return not bool(update.weight.isfinite().all()) or float(update.weight.sum()) <= 0


def refusal(update: Update, template: Tree) -> str:
    """Why one client's update (L = 1) must not be merged; empty if it may.

    A client left out with weight 0 would still poison the mean, since 0 x NaN is NaN.
    """
    if reason := unlike(update.shared, {k: v for k, v in template.items() if k not in update.sums}):
        return reason
    for name, leaf in (update.shared | update.sums).items():
        if not bool(finite({name: leaf})):
            return f"{name} is not finite: training diverged; try a smaller --lr or a --grad-clip such as 5"
    weight, samples = float(update.weight), float(update.samples)
    if not (0 <= samples <= MOST_SAMPLES and samples == int(samples)):
        return f"{samples:g} samples; a whole number from 0 to {MOST_SAMPLES:g} is possible"
    if not 0 <= weight < float("inf"):
        return f"weight {weight:g}; a finite number of at least 0 is possible"
    return ""


def seen(visits: Tensor | int) -> Tree:
    """How often a site has taken part, as a part of its own state: [L]."""
    return {"seen/visits": torch.tensor([visits]) if isinstance(visits, int) else visits}


def visits(own: Tree) -> Tensor:
    return own["seen/visits"]


def towards(anchor: Tree, theta: Tree, grads: Tree, strength: float) -> Tree:
    """grads + strength (theta - anchor), in place: the gradient of a spring, in few passes over memory."""
    for name, leaf in anchor.items():
        grads[name].add_(theta[name], alpha=strength).sub_(leaf, alpha=strength)
    return grads


def unstable(name: str, strength: float, sgd: SGD) -> str:
    """A quadratic pull diverges under momentum unless lr x strength < 2 (1 + momentum), specification 4.4."""
    limit = 2 * (1 + sgd.momentum)
    if sgd.lr * strength < limit:
        return ""
    return f"{name}={strength:g} with --lr {sgd.lr:g} diverges: their product must be below {limit:g}"
