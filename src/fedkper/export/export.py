"""A model out of a run: as safetensors and as ONNX, with what is needed to use it, checked on real images."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as encode

from fedkper import checkpoint, execute, folders, models, run, tree, userfile
from fedkper.data import partition_file
from fedkper.data.dataset import Dataset
from fedkper.errors import InputError, RunError
from fedkper.experiment import Experiment
from fedkper.export import modelcard, onnxfile, predict
from fedkper.export.predict import DESCRIPTION, ONNX, SAFETENSORS
from fedkper.lanes import Lanes
from fedkper.method import Method
from fedkper.methods import parse
from fedkper.runfiles import read_json
from fedkper.tree import Tree, rest

CARD = "MODEL_CARD.md"
# Images of the test set on which an exported model is compared, and how far a probability may be off.
CHECKED, CLOSE = 256, 1e-4


@dataclass(frozen=True)
class Taken:
    """A model as it was in a run."""

    folder: Path
    experiment: Experiment
    stored: dict[str, Any]
    """run.json"""
    model: Lanes
    """in single precision, whatever the run's was"""
    theta: Tree
    round: int
    """rounds done"""
    client: int | None
    """whose it is; None for the global model"""
    visit: int
    """the round it is of: a client's last one"""
    notice: str
    """what the reader of the checkpoint has to say"""

    @property
    def federated(self) -> bool:
        """Whether it was trained by a real federation, whose images are not here."""
        return "federation" in self.stored


def take(folder: Path, client: int | None = None) -> Taken:
    """The model scored as "global" after the last round, or a client's own after its last visit.

    Raises InputError for a run without a finished round, a damaged one, a client that has not taken part, a
    method under which a client keeps no model, and a user's model file that was changed since.
    """
    experiment, stored = run.stored_experiment(folder), read_json(folder, "run.json")
    shape, classes = _form(folder, stored)
    known, now = stored.get("files"), userfile.hashes((experiment.method, experiment.model))
    if any(now[name] != (known or {}).get(name) for name in now):
        raise InputError(
            f"{folder}: {', '.join(now)} was changed since the run was started; restore the file"
        )
    model = models.build(experiment.model, shape, len(classes), experiment.seed, experiment.head)
    checkpoints = folder / "checkpoint"
    done, shared, visits, notice = checkpoint.restore(checkpoints)
    if not done:
        raise InputError(f"{folder}: no round is finished, so there is no model yet; go on with --resume")
    if client is None:
        theta, visit = _global(folder, experiment, done, shared), done
    elif "federation" in stored:
        raise InputError(f"--client {client}: the sites of a federation keep their own models; leave it out")
    else:
        visit = _visit(client, experiment, done, visits)
        own = tree.load(checkpoint.own_path(checkpoints, client, visit))
        theta = _personal(client, experiment, model, shared, own)
    if missing := model.names - theta.keys():
        raise InputError(
            f"{folder}: the model lacks {', '.join(sorted(missing)[:3])}: see the method's scoring"
        )
    theta = {name: theta[name] for name in model.init()}
    return Taken(folder, experiment, stored, model, theta, done, client, visit, notice)


def _form(folder: Path, stored: dict[str, Any]) -> tuple[tuple[int, int, int], list[str]]:
    """(H, W, channels) of the images and the names of the classes."""
    data = stored.get("data")
    shape = data.get("shape") if isinstance(data, dict) else None
    classes = data.get("classes") if isinstance(data, dict) else None
    if not isinstance(classes, list) or not isinstance(shape, list):
        raise InputError(f"{folder / 'run.json'}: damaged, it does not say which data were used")
    if len(shape) != 3:
        raise InputError(
            f"{folder}: its data are no images (shape {shape}); only models of images are exported"
        )
    return (shape[0], shape[1], shape[2]), classes


def _global(folder: Path, experiment: Experiment, done: int, shared: Tree) -> Tree:
    differing = checkpoint.differing(folder / "checkpoint", done)
    if differing is None and type(parse(experiment.method)).global_model is not Method.global_model:
        raise InputError(
            f"{folder}: was written by an earlier version, which did not keep what it scored as global "
            f"under {experiment.method}; go on for a round (--resume, --rounds {done + 1}), or repeat the run"
        )
    return rest(shared) | (differing or {})


def _visit(client: int, experiment: Experiment, done: int, visits: dict[int, int]) -> int:
    """The round of a client's state. Raises InputError where there is none."""
    if client >= experiment.clients:
        raise InputError(f"--client {client}: the run has the clients 0 to {experiment.clients - 1}")
    if not visits:
        raise InputError(_keeps_none(client, experiment))
    if client not in visits:
        some = ", ".join(map(str, sorted(visits)[:20])) + (", ..." if len(visits) > 20 else "")
        raise InputError(f"--client {client}: has not taken part in the {done} rounds; these have: {some}")
    return visits[client]


def _personal(client: int, experiment: Experiment, model: Lanes, shared: Tree, own: Tree) -> Tree:
    theta = parse(experiment.method).personal_model(model, shared, own)
    if theta is None:
        raise InputError(_keeps_none(client, experiment))
    return theta


def _keeps_none(client: int, experiment: Experiment) -> str:
    return (
        f"--client {client}: under {experiment.method} a client keeps no model of its own, its local model "
        "is scored and let go; leave --client out for the global model, or run a method under which a client "
        "keeps one: fedper, fedas, ditto, fedkd, fedala or moon"
    )


def check(out: Path, formats: tuple[str, ...]) -> None:
    """Raises InputError unless a model can be written into `out`, before anything is computed."""
    if ONNX in formats:
        onnxfile.require()
    if os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
        raise InputError(f"--model {out}: is there and not empty; name another folder")


def write(taken: Taken, dataset: Dataset | None, out: Path, formats: tuple[str, ...]) -> dict[str, Any]:
    """The folder of an exported model; returns on which images it was compared with the run's model.

    `dataset`: the run's; None for a federation's model, which is compared on noise. All is written beside
    `out` and moved there when it is complete and checked. Raises RunError if a probability is off by more
    than CLOSE, or if the model cannot be written as ONNX.
    """
    if dataset is not None and dataset.hash != taken.stored["data"].get("hash"):
        raise InputError(
            f"{taken.folder}: {taken.experiment.dataset} holds other data (hash {dataset.hash[:12]}) than "
            "the run was made with; name the folder of those with --data"
        )
    folders.make(out.absolute().parent)
    files = _files(taken, formats)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    try:
        with tempfile.TemporaryDirectory(prefix=".export-", dir=out.absolute().parent) as beside:
            folder = Path(beside) / "model"
            folder.mkdir()
            for name, data in files.items():
                tree.write(folder / name, data)
            about = modelcard.about(taken, hashes)
            _write_json(folder, about)
            images = _images(taken, dataset)
            off = differences(taken, images, folder, formats)
            what = "test images" if dataset else "images of noise"
            checks: dict[str, Any] = {"images": len(images), "what": what, "largest_difference": off}
            if taken.client is not None and dataset is not None:
                checks["local_test"] = local_test(taken, dataset, taken.client)
            _write_json(folder, about | {"checks": checks})
            tree.write(folder / CARD, modelcard.card(taken, about, checks).encode())
            if out.is_dir():
                out.rmdir()
            os.replace(folder, out)
    except OSError as error:
        raise RunError(f"--model {out}: cannot be written ({error.strerror})") from error
    return checks


def _write_json(folder: Path, about: dict[str, Any]) -> None:
    text = json.dumps(about, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    tree.write(folder / DESCRIPTION, text.encode(errors="backslashreplace"))


def _files(taken: Taken, formats: tuple[str, ...]) -> dict[str, bytes]:
    """Name -> content: the weights in each format, and the user's own model file."""
    files = {}
    weights = {name: leaf[0].contiguous() for name, leaf in taken.theta.items()}
    if SAFETENSORS in formats:
        files[SAFETENSORS] = encode(weights, {"format": "pt"})
    if ONNX in formats:
        files[ONNX] = onnxfile.write(taken.experiment.model, *_form(taken.folder, taken.stored), weights)
    if userfile.is_one(taken.experiment.model):
        path = userfile.split(taken.experiment.model)[0]
        files[path.name] = path.read_bytes()
    return files


def _images(taken: Taken, dataset: Dataset | None) -> NDArray[np.uint8]:
    """Images of the test set, spread over it; noise where there is none."""
    if dataset is None:
        shape, _ = _form(taken.folder, taken.stored)
        images = np.random.default_rng(0).integers(0, 256, (CHECKED, *shape))
    else:
        count = len(dataset.test_x)
        images = dataset.test_x[np.linspace(0, count - 1, min(CHECKED, count)).astype(int)]
    return np.asarray(images, np.uint8)


def differences(
    taken: Taken, images: NDArray[np.uint8], folder: Path, formats: tuple[str, ...]
) -> dict[str, float]:
    """By file, the largest difference of a probability from the run's model."""
    ours = predict.softmax(execute.logits(taken.model, taken.theta, torch.from_numpy(images)[None])[0])
    off = {name: largest(predict.load(folder, name).probabilities(images), ours) for name in formats}
    for name, difference in off.items():
        if not difference <= CLOSE:
            raise RunError(
                f"--model: {name} is off by up to {difference:.1e} from the run's model on {len(images)} "
                f"images, more than {CLOSE:g}; nothing was written"
            )
    return off


def local_test(taken: Taken, dataset: Dataset, client: int) -> dict[str, Any]:
    """The accuracy of a client's model on its local test part, None if that is empty."""
    partition = partition_file.load(taken.folder / "partition.json")
    part = partition.test[client]
    accuracy = None
    if len(part):
        images = torch.from_numpy(dataset.train_x[part])
        said = execute.logits(taken.model, taken.theta, images[None])[0].argmax(1).numpy()
        accuracy = float((said == dataset.train_y[part]).mean())
    return {"images": len(part), "accuracy": accuracy, "trained_on": len(partition.train[client])}


def largest(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """The largest absolute difference; infinite where only one of them is a number."""
    both = np.isnan(a) & np.isnan(b)
    off = np.where(both, 0.0, np.abs(a - b))
    return float(np.nan_to_num(off, nan=np.inf).max(initial=0.0))
