"""What a model's answers on some samples amount to: accuracy, confusion, ranking and calibration.

Numbers in, numbers out; what is undefined is None. Classes are those that the data set declares, in its
order, whether the samples have them or not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Equal-width bins of the highest probability; with 15 the calibration error is comparable to published ones.
BINS = 15

Counts = NDArray[np.int64]


class Bin(NamedTuple):
    """The samples whose highest probability lies in one of the BINS."""

    number: int
    samples: int
    confidence: float
    """their mean highest probability"""
    accuracy: float


class Answers(NamedTuple):
    """A model's logits [n, C] on samples with labels y [n]. An answer that is not finite is no answer."""

    logits: Tensor
    y: Tensor

    @property
    def usable(self) -> Tensor:
        return self.logits.isfinite().all(-1)

    def accuracy(self) -> float | None:
        """Share of right answers; None for no samples. A model that gives NaN is right about nothing."""
        if not len(self.y):
            return None
        hits = (self.logits.argmax(-1) == self.y) & self.usable
        return int(hits.sum()) / len(self.y)

    def confusion(self) -> Counts:
        """Samples by true class and answer [C, C + 1]; the last column counts those without an answer."""
        classes = self.logits.shape[-1]
        said = torch.where(self.usable, self.logits.argmax(-1), classes)
        counts = torch.bincount(self.y * (classes + 1) + said, minlength=classes * (classes + 1))
        return counts.view(classes, classes + 1).numpy()

    def probabilities(self) -> NDArray[np.float64] | None:
        """[n, C], each row summing to 1; None if there are no samples, or one is without an answer."""
        if not len(self.y) or not bool(self.usable.all()):
            return None
        return self.logits.double().softmax(-1).numpy()

    def auc(self) -> float | None:
        """Area under the ROC curve, one class against the rest, mean over classes.

        The classes are those that some of the samples have and some have not; None if there is none, which
        is the case for a site with one class. Equal to scikit-learn's macro average where all are present.
        """
        p, y = self.probabilities(), self.y.numpy()
        if p is None:
            return None
        present = [c for c in range(p.shape[1]) if 0 < int((y == c).sum()) < len(y)]
        areas = [_area(p[:, c], y == c) for c in present]
        return float(np.mean(areas)) if areas else None

    def bins(self) -> list[Bin]:
        """The bins of the highest probability that hold samples."""
        p = self.probabilities()
        if p is None:
            return []
        top, right = p.max(1), p.argmax(1) == self.y.numpy()
        at = np.minimum((top * BINS).astype(int), BINS - 1)
        return [
            Bin(b, int((at == b).sum()), float(top[at == b].mean()), float(right[at == b].mean()))
            for b in np.unique(at).tolist()
        ]

    def calibration_error(self) -> float | None:
        """Expected calibration error: mean distance of confidence and accuracy over BINS, by samples."""
        bins = self.bins()
        gaps = sum(b.samples * abs(b.confidence - b.accuracy) for b in bins)
        return gaps / len(self.y) if bins else None


def recalls(confusion: Counts) -> list[float | None]:
    """Per class, the share of its samples that are found; None for a class without samples."""
    found, there = confusion.diagonal(), confusion.sum(1)
    return [int(a) / int(n) if n else None for a, n in zip(found, there, strict=True)]


def balanced_accuracy(confusion: Counts) -> float | None:
    """Mean recall of the classes that the samples have."""
    values = [r for r in recalls(confusion) if r is not None]
    return float(np.mean(values)) if values else None


def macro_f1(confusion: Counts) -> float | None:
    """Mean F1 of the classes that are among the samples or among the answers."""
    said = confusion[:, :-1].sum(0)
    both = confusion.sum(1) + said
    values = 2 * confusion.diagonal()[both > 0] / both[both > 0]
    return float(values.mean()) if len(values) else None


def _area(score: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    """Chance that a positive sample scores higher than another one, ties counting half."""
    _, group, sizes = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(sizes) - (sizes - 1) / 2)[group]
    n = int(positive.sum())
    return float((rank[positive].sum() - n * (n + 1) / 2) / (n * (len(score) - n)))
