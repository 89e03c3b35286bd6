"""Experiment: every knob that decides the numbers of a run, and the paper's presets."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from fedkper import models
from fedkper.errors import InputError
from fedkper.methods import parse as parse_method
from fedkper.ranges import Range, check, near


@dataclass(frozen=True)
class Experiment:
    """One run. The defaults are the paper's protocol (specification 1.1 and 3) on the embedded data."""

    method: str = "fedkper"
    """NAME or NAME:field=value,... or FILE.py:CLASS"""
    dataset: str = "synthetic"
    """synthetic (embedded), a MedMNIST name such as bloodmnist, or a .npz file in MedMNIST's form"""
    size: Annotated[int, Range(8, 1024)] = 28
    """edge of the images in pixels, for MedMNIST's larger files"""
    model: str = "cnn"
    """cnn: the paper's four layers; resnet18 with GroupNorm; or FILE.py:CLASS"""
    head: str = ""
    """prefix of the head's parameters, where the last linear layer is not it"""
    clients: Annotated[int, Range(1, 1_000_000)] = 20
    """number of clients K"""
    fraction: Annotated[float, Range(0, 1, above=True)] = 0.1
    """share of the clients sampled a round, at least one; rounded down"""
    rounds: Annotated[int, Range(1, 1_000_000)] = 100
    """communication rounds T"""
    epochs: Annotated[int, Range(0, 10_000)] = 5
    """local epochs E"""
    batch: Annotated[int, Range(1, 1_000_000)] = 12
    """samples a mini-batch"""
    lr: Annotated[float, Range(0)] = 0.01
    """learning rate of the first round"""
    lr_decay: Annotated[float, Range(0, 1, above=True)] = 0.99
    """factor on the learning rate after every round"""
    momentum: Annotated[float, Range(0, 1)] = 0.9
    """emptied every round"""
    weight_decay: Annotated[float, Range(0)] = 1e-5
    grad_clip: Annotated[float, Range(0)] = 0.0
    """largest gradient norm of a step; 0 clips nothing"""
    partition: Literal["dirichlet", "pathological", "iid", "column"] = "dirichlet"
    """how the train split is dealt out"""
    alpha: Annotated[float, Range(0, 1e6, above=True)] = 0.1
    """Dirichlet concentration: smaller means more skewed labels"""
    min_size: Annotated[int, Range(1, 1_000_000_000)] = 10
    """fewest samples of a client"""
    classes_per_client: Annotated[int, Range(1, 1_000_000)] = 2
    """classes of a client (pathological)"""
    column: str = ""
    """column of the data, one client a value (partition column)"""
    split: Literal["official", "stratified"] = "official"
    """how a client's 20 % local test part is taken"""
    partition_seed: Annotated[int, Range(0, 2**32 - 1)] = 1
    """seed of the partition and the local split, apart from the seed of the run"""
    sampling: Literal["official", "seeded"] = "official"
    """official: the same clients in round t for every seed, as in the paper's code; seeded: by --seed"""
    score_clients: Annotated[int, Range(0, 1_000_000)] = 0
    """clients on whose local test parts the global model is scored a round, drawn once; 0: all"""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """of the arithmetic in the model; tf32 on CUDA devices only"""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 1
    """seed of everything else: initial model, batch order"""

    def checked(self) -> Experiment:
        """Itself, or InputError that names the first option out of range."""
        check(self)
        parse_method(self.method)
        models.find(self.model)
        return self

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


PRESETS: dict[str, dict[str, Any]] = {
    "paper-blood": {"dataset": "bloodmnist", "clients": 20},
    "paper-organc": {"dataset": "organcmnist", "clients": 30},
    "paper-organs": {"dataset": "organsmnist", "clients": 50},
}


def preset(name: str) -> Experiment:
    """The paper's setting for one of its data sets: K clients, 10 % a round, 100 rounds (paper, 4.1)."""
    if name not in PRESETS:
        raise InputError(f"--preset {name}: not known{near(name, PRESETS)}; one of {', '.join(PRESETS)}")
    return Experiment(**PRESETS[name])


def from_json(values: dict[str, Any], where: str) -> Experiment:
    """An experiment from plain values. Raises InputError for an unknown key or a value of another type."""
    hints = get_type_hints(Experiment, include_extras=True)
    for key, value in values.items():
        if key not in hints:
            raise InputError(f"{where}: unknown key '{key}'{near(key, hints)}")
        hint = hints[key]
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise InputError(f"{where}: {key} {value!r}: must be one of {', '.join(get_args(kind))}")
        elif isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            what = {int: "a whole number", float: "a number", str: "text"}[kind]
            raise InputError(f"{where}: {key} {json.dumps(value, default=str)}: must be {what}")
        elif kind is float and abs(value) > sys.float_info.max:
            raise InputError(f"{where}: {key} {value}: must be a finite number")
    fields: dict[str, Any] = {
        k: float(v) if isinstance(getattr(Experiment, k), float) else v for k, v in values.items()
    }
    return Experiment(**fields)


def read_file(path: Path) -> dict[str, Any]:
    """What a configuration file holds. Raises InputError that names it unless that is one JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--config {path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"--config {path}: must hold one JSON object with the options of a run")
    return values


def from_file(path: Path) -> Experiment:
    """An experiment from a run.json (a run's own record) or from a JSON file with some of the fields."""
    values = read_file(path)
    inner = values.get("experiment")
    return from_json(inner if isinstance(inner, dict) else values, f"--config {path}")
