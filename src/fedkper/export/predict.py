"""An exported model at work: pictures in, a probability for each class out."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as decode

from fedkper import execute, models
from fedkper.errors import InputError
from fedkper.export.imagefiles import Picture, Pixels, read
from fedkper.task import CHUNK, pixels
from fedkper.tree import Tree

DESCRIPTION, SAFETENSORS, ONNX = "model.json", "model.safetensors", "model.onnx"
# Of the description and how it is read; a later version that changes it counts up.
FORMAT = 1

Probabilities = NDArray[np.float64]


@dataclass(frozen=True)
class Model:
    """A model as `fedkper export` wrote it."""

    folder: Path
    about: dict[str, Any]
    """model.json"""
    shape: tuple[int, int, int]
    """(H, W, channels) of its pictures"""
    classes: tuple[str, ...]
    probabilities: Callable[[Pixels], Probabilities]
    """[n, H, W, channels] uint8 -> [n, classes]; NaN where the model gives no number"""


def load(folder: Path, file: str = "") -> Model:
    """The model in an exported folder, from its safetensors file, else from ONNX, or from `file`.

    Raises InputError for a folder without one, for a file that is not as it was written, and for one that
    was made by a later version.
    """
    about = _description(folder)
    try:
        shape, classes = tuple(about["shape"]), tuple(about["classes"])
        files, name, source = dict(about["files"]), about["model"]["name"], about["model"]["file"]
        if about["format"] != FORMAT or len(shape) != 3 or not classes:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder / DESCRIPTION}: damaged, or of another version; export the model again"
        ) from error
    file = file or (SAFETENSORS if SAFETENSORS in files else ONNX)
    data = {part: _bytes(folder, part, files) for part in ([file, source] if source else [file])}
    if file == ONNX:
        return Model(folder, about, shape, classes, _from_onnx(data[file], folder))
    name = f"{folder / source}:{name.rpartition(':')[2]}" if source else name
    return Model(folder, about, shape, classes, _from_safetensors(data[file], folder, name, shape, classes))


def _description(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{folder}: holds no exported model ({DESCRIPTION}: {error.strerror}); "
            "make one with fedkper export RUN --model FOLDER"
        ) from error
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise InputError(f"{folder / DESCRIPTION}: damaged; export the model again")
    return about


def _bytes(folder: Path, name: str, files: dict[str, str]) -> bytes:
    """A file of the folder, compared with its checksum: the user's model file is run, weights decide."""
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise InputError(f"{folder / name}: cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != files.get(name):
        raise InputError(f"{folder / name}: not as it was exported (checksum); export the model again")
    return data


def _from_safetensors(
    data: bytes, folder: Path, name: str, shape: tuple[int, int, int], classes: tuple[str, ...]
) -> Callable[[Pixels], Probabilities]:
    model = models.build(name, shape, len(classes), seed=0)
    try:
        theta: Tree = {k: v[None].clone() for k, v in decode(data).items()}
    except SafetensorError as error:
        raise InputError(f"{folder / SAFETENSORS}: damaged ({error}); export the model again") from error
    here = {k: v.shape for k, v in model.init().items()}
    if here != {k: v.shape for k, v in theta.items()}:
        raise InputError(f"{folder / SAFETENSORS}: holds other parameters than the model {name} has")
    return lambda images: softmax(execute.logits(model, theta, _tensor(images)[None])[0])


def _tensor(images: Pixels) -> torch.Tensor:
    """Without a copy where PyTorch can take the memory as it is."""
    return torch.from_numpy(np.require(images, requirements=["C", "W"]))


def softmax(logits: torch.Tensor) -> Probabilities:
    """[n, C] -> [n, C]"""
    found: Probabilities = logits.double().softmax(-1).numpy()
    return found


def _from_onnx(data: bytes, folder: Path) -> Callable[[Pixels], Probabilities]:
    if find_spec("onnxruntime") is None:
        raise InputError("a model.onnx is run by an extra that is not installed: pip install 'fedkper[onnx]'")
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    except Exception as error:  # of many kinds, none of them public
        raise InputError(f"{folder / ONNX}: cannot be run ({str(error).splitlines()[0]})") from error

    def probabilities(images: Pixels) -> Probabilities:
        parts = [pixels(part).contiguous().numpy() for part in _tensor(images).split(CHUNK)]
        return np.concatenate([session.run(None, {"images": part})[0] for part in parts]).astype(np.float64)

    return probabilities


@dataclass
class Tally:
    """What happened to the pictures."""

    done: int = 0
    broken: int = 0
    undefined: int = 0
    """pictures for which the model gave no number"""
    changes: Counter[str] = field(default_factory=Counter)
    """how many pictures were changed, by what was done"""


def lines(
    model: Model, files: Iterable[Path], resize: bool, tally: Tally, on_fault: Callable[[Picture], None]
) -> Iterator[list[str]]:
    """A row of cells for each picture that can be read: file, index, class, a probability a class.

    `on_fault` is told of each of the others. Where the model gives no number, the cells are empty.
    """
    good = (p for p in _pictures(model, files, resize, tally, on_fault) if p.pixels is not None)
    while batch := list(islice(good, CHUNK)):
        found = model.probabilities(np.stack([p.pixels for p in batch if p.pixels is not None]))
        for picture, row in zip(batch, found, strict=True):
            tally.done += 1
            index = "" if picture.at is None else str(picture.at)
            if np.isfinite(row).all():
                cells = [model.classes[int(row.argmax())], *(f"{p:.6f}" for p in row)]
            else:
                tally.undefined += 1
                cells = [""] * (1 + len(row))
            yield [picture.file, index, *cells]


def _pictures(
    model: Model, files: Iterable[Path], resize: bool, tally: Tally, on_fault: Callable[[Picture], None]
) -> Iterator[Picture]:
    for file in files:
        for picture in read(file, model.shape, resize):
            tally.broken += bool(picture.fault)
            tally.changes.update(picture.changes)
            if picture.fault:
                on_fault(picture)
            yield picture


def heading(model: Model) -> list[str]:
    return ["file", "index", "class", *(f"p_{name}" for name in model.classes)]


def as_csv(rows: Iterable[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
