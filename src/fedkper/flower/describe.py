"""run.json of a federation, with the entries that every run has."""

from __future__ import annotations

import dataclasses
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fedkper import __version__, userfile
from fedkper.flower.contract import PREPROCESSING, Plan
from fedkper.flower.settings import Federation
from fedkper.run import LIBRARIES


def description(
    federation: Federation, plan: Plan, held: Mapping[str, tuple[int, int]], test: int
) -> dict[str, Any]:
    """What is run: `held` are the train and local test images of the sites that joined, `test` those of G."""
    e, model = federation.experiment, plan.model
    sizes = {name: dict(zip(("train", "test"), pair, strict=True)) for name, pair in held.items()}
    return {
        "experiment": e.to_json(),
        "method": {"name": type(plan.method).__name__, **dataclasses.asdict(plan.method)},
        "scored": dict(zip(("global", "local"), plan.method.scored, strict=True)),
        "data": {
            "name": "federation",
            "hash": None,
            "classes": list(federation.classes),
            "shape": list(federation.shape),
            "train": sum(train for train, _ in held.values()),
            "test": test,
            "notices": [],
        },
        "federation": {
            "id": federation.id,
            "sites": list(federation.sites),
            "joined": sizes,
            "contract": plan.fingerprint,
            **dataclasses.asdict(federation.rounds),
            **dataclasses.asdict(federation.limits),
        },
        "model": {
            "name": e.model,
            "parameters": sum(v[0].numel() for v in model.init().values()),
            "head": [name for name in model.init() if model.in_head(name)],
        },
        "preprocessing": PREPROCESSING,
        "files": userfile.hashes((e.method, e.model)),
        "execution": {"data": None, "folder": None, "device": "cpu", "workers": 1},
        "versions": {
            "fedkper": __version__,
            "python": platform.python_version(),
            **{n: version(n) for n in (*LIBRARIES, "flwr")},
        },
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "platform": f"{sys.platform} {platform.machine()}",
    }
