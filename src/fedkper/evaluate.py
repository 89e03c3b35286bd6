"""Accuracy of the global model and of the clients' local models, in few large batches over all workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkper.execute import JOB, Call, Executor
from fedkper.site import Site


def accuracy(logits: Tensor, y: Tensor) -> float | None:
    """Share of right answers; None for no samples. A model that gives NaN is right about nothing."""
    if not len(y):
        return None
    hits = (logits.argmax(-1) == y) & logits.isfinite().all(-1)
    return int(hits.sum()) / len(y)


def global_model(executor: Executor, site: Site) -> tuple[float | None, dict[int, float | None]]:
    """The model last broadcast, on G and on each scored client's local test part L_k."""
    parts = [site.test_index[k] for k in site.scored]
    local_y = site.train_y[torch.cat(parts)]
    on_g = [Call("global_logits", (s,)) for s in range(0, len(site.test_y), JOB)]
    on_l = [Call("global_on_local_logits", (s,)) for s in range(0, len(local_y), JOB)]
    logits = [done.value for done in executor.run(on_g + on_l)]
    sizes = [len(index) for index in parts]
    by_client = torch.cat([*logits[len(on_g) :], torch.empty(0, site.classes)]).split(sizes)
    scores = [accuracy(z, y) for z, y in zip(by_client, local_y.split(sizes), strict=True)]
    return accuracy(torch.cat(logits[: len(on_g)]), site.test_y), dict(zip(site.scored, scores, strict=True))


def local_models(
    executor: Executor, site: Site, groups: Sequence[list[int]], workers: Sequence[int]
) -> tuple[dict[int, float | None], dict[int, float | None]]:
    """Each client's local model, at the worker that trained it, on its own L_k; and the untuned one."""
    calls = [Call("local_logits", (group,), w) for group, w in zip(groups, workers, strict=True)]
    local: dict[int, float | None] = {}
    untuned: dict[int, float | None] = {}
    for group, done in zip(groups, executor.run(calls), strict=True):
        for k, (after, before) in zip(group, done.value, strict=True):
            y = site.train_y[site.test_index[k]]
            local[k] = accuracy(after, y)
            untuned[k] = None if before is None else accuracy(before, y)
    return local, untuned
