"""How many clients fit side by side into the memory of an accelerator."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedkper.site import Site
from fedkper.tree import nbytes, to

# Of the free memory; the rest is for the scoring, for what a library takes, and for holes.
SHARE = 0.7
# Copies of what is trained: itself, its gradient, its momentum, and one in passing.
COPIES = 4
# Of what a backward pass needs: itself, and the gradients that replace it.
PASSES = 2


def lanes_that_fit(site: Site, device: str, free: int | None = None) -> int:
    """Clients that can train side by side, at least one. `free`: bytes, as the device says if not given."""
    available = torch.cuda.mem_get_info(device)[0] if free is None else free
    return max(1, int(SHARE * available) // lane_bytes(site))


def lane_bytes(site: Site) -> int:
    """Bytes that the largest client takes while it trains: its images, models and one mini-batch.

    Found by one forward pass of the method's own loss on one mini-batch, which says what its backward pass
    would need.
    """
    largest = max(range(len(site.train_index)), key=lambda k: len(site.train_index[k]))
    task = site.task([largest], 0)
    size = min(task.batch, int(task.n))
    small = replace(task, x=task.x[:, :size], y=task.y[:, :size], n=task.n.clamp(max=size), epochs=1)
    shared, own = (to(tree, task.y.device) for tree in site.method.init(site.model, site.model.init()))
    theta, fixed = site.method.start(small, shared, own)
    theta = {k: v.detach().clone().requires_grad_(site.model.trainable(k, v)) for k, v in theta.items()}
    batch, _ = next(iter(small.batches(1)))
    held: dict[int, int] = {v.untyped_storage().data_ptr(): 0 for v in theta.values()}

    def hold(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        site.method.objective(small, theta, fixed, batch).sum()
    # A table of frozen outputs has a row a sample; anything else in `fixed` stays as it is.
    rows = int(task.n) // size
    kept = sum(nbytes({k: v}) * (rows if v.shape[1:2] == (size,) else 1) for k, v in fixed.items())
    data = task.x.numel() * task.x.element_size() + task.y.numel() * task.y.element_size()
    return data + nbytes(own) + COPIES * nbytes(theta) + kept + PASSES * sum(held.values())
