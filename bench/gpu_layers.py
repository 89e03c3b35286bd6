"""What an accelerator does with layers: matrix products, and ways to train many CNNs at once.

To be imported first: it sees to it that fedkper loads without what nothing here needs.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

if not all(map(importlib.util.find_spec, ("pooch", "rich"))):
    # They fetch published data, which nothing here does: the package without its readers.
    readers = types.ModuleType("fedkper.data")
    found = importlib.util.find_spec("fedkper")
    readers.__path__ = [str(Path(p) / "data") for p in (found and found.submodule_search_locations) or ()]
    sys.modules["fedkper.data"] = readers

from fedkper import models
from fedkper.task import pixels

PRECISIONS = ("float32", "tf32", "bf16")
BATCH, CLASSES = 12, 8


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """float32 with or without TF32; bf16 is autocast's business."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [b.allow_tf32 for b in backends]
    for b in backends:
        b.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        for b, value in zip(backends, before, strict=True):
            b.allow_tf32 = value


def milliseconds(step: Callable[[], Any], device: str, seconds: float = 0.15) -> float:
    """Of one call, over so many calls that they take `seconds`; three more warm up."""
    for _ in range(3):
        step()
    calls = 1
    while True:
        wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            step()
        wait(device)
        taken = time.perf_counter() - start
        if taken >= seconds:
            return 1000 * taken / calls
        calls = max(2 * calls, int(1.2 * calls * seconds / max(taken, 1e-6)))


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as one CUDA graph."""
    apart = torch.cuda.Stream()
    apart.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(apart):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(apart)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def product_rates(device: str, quick: bool) -> list[dict[str, Any]]:
    """TFLOP/s of a large product, of the shapes of the CNN's linear layer for 6 lanes, and for 60."""
    n = 128 if quick else 8192
    shapes = [(1, n, n, n)] + [(lanes, BATCH, 3136, 512) for lanes in (6, 60)]
    rows = []
    for lanes, m, k, out in shapes:
        row: dict[str, Any] = {"product": f"{lanes} x [{m}, {k}] [{k}, {out}]"}
        for precision in PRECISIONS:
            if device == "cpu" and precision == "tf32":
                row[precision] = "-"
                continue
            kind = torch.bfloat16 if precision == "bf16" else torch.float32
            a, b = (torch.randn(lanes, *s, device=device, dtype=kind) for s in ((m, k), (k, out)))
            into = torch.empty(lanes, m, out, device=device, dtype=kind)

            def product(a: Tensor = a, b: Tensor = b, into: Tensor = into) -> None:
                torch.bmm(a, b, out=into)

            with arithmetic(precision):
                ms = milliseconds(product, device, 0.02 if quick else 0.2)
            row[precision] = round(2 * lanes * m * k * out / ms / 1e9, 3)
        rows.append(row)
    return rows


def _linear(theta: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return torch.baddbmm(theta[f"{name}.bias"][:, None], x, theta[f"{name}.weight"].transpose(1, 2))


def _rest(theta: dict[str, Tensor], features: Tensor) -> Tensor:
    """The linear layers, on features [L, B, channels x H x W]: logits [L, B, C]."""
    return _linear(theta, "head", F.relu(_linear(theta, "fc", features)))


def vmapped(model: Any, theta: dict[str, Tensor], x: Tensor) -> Tensor:
    """As fedkper does it: one model, mapped over the lanes."""
    logits: Tensor = model(theta, x).logits
    return logits


def unfolded(model: Any, theta: dict[str, Tensor], x: Tensor) -> Tensor:
    """Every window as a row, one batched product a layer; images are [L, B, H, W, channels] throughout."""
    x = x.movedim(2, -1)
    for name in ("conv1", "conv2"):
        weight, bias = theta[f"{name}.weight"], theta[f"{name}.bias"]
        lanes, count, h, w, _ = x.shape
        windows = F.pad(x, (0, 0, 2, 2, 2, 2)).unfold(2, 5, 1).unfold(3, 5, 1)  # [L, B, H, W, c, 5, 5]
        y = torch.baddbmm(
            bias[:, None], windows.reshape(lanes, count * h * w, -1), weight.flatten(2).transpose(1, 2)
        )
        y = F.relu(y).view(lanes * count, h, w, -1).permute(0, 3, 1, 2)  # channels last in memory
        x = F.max_pool2d(y, 2).permute(0, 2, 3, 1).unflatten(0, (lanes, count))
    return _rest(theta, x.movedim(-1, 2).flatten(2))


def grouped(model: Any, theta: dict[str, Tensor], x: Tensor) -> Tensor:
    """The lanes as groups of one convolution, channels last in memory."""
    lanes, count = x.shape[:2]
    x = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)
    for name in ("conv1", "conv2"):
        weight = theta[f"{name}.weight"].flatten(0, 1).contiguous(memory_format=torch.channels_last)
        x = F.conv2d(x, weight, theta[f"{name}.bias"].flatten(), padding=2, groups=lanes)
        x = F.max_pool2d(F.relu(x), 2)
    return _rest(theta, x.reshape(count, lanes, -1).transpose(0, 1))


def looped(model: Any, theta: dict[str, Tensor], x: Tensor) -> Tensor:
    """One lane after another."""
    trees = [{k: v[lane] for k, v in theta.items()} for lane in range(len(x))]
    return torch.stack(
        [functional_call(model.module, tree, (part,)) for tree, part in zip(trees, x, strict=True)]
    )


VARIANTS = {"vmap": vmapped, "unfold": unfolded, "grouped": grouped, "loop": looped}


def training_step(
    variant: str, lanes: int, device: str, size: int = 28, bf16: bool = False
) -> Callable[[], list[Tensor]]:
    """Forward and backward pass of the paper's CNN in `lanes` lanes, batch 12; gives the gradients."""
    shape = (size, size, 3)
    model, draw = models.build("cnn", shape, CLASSES, 1), torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (lanes, BATCH, *shape), generator=draw, dtype=torch.uint8).to(device)
    y = torch.randint(0, CLASSES, (lanes, BATCH), generator=draw).to(device)
    theta = {k: v.repeat(lanes, *[1] * (v.dim() - 1)).to(device) for k, v in model.init().items()}
    leaves = [v.requires_grad_() for v in theta.values()]

    def step() -> list[Tensor]:
        with torch.autocast(torch.device(device).type, torch.bfloat16) if bf16 else nullcontext():
            logits = VARIANTS[variant](model, theta, pixels(raw))
        losses = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none")
        return list(torch.autograd.grad(losses.view(y.shape).mean(1).sum(), leaves))

    return step


def convolutions(device: str, quick: bool, left: Callable[[], float]) -> list[dict[str, Any]]:
    """Milliseconds of a step by variant, lanes and precision; eager, and as a CUDA graph if possible."""
    rows: list[dict[str, Any]] = []
    size = 8 if quick else 28
    for lanes in (2, 3) if quick else (2, 6, 15, 60):
        with arithmetic("float32"):
            right = training_step("vmap", lanes, device, size)()
        for variant in VARIANTS:
            for precision in PRECISIONS:
                if left() <= 0 or (device == "cpu" and precision != "float32"):
                    continue
                row: dict[str, Any] = {"lanes": lanes, "variant": variant, "precision": precision}
                rows.append(row | _timed(variant, lanes, precision, device, size, right))
    return rows


def _timed(
    variant: str, lanes: int, precision: str, device: str, size: int, right: list[Tensor]
) -> dict[str, Any]:
    row: dict[str, Any] = {}
    try:
        with arithmetic(precision):
            step = training_step(variant, lanes, device, size, precision == "bf16")
            seconds = 0.01 if size < 28 else 0.1
            gaps = [(g - r).abs().max() / r.abs().max() for g, r in zip(step(), right, strict=True)]
            row["eager ms"] = round(milliseconds(step, device, seconds), 3)
            graph = None if device == "cpu" else milliseconds(captured(step), device, seconds)
            row["graph ms"] = "-" if graph is None else round(graph, 3)
            row["us a lane"] = round(1000 * (graph or row["eager ms"]) / lanes, 1)
            row["gap"] = f"{float(torch.stack(gaps).max()):.0e}"
    except RuntimeError as error:  # one that cannot be captured or does not fit
        row["failed"] = str(error).splitlines()[0][:80]
    return row


def winners(rows: list[dict[str, Any]]) -> list[str]:
    """For each number of lanes and precision, what is quicker than vmap by a tenth or more."""
    found = []
    for key in dict.fromkeys((r["lanes"], r["precision"]) for r in rows):
        here = {
            r["variant"]: r["us a lane"]
            for r in rows
            if (r["lanes"], r["precision"]) == key and "us a lane" in r
        }
        if "vmap" not in here:
            continue
        best = min(here, key=lambda variant: here[variant])
        gain = here["vmap"] / here[best]
        said = f"{best} is {gain:.2f} times as fast as vmap" if gain > 1.1 else "nothing clearly beats vmap"
        found.append(f"{key[0]} lanes, {key[1]}: {said}")
    return found
