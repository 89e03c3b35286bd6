"""Low-rank compression of a tree of changes (FedKD, specification 4.10)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkper.errors import RunError
from fedkper.tree import Tree


def compressed(change: Tree, energy: Tensor) -> tuple[Tree, Tree]:
    """Every matrix [L, m, ...] cut to the rank that keeps `energy` [L], kernels as m x rest; the ranks [L].

    What two factors and the singular values would not make smaller stays whole. Raises RunError that names
    a non-finite parameter.
    """
    done, ranks = dict(change), {}
    for name, leaf in change.items():
        if leaf.dim() < 3 or not leaf.is_floating_point():
            continue
        matrix = leaf.flatten(2)
        if not bool(matrix.isfinite().all()):
            raise RunError(f"{name} is not finite and cannot be compressed: try a smaller --lr")
        cut, rank = truncated(matrix, energy)
        smaller = rank * (matrix.shape[1] + matrix.shape[2] + 1) < matrix.shape[1] * matrix.shape[2]
        done[name] = torch.where(smaller[:, None, None], cut, matrix).view_as(leaf)
        ranks[name] = torch.where(smaller, rank, min(matrix.shape[1:]))
    return done, ranks


def truncated(matrix: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """[L, m, n] at the smallest rank [L] that keeps `energy` [L] of the squared singular values.

    By the eigenvectors of the smaller Gram matrix in float64, many times faster than a singular value
    decomposition and, for what is kept here, as exact.
    """
    wide = matrix.shape[1] <= matrix.shape[2]
    a = (matrix if wide else matrix.transpose(1, 2)).double()
    values, vectors = torch.linalg.eigh(a @ a.transpose(1, 2))
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    rank = rank_for(values, energy)
    kept = vectors * (torch.arange(values.shape[-1], device=rank.device) < rank[:, None])[:, None]
    cut = kept @ (kept.transpose(1, 2) @ a)
    return (cut if wide else cut.transpose(1, 2)).to(matrix.dtype), rank


def rank_for(squares: Tensor, energy: Tensor) -> Tensor:
    """Smallest rank [L] whose leading squared singular values [L, n], descending, hold `energy` [L]."""
    sums = squares.cumsum(-1)
    goal = energy.double()[:, None] * sums[:, -1:] * (1 - 1e-12)
    rank = (sums < goal).sum(-1) + 1
    return torch.where(sums[:, -1] > 0, rank.clamp(max=squares.shape[-1]), 0)
