"""run.json: all that is needed to run it again and to know what was run."""

from __future__ import annotations

import dataclasses
import platform
import sys
import time
from importlib.metadata import version
from typing import Any

from fedkper import __version__, userfile
from fedkper.data.dataset import Dataset
from fedkper.data.partition import Partition
from fedkper.experiment import Experiment
from fedkper.lanes import Lanes
from fedkper.methods import parse as parse_method

PREPROCESSING = "(x / 255 - 0.5) / 0.5"
LIBRARIES = ("torch", "numpy", "safetensors")


def simulation(
    experiment: Experiment, execution: dict[str, Any], dataset: Dataset, partition: Partition, model: Lanes
) -> dict[str, Any]:
    """What a run of the simulator is; `execution` holds what could differ with the same numbers."""
    held = {
        "name": dataset.name,
        "hash": dataset.hash,
        "classes": list(dataset.classes),
        "shape": list(dataset.shape),
        "train": len(dataset.train_y),
        "test": len(dataset.test_y),
        "notices": list(dataset.notices),
        **dataset.source,
    }
    dealt = {"hash": partition.hash, "smallest": int(partition.sizes.min()), "per": "image"}
    return entries(experiment, model, held, execution, partition=dealt)


def entries(
    experiment: Experiment,
    model: Lanes,
    data: dict[str, Any],
    execution: dict[str, Any],
    libraries: tuple[str, ...] = LIBRARIES,
    **more: Any,
) -> dict[str, Any]:
    """What the simulator's runs and a federation's have in common, and `more`."""
    method = parse_method(experiment.method)
    return {
        "experiment": experiment.to_json(),
        "method": {"name": type(method).__name__, **dataclasses.asdict(method)},
        "scored": dict(zip(("global", "local"), method.scored, strict=True)),
        "data": data,
        **more,
        "model": {
            "name": experiment.model,
            "parameters": sum(v[0].numel() for v in model.init().values()),
            "head": [name for name in model.init() if model.in_head(name)],
        },
        "preprocessing": PREPROCESSING,
        "files": userfile.hashes((experiment.method, experiment.model)),
        "execution": execution,
        "versions": {
            "fedkper": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in libraries},
        },
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "platform": f"{sys.platform} {platform.machine()}",
    }
