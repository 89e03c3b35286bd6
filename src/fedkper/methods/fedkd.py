"""FedKD: a private teacher and a shared student teach each other; the student's update is sent compressed.

Wu, Wu, Lyu, Huang, Xie (2022), Communication-efficient federated learning via knowledge distillation, Nature
Communications. Specification 4.10, s for student, t for teacher, f their features, W_h a private projection:

    L_s = CE_s + (KL(t || s) + H) / (CE_s + CE_t)       L_t = CE_t + (KL(s || t) + H) / (CE_s + CE_t)
    H   = MSE(f_t, W_h f_s)
    each matrix of the update is cut to the smallest rank that keeps a share e_t of its squared singular
    values, e_t = .95 + t / T (.98 - .95); the server averages the updates, clients alike, and cuts again
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedkper.descent import SGD
from fedkper.errors import InputError
from fedkper.lanes import Lanes
from fedkper.losses import Batch, ce, kl, mean
from fedkper.lowrank import compressed
from fedkper.method import Method, Update
from fedkper.ranges import Range
from fedkper.task import Task
from fedkper.tree import Tree, choose, finite, nbytes, prefix, rest, sub, weighted_mean


class Losses(NamedTuple):
    student: Tensor  # [L]
    teacher: Tensor  # [L]


@dataclass(frozen=True)
class FedKD(Method):
    """Teacher and student are of one architecture and start alike; the projection starts as the identity."""

    scored: ClassVar[tuple[str, str]] = ("the student", "the site's teacher")
    needs_rounds: ClassVar[bool] = True
    energy_start: Annotated[float, Range(0, 1, above=True)] = 0.95
    """Share of the squared singular values kept in the first round."""
    energy_end: Annotated[float, Range(0, 1, above=True)] = 0.98
    """What that share tends to in the last round."""
    clip: Annotated[float, Range(0)] = 10.0
    """Largest gradient norm of student, teacher and projection, each; 0 clips nothing."""
    reduction: Literal["batchmean", "mean"] = "batchmean"
    """Of KL: its mean over samples, or over samples and classes, which is C times weaker."""

    def sgd(self, task: Task) -> SGD:
        limits = [limit for limit in (self.clip, task.sgd.clip) if limit]
        return dataclasses.replace(task.sgd, clip=min(limits, default=0.0))

    def init(self, model: Lanes, params: Tree) -> tuple[Tree, Tree]:
        width = next((v.shape[-1] for v in model.split(params)[1].values() if v.dim() == 3), 0)
        if not width:
            raise InputError(
                "fedkd needs a head that begins with a linear layer, to know the number of features"
            )
        eye = torch.eye(width, dtype=next(iter(params.values())).dtype)[None]
        own = prefix("teacher", params) | {"projection/weight": eye}
        return params | {"energy/kept": torch.zeros(1)}, own

    def start(self, task: Task, shared: Tree, own: Tree) -> tuple[Tree, Tree]:
        return rest(shared) | own, prefix("received", rest(shared))

    def loss(self, task: Task, theta: Tree, fixed: Tree, b: Batch) -> Tensor:
        student, teacher = task.model(rest(theta), b.x), task.model(sub("teacher", theta), b.x)
        projected = student.features @ theta["projection/weight"].transpose(1, 2)
        both = self.losses(student.logits, teacher.logits, projected, teacher.features, b)
        return both.student + both.teacher

    def losses(self, z_s: Tensor, z_t: Tensor, f_s: Tensor, f_t: Tensor, b: Batch) -> Losses:
        """From logits [L, B, C] and features [L, B, D], the student's already projected."""
        ce_s, ce_t = ce(z_s, b), ce(z_t, b)
        hidden = mean((f_t - f_s).square().mean(-1), b)
        both = ce_s + ce_t
        over = z_s.shape[-1] if self.reduction == "mean" else 1
        towards_t, towards_s = kl(z_t, z_s, b) / over, kl(z_s, z_t, b) / over
        return Losses(ce_s + (towards_t + hidden) / both, ce_t + (towards_s + hidden) / both)

    def energy(self, t: int, rounds: int) -> float:
        return self.energy_start + t / rounds * (self.energy_end - self.energy_start)

    def finish(self, task: Task, theta: Tree, fixed: Tree, own: Tree) -> Update:
        kept = torch.full((len(task.n),), self.energy(task.round, task.rounds), device=task.n.device)
        change = {k: v - fixed[f"received/{k}"] for k, v in rest(theta).items()}
        # What is not finite goes as it is: the server refuses it, by name. Others beside it are compressed.
        sound = finite(change)
        cut, ranks = compressed(
            choose(sound, change, {k: torch.zeros_like(v) for k, v in change.items()}), kept
        )
        full = {k: torch.full_like(rank, min(change[k].flatten(2).shape[1:])) for k, rank in ranks.items()}
        change, ranks = choose(sound, cut, change), choose(sound, ranks, full)
        stays = {k: v for k, v in theta.items() if "/" in k}
        weight = torch.ones_like(task.n, dtype=torch.float32)
        return Update(change | {"energy/kept": kept}, weight, stays, task.n, prefix("rank", ranks))

    def merge(self, shared: Tree, update: Update) -> Tree:
        average = weighted_mean(update.shared, self.shares(update))
        change, _ = compressed(rest(average), average["energy/kept"])
        return {k: shared[k] + v for k, v in change.items()} | {"energy/kept": average["energy/kept"]}

    def local_model(self, task: Task, shared: Tree, update: Update) -> Tree:
        return sub("teacher", update.own)

    def personal_model(self, model: Lanes, shared: Tree, own: Tree) -> Tree:
        return sub("teacher", own)

    def payload(self, update: Update) -> int:
        """Bytes sent: a matrix of rank r as two factors and its singular values where that is less."""
        size = nbytes(rest(update.shared))  # the energy is known to both sides
        for name, rank in sub("rank", update.sums).items():
            leaf = update.shared[name][0]
            rows, columns = leaf.shape[0], leaf[0].numel()
            size -= max(0, rows * columns - int(rank) * (rows + columns + 1)) * leaf.element_size()
        return size
