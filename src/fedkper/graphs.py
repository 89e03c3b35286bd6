"""The steps of a fit as one graph of kernels that an accelerator replays without waiting for the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Steps before the capture, on a stream of their own, so that libraries have made their choices by then.
WARM_UP = 3


def replay(step: Callable[[Tensor], None], plan: Any) -> None:
    """Carries out `step(at)` for every step of a plan; `at` [1] int64 counts them, on the device.

    The first ones run as they are, then one is captured and replayed for the rest. A step must not wait for
    the device, and must find in `at` alone which step it is.
    """
    device = plan.alive.device
    with torch.cuda.device(device):
        _replay(step, torch.zeros(1, dtype=torch.int64, device=device), len(plan.widths))
        # The graph may go only when the device is done with it.
        torch.cuda.current_stream().synchronize()


def _replay(step: Callable[[Tensor], None], at: Tensor, steps: int) -> None:
    def counted() -> None:
        step(at)
        at.add_(1)

    apart = torch.cuda.Stream()
    apart.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(apart):
        for _ in range(WARM_UP):
            counted()
    torch.cuda.current_stream().wait_stream(apart)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            counted()
        again = graph.replay
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a user's own loss may wait for the device; nothing was carried out
        print(
            f"note: the steps go one by one, not as a graph ({str(error).splitlines()[0]})", file=sys.stderr
        )
        again = counted
    for _ in range(steps - WARM_UP):
        again()
