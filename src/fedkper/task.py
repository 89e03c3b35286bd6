"""What a site has: a model, its data and the one loop that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedkper import graphs
from fedkper.descent import SGD, descent
from fedkper.lanes import Lanes, Out
from fedkper.losses import Batch, ce
from fedkper.tree import Tree, across

Loss = Callable[[Tree, Batch], Tensor]
# From theta and the gradients of a loss, those of the loss and a further term.
Pull = Callable[[Tree, Tree], Tree]

# Images a forward pass in evaluation: a constant, since another size rounds differently; 64 fits the caches.
CHUNK = 64
# Fewer of images larger than 64 x 64 RGB pixels: 64 of 224 x 224 would take up to a GB on their way.
CHUNK_VALUES = CHUNK * 64 * 64 * 3
# On an accelerator, which is idle with few, so many pixels: 4,096 images of 28 x 28.
CHUNK_PIXELS = 4096 * 28 * 28


def chunk(images: Tensor) -> int:
    """Images [L, n, ...] a forward pass of each lane in evaluation."""
    values = max(1, images[0, 0].numel())
    if not images.is_cuda:
        return max(1, min(CHUNK, CHUNK_VALUES // values))
    return max(CHUNK, CHUNK_PIXELS // (len(images) * values))


def pixels(x: Tensor) -> Tensor:
    """uint8 [..., H, W, channels] -> float32 [..., channels, H, W] in [-1, 1]: (x / 255 - 0.5) / 0.5.

    The memory stays as it is, which for the convolutions is the faster layout (channels last).
    Tables (floating point) pass unchanged.
    """
    return x if x.is_floating_point() else x.movedim(-1, -3).to(torch.float32).div_(127.5).sub_(1)


class Randomness(Protocol):
    """The random streams of one client in one round; rng.Stream is the one in use."""

    def seed(self, purpose: str) -> int: ...
    def orders(self, purpose: str, n: int, epochs: int) -> list[Tensor]: ...


class Plan(NamedTuple):
    """Every mini-batch of S steps, where the data is."""

    i: Tensor
    """[S, L, B] int64, positions in the site's data"""
    w: Tensor
    """[S, L, B], 1 for a sample, 0 for padding"""
    alive: Tensor
    """[S, L] bool, which lanes still train"""
    widths: list[int]
    """[S], samples of the largest batch of a step"""

    def first(self, steps: int) -> Plan:
        return Plan(self.i[:steps], self.w[:steps], self.alive[:steps], self.widths[:steps])


@dataclass(frozen=True)
class Task:
    """One batch of sites: the sites' train data beside each other, padded to the largest."""

    model: Lanes
    x: Tensor
    """[L, N, H, W, channels] uint8 or [L, N, F] float"""
    y: Tensor
    """[L, N] int64"""
    n: Tensor
    """[L] int64, samples of each site; the rest is padding"""
    classes: int
    streams: Sequence[Randomness]
    """[L]"""
    sgd: SGD
    epochs: int = 5
    batch: int = 12
    round: int = 0
    """0-based"""
    rounds: int = 1

    def plan(self, epochs: int, purpose: str = "batches", share: float = 1.0) -> Plan:
        """Shuffled mini-batches, the last of an epoch may be short.

        Every lane goes through its own epochs without waiting for longer ones. A lane that has run out
        replays its first batch, so no method ever sees an empty one. `share`: only so much of the data, one
        batch at least, by chance and the same in every call for that purpose.
        """
        lanes = []
        for n, stream in zip(self.n.tolist(), self.streams, strict=True):
            used = n if share == 1 else min(n, max(self.batch, int(share * n)))
            orders = stream.orders(purpose, n, epochs)
            lanes.append([part for order in orders for part in order[:used].split(self.batch)])
        steps, short = max(map(len, lanes)), not self.y.is_cuda
        i = torch.zeros(steps, len(lanes), self.batch, dtype=torch.int64)
        w = torch.zeros(steps, len(lanes), self.batch)
        for lane, parts in enumerate(lanes):
            if parts:
                sizes = torch.tensor([len(part) for part in parts])
                filled = torch.arange(self.batch) < sizes[:, None]
                i[: len(parts), lane][filled] = torch.cat(parts)
                w[: len(parts), lane] = filled.float()
                i[len(parts) :, lane], w[len(parts) :, lane] = i[0, lane], w[0, lane]
        alive = torch.arange(steps)[:, None] < torch.tensor([len(parts) for parts in lanes])
        # On an accelerator all steps have one shape, so that one graph of kernels serves them all.
        widths = w.sum(2).amax(1).int().tolist() if short else [self.batch] * steps
        device = self.y.device
        return Plan(i.to(device), w.to(device), alive.to(device), widths)

    def batches(
        self, epochs: int, purpose: str = "batches", share: float = 1.0
    ) -> Iterator[tuple[Batch, Tensor]]:
        """The mini-batches of a plan; with each, which lanes still train: [L] bool."""
        yield from self._batches(self.plan(epochs, purpose, share))

    def _batches(self, plan: Plan) -> Iterator[tuple[Batch, Tensor]]:
        for step, width in enumerate(plan.widths):
            yield self.batch_of(plan.i[step, :, :width], plan.w[step, :, :width]), plan.alive[step]

    def each(self, plan: Plan, step: Callable[[Batch, Tensor], None]) -> None:
        """Carries out `step(batch, alive)` for every mini-batch of a plan, alive [L] as in `batches`.

        An accelerator replays a step as one graph of kernels (graphs.py): it must not wait for the device,
        and what it carries on to the next step must be changed in place.
        """
        if self.y.is_cuda and len(plan.widths) > graphs.WARM_UP:
            graphs.replay(
                lambda at: step(self.batch_of(plan.i[at][0], plan.w[at][0]), plan.alive[at][0]), plan
            )
        else:
            for b, alive in self._batches(plan):
                step(b, alive)

    def batch_of(self, i: Tensor, w: Tensor) -> Batch:
        """The mini-batch of the samples at positions i [L, B] with weights w [L, B]."""
        lane = torch.arange(len(i), device=i.device)[:, None]
        return Batch(pixels(self.x[lane, i]), self.y[lane, i], w, i)

    def fit(
        self,
        loss: Loss,
        theta: Tree,
        epochs: int | None = None,
        purpose: str = "batches",
        sgd: SGD | None = None,
        pull: Pull | None = None,
    ) -> Tree:
        """SGD on `loss` from `theta`: the trained copy. A leaf that the loss does not reach stays as it is.

        Gradients of different lanes never meet: per-lane losses are summed and differentiated once. `pull`
        adds the gradient of a term that has a closed form.
        """
        theta = {k: _laid_out(v.detach()) for k, v in theta.items()}
        trained = self.model.parameters(theta)
        leaves = [v.requires_grad_() for v in trained.values()]
        sgd = sgd or self.sgd
        optimiser = descent(leaves, sgd)

        def step(b: Batch, alive: Tensor) -> None:
            found = torch.autograd.grad(
                loss(theta, b).sum(), leaves, allow_unused=True, materialize_grads=pull is not None
            )
            grads = {k: g for k, g in zip(trained, found, strict=True) if g is not None}
            if pull is not None:
                with torch.no_grad():
                    grads = pull(theta, _apart(grads))
            if sgd.clip:
                grads = clipped(grads, sgd.clip)
            del found  # so that its memory serves the next step
            optimiser([grads.get(name) for name in trained], alive)

        self.each(self.plan(self.epochs if epochs is None else epochs, purpose), step)
        return {k: v.detach().contiguous() for k, v in theta.items()}

    @torch.no_grad()
    def predict(self, theta: Tree) -> Out:
        """Features [L, N, D] and logits [L, N, C] of the train data, in evaluation mode."""
        parts = [self.model(theta, pixels(x), train=False) for x in self.x.split(chunk(self.x), dim=1)]
        return Out(torch.cat([p.features for p in parts], 1), torch.cat([p.logits for p in parts], 1))

    def fisher(self, theta: Tree, size: int) -> Tree:
        """Empirical Fisher information, diagonal: the mean over mini-batches of the squared gradient of the
        batch's mean cross entropy, until more than `size` samples were seen; evaluation mode.
        """
        squares = {k: torch.zeros_like(v) for k, v in self.model.parameters(theta).items()}
        count = torch.zeros(len(self.n), device=self.n.device)
        gradients = self._gradients(theta)

        def step(b: Batch, alive: Tensor) -> None:
            count.add_(alive)
            for k, g in gradients(b).items():
                squares[k].addcmul_(g if len(alive) == 1 else across(alive, g) * g, g)

        self.each(self.plan(1, "fisher").first(size // self.batch + 1), step)
        return {k: s / across(count.clamp(min=1), s) for k, s in squares.items()}

    def fisher_trace(self, theta: Tree) -> Tensor:
        """Sum over an epoch's mini-batches of the squared norm of that gradient: [L]."""
        trace = torch.zeros(len(self.n), dtype=torch.float64, device=self.n.device)
        gradients = self._gradients(theta)

        def step(b: Batch, alive: Tensor) -> None:
            for g in gradients(b).values():
                trace.add_(alive * g.reshape(len(g), -1).double().square().sum(1))

        self.each(self.plan(1, "fisher"), step)
        return trace

    def _gradients(self, theta: Tree) -> Callable[[Batch], Tree]:
        """What gives the gradients of a mini-batch's mean cross entropy at theta, in evaluation mode."""
        theta = {k: v.detach() for k, v in theta.items()}
        leaves = {k: v.clone().requires_grad_() for k, v in self.model.parameters(theta).items()}

        def gradients(b: Batch) -> Tree:
            loss = ce(self.model(theta | leaves, b.x, train=False).logits, b).sum()
            grads = torch.autograd.grad(
                loss, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
            return dict(zip(leaves, grads, strict=True))

        return gradients

    @property
    def mask(self) -> Tensor:
        """[L, N] bool, true on real samples."""
        return torch.arange(self.y.shape[1], device=self.y.device) < self.n[:, None]

    def accuracy(self, theta: Tree) -> Tensor:
        """Share of the train data classified rightly after training, evaluation mode: [L]."""
        hits = (self.predict(theta).logits.argmax(-1) == self.y) & self.mask
        return hits.sum(1).double() / self.n.clamp(min=1)

    def label_counts(self) -> Tensor:
        """Label histogram of the train data: [L, C] int64."""
        counts = torch.zeros(len(self.n), self.classes, dtype=torch.int64, device=self.y.device)
        return counts.scatter_add_(1, self.y, self.mask.long())


def _laid_out(leaf: Tensor) -> Tensor:
    """A copy; a single lane's filters with the channels last in memory, as the images have them.

    Gradients then lie like what they are multiplied with, which saves a CPU a twentieth of a step.
    """
    if leaf.dim() != 5 or len(leaf) > 1:
        return leaf.clone(memory_format=torch.contiguous_format)
    return leaf[0].clone(memory_format=torch.channels_last)[None]


def look_up(table: Tensor, b: Batch) -> Tensor:
    """The rows [L, B, ...] of a table [L, N, ...] that belong to a batch's samples."""
    return table[torch.arange(len(table), device=table.device)[:, None], b.i]


def clipped(grads: Tree, limit: float) -> Tree:
    """Gradients scaled down to a norm of at most `limit`, per lane and sub-tree: each model on its own."""
    norms: dict[str, list[Tensor]] = {}
    for name, g in grads.items():
        norms.setdefault(name.rpartition("/")[0], []).append(torch.linalg.vector_norm(g.flatten(1), dim=1))
    scales = {}
    for group, parts in norms.items():
        norm = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        # Most steps are short enough. On a CPU, looking first saves a pass over memory.
        if norm.is_cuda or bool((norm > limit).any()):
            scales[group] = (limit / norm.clamp(min=1e-12)).clamp(max=1)
    return {
        name: g * across(scales[group], g) if (group := name.rpartition("/")[0]) in scales else g
        for name, g in grads.items()
    }


def _apart(grads: Tree) -> Tree:
    """Gradients that may be changed in place: autograd may hand out one tensor, or a view, for several."""
    seen: set[int] = set()
    for name, g in grads.items():
        if g.data_ptr() in seen or not g.is_contiguous() or g._base is not None:
            grads[name] = g.clone(memory_format=torch.contiguous_format)
        seen.add(grads[name].data_ptr())
    return grads
