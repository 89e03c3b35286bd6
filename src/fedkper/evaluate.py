"""Answers of the global model and of the clients' local models, in few large batches over all workers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedkper.execute import Call, Executor
from fedkper.scores import Answers
from fedkper.site import Site


def global_model(executor: Executor, site: Site, rider: int = 0) -> tuple[Answers, dict[int, Answers]]:
    """The model last broadcast, on G and on each scored client's local test part L_k."""
    parts = [site.test_index[k] for k in site.scored]
    local_y = site.train_y[torch.cat(parts)].cpu()
    job = executor.job
    on_g = [Call("global_logits", (s, s + job, rider)) for s in range(0, len(site.test_y), job)]
    on_l = [Call("global_on_local_logits", (s, s + job, rider)) for s in range(0, len(local_y), job)]
    logits = executor.run(on_g + on_l)
    sizes = [len(index) for index in parts]
    none = torch.empty(0, site.classes)
    by_client = torch.cat([none, *logits[len(on_g) :]]).split(sizes)
    answers = map(Answers, by_client, local_y.split(sizes))
    on_test = Answers(torch.cat([none, *logits[: len(on_g)]]), site.test_y.cpu())
    return on_test, dict(zip(site.scored, answers, strict=True))


def local_answers(
    site: Site, logits: Mapping[int, tuple[Tensor, Tensor | None]]
) -> tuple[dict[int, Answers], dict[int, Answers]]:
    """By client, from Worker.local_logits: the local model's answers; and the untuned one's, if any."""
    local: dict[int, Answers] = {}
    untuned: dict[int, Answers] = {}
    for k, (after, before) in logits.items():
        y = site.train_y[site.test_part(k)].cpu()
        local[k] = Answers(after, y)
        if before is not None:
            untuned[k] = Answers(before, y)
    return local, untuned
