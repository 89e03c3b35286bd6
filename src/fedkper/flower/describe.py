"""run.json of a federation, with the entries that every run has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedkper import describe
from fedkper.flower.contract import Plan
from fedkper.flower.settings import Federation


def description(
    federation: Federation, plan: Plan, held: Mapping[str, tuple[int, int]], test: int
) -> dict[str, Any]:
    """What is run: `held` are the train and local test images of the sites that joined, `test` those of G."""
    data = {
        "name": "federation",
        "hash": federation.id,  # what the sites hold is not known here, but that it is theirs
        "classes": list(federation.classes),
        "shape": list(federation.shape),
        "train": sum(train for train, _ in held.values()),
        "test": test,
        "notices": [],
    }
    agreed = {
        "id": federation.id,
        "sites": list(federation.sites),
        "joined": {name: dict(zip(("train", "test"), pair, strict=True)) for name, pair in held.items()},
        "contract": plan.fingerprint,
        **dataclasses.asdict(federation.rounds),
        **dataclasses.asdict(federation.limits),
    }
    execution = {"data": None, "folder": None, "device": "cpu", "workers": 1}
    libraries = (*describe.LIBRARIES, "flwr")
    return describe.entries(federation.experiment, plan.model, data, execution, libraries, federation=agreed)
