"""A model as ONNX, which programs in other languages run. PyTorch writes it with an extra's libraries."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fedkper import models
from fedkper.errors import InputError, RunError
from fedkper.export import modelcard

# PyTorch writes with the first two; the third runs what was written, to check it.
NEEDED = ("onnx", "onnxscript", "onnxruntime")


def require() -> None:
    """Raises InputError if a library is not installed."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise InputError(
            f"--format: ONNX needs the extra: pip install 'fedkper[onnx]' ({', '.join(missing)} missing)"
        )


class _Probabilities(nn.Module):
    """What is exported: from images to probabilities."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:  # [B, channels, H, W] -> [B, classes]
        logits: Tensor = self.net(images)
        return logits.softmax(1)


def write(
    model: str, shape: tuple[int, int, int], classes: Sequence[str], weights: dict[str, Tensor]
) -> bytes:
    """A model of models.find as ONNX: `images` float32 [batch, channels, H, W] in [-1, 1] -> `probabilities`.

    Raises RunError for a model that PyTorch cannot write so.
    """
    net = models.find(model)(shape, len(classes))
    net.load_state_dict(weights)
    sample = torch.zeros(2, shape[2], *shape[:2])
    try:
        with _quiet():
            program: Any = torch.onnx.export(
                _Probabilities(net).eval(),
                (sample,),
                input_names=["images"],
                output_names=["probabilities"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
                dynamo=True,
                verbose=False,
            )
            proto = program.model_proto
    except Exception as error:  # whatever the exporter meets in a user's own model
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).partition("\n")[0]
        raise RunError(f"--format: {model} cannot be written as ONNX ({reason}); use safetensors") from error
    for node in [*proto.graph.node, *(n for f in proto.functions for n in f.node)]:
        del node.metadata_props[:]  # names of source files on this machine
    told = {"classes": json.dumps(classes), "input": modelcard.INPUT, "output": modelcard.OUTPUT}
    for key, value in told.items():
        proto.metadata_props.add(key=key, value=value)
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of itself: deprecations in it, packages that it can do without."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
