"""What an exported model says of itself: model.json for programs, MODEL_CARD.md for people."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedkper import __version__, userfile
from fedkper.errors import InputError
from fedkper.experiment import Experiment
from fedkper.export.predict import FORMAT, ONNX, SAFETENSORS
from fedkper.runfiles import read_json, read_rows

if TYPE_CHECKING:
    from fedkper.export.export import Taken

INPUT = "images, float32 [batch, channels, height, width], (x / 255 - 0.5) / 0.5 of pixels from 0 to 255"
OUTPUT = "probabilities, float32 [batch, classes]: softmax of the logits, not calibrated"
SCORES = {
    "global_acc": "global accuracy",
    "global_bwt": "global backward transfer",
    "global_consistency": "global consistency",
    "local_acc": "local accuracy",
    "worst_client_acc": "worst client",
    "local_consistency": "local consistency",
    "balance": "balance",
}

LIMITS = """\
- **Not a medical device.** For research on federated learning; not for diagnosis, treatment or triage.
- Tested on the test images of its own data set only: not on images of other hospitals, scanners, stains or
  populations, not on subgroups of patients, and not for robustness.
- The probabilities are not calibrated, and the model has no class for "none of these": it names one of its
  classes for any picture, also for one of something else.
- Training was not differentially private: a model may remember training images."""
# Options that a command names even where they are the defaults.
NAMED = ("method", "dataset", "seed")
BY_IMAGE = """
- Training and local test parts are split by image, not by patient: where a patient has several images, they
  may be on both sides."""
# Columns of rounds.csv, as far as a run has them.
OWN = {
    "global_acc": "accuracy",
    "global_balanced_acc": "balanced accuracy",
    "global_f1": "macro F1",
    "global_auc": "AUC",
    "global_ece": "expected calibration error",
}


def about(taken: Taken, hashes: Mapping[str, str]) -> dict[str, Any]:
    """model.json. `hashes`: SHA-256 of the files beside it, by name."""
    e, data = taken.experiment, taken.stored["data"]
    scored = taken.stored.get("scored") or {}
    file = userfile.split(e.model)[0].name if userfile.is_one(e.model) else None
    return {
        "format": FORMAT,
        "fedkper": __version__,
        "model": {
            "name": e.model if file is None else f"{file}:{userfile.split(e.model)[1]}",
            "file": file,
            "parameters": sum(leaf[0].numel() for leaf in taken.theta.values()),
        },
        "shape": data["shape"],
        "classes": data["classes"],
        "input": INPUT,
        "output": OUTPUT,
        "precision": {"exported": "float32", "of the run": e.precision},
        "files": dict(hashes),
        "of": {
            "client": taken.client,
            "model": scored.get("global", "global") if taken.client is None else "the client's own model",
            "round": taken.visit,
            "rounds_done": taken.round,
            "rounds_planned": e.rounds,
        },
        "run": {
            "folder": taken.folder.absolute().name,
            "experiment": e.to_json(),
            "method": taken.stored.get("method"),
            "partition": taken.stored.get("partition"),
            "versions": taken.stored.get("versions"),
        },
        "data": data,
    }


def card(taken: Taken, about: Mapping[str, Any], checks: Mapping[str, Any]) -> str:
    """MODEL_CARD.md."""
    whose = "global model" if taken.client is None else f"model of client {taken.client}"
    parts = [
        f"# {about['data'].get('name', 'unnamed')}: {whose} of {taken.experiment.method}",
        _what(taken, about),
        "## Limits\n\n" + LIMITS + (BY_IMAGE if _by_image(taken) else ""),
        "## Results\n\n" + _results(taken, checks),
        "## Data\n\n" + _data(about["data"]),
        "## Method\n\n" + _method(taken),
        "## Use\n\n" + _use(about),
        "## Files\n\n" + _files(about, checks),
        "## Again\n\n" + _again(taken),
    ]
    return "\n\n".join(parts) + "\n"


def _what(taken: Taken, about: Mapping[str, Any]) -> str:
    of, (h, w, c) = about["of"], about["shape"]
    when = f"after round {taken.visit} of {taken.experiment.rounds}"
    if taken.client is not None and taken.visit < taken.round:
        when += f", the client's last one before the end of round {taken.round}"
    text = (
        f"Classifies images of {h} x {w} pixels with {c} channel{'s' if c > 1 else ''} into "
        f"{len(about['classes'])} classes: {', '.join(about['classes'])}. "
        f"It is {of['model']}, {when}, made by fedkper {__version__}. "
        f"Model {about['model']['name']}, {about['model']['parameters']:,} parameters."
    )
    if taken.experiment.precision != "float32":
        text += (
            f"\n\nThe run computed in {taken.experiment.precision}, the exported model in float32: its "
            "answers differ slightly from those that were scored."
        )
    return text


def _by_image(taken: Taken) -> bool:
    if taken.federated:  # how a site takes its test part is its own matter
        return False
    partition = taken.stored.get("partition")
    return not isinstance(partition, dict) or partition.get("per", "image") == "image"


def _results(taken: Taken, checks: Mapping[str, Any]) -> str:
    """The scores of the run, and those of this very model."""
    try:
        summary = read_json(taken.folder, "summary.json")
        rows = [(name, summary[key]) for key, name in SCORES.items()]
        lines = [f"| {name} | {_shown(entry)} |" for name, entry in rows]
    except (InputError, KeyError, TypeError, AttributeError):
        lines = ["| not recorded: the run did not come to an end | |"]
    table = "\n".join(["| over the run's rounds | mean ± deviation over rounds |", "|---|---|", *lines])
    return f"{_own_score(taken, checks)}\n\nThe run it is from:\n\n{table}"


def _own_score(taken: Taken, checks: Mapping[str, Any]) -> str:
    if taken.client is None:
        rows = read_rows(taken.folder / "rounds.csv")
        line = next((r for r in rows if int(r["round"]) == taken.visit), {"global_acc": ""})
        found = ", ".join(f"{name} {_number(line[key])}" for key, name in OWN.items() if key in line)
        count = taken.stored["data"].get("test", "")
        if taken.federated and not count:
            return "This model has no score on images that no site has seen: the coordinator had none."
        return f"This model, on the {count} images of the test set: {found}."
    local = checks["local_test"]
    value = "not defined" if local["accuracy"] is None else f"{local['accuracy']:.4f}"
    return (
        f"This model, on the {local['images']} images of the client's local test part: accuracy {value}. The "
        f"client trained on {local['trained_on']} images of its own."
    )


def _number(text: str) -> str:
    return f"{float(text):.4f}" if text else "not defined"


def _shown(entry: Mapping[str, Any]) -> str:
    if entry["mean"] is None:
        return f"not defined: {entry.get('reason', '')}"
    deviation = entry.get("std_rounds")
    return f"{entry['mean']:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")


def _data(data: Mapping[str, Any]) -> str:
    facts = {
        "name": data.get("name"),
        "images": f"{data.get('train')} train, {data.get('test')} test",
        "licence": data.get("licence") or "not known to fedkper: ask whoever gave you the data",
        "citation": data.get("citation") or "none known",
        "note": data.get("note"),
        "SHA-256 of the arrays": data.get("hash"),
    }
    lines = [f"- {key}: {value}" for key, value in facts.items() if value]
    lines += [f"- notice: {text}" for text in data.get("notices", [])]
    end = (
        "The licence of the model follows from those of the data and of the code that trained it (fedkper: "
        "Apache 2.0); cite the data where you show results."
    )
    return "\n".join(lines) + f"\n\n{end}"


def _method(taken: Taken) -> str:
    e = taken.experiment
    fields = dict(taken.stored.get("method") or {})
    name = fields.pop("name", e.method)
    settings = ", ".join(f"{k} = {v}" for k, v in fields.items()) or "no settings"
    options = "\n".join(f"- {k.replace('_', '-')}: {v}" for k, v in e.to_json().items() if v != "")
    return f"{name}: {settings}.\n\n{options}"


def _use(about: Mapping[str, Any]) -> str:
    """Commands and code that a reader can copy."""
    h, w, c = about["shape"]
    images = f"images: float32 [n, {c}, {h}, {w}], (x / 255 - 0.5) / 0.5"
    parts = [
        "    fedkper predict FOLDER_OF_THIS_FILE IMAGES --out predictions.csv",
        "The same by hand, in this folder:",
    ]
    if SAFETENSORS in about["files"]:
        parts.append(
            "```python\n"
            "from safetensors.torch import load_file\n"
            "from fedkper import models\n\n"
            f"net = models.find({json.dumps(about['model']['name'])})({(h, w, c)}, {len(about['classes'])})\n"
            f'net.load_state_dict(load_file("{SAFETENSORS}"))\n'
            f"probabilities = net.eval()(images).softmax(1)  # {images}\n"
            "```"
        )
    if ONNX in about["files"]:
        parts.append(
            "```python\n"
            "import onnxruntime\n\n"
            f'session = onnxruntime.InferenceSession("{ONNX}")\n'
            f'(probabilities,) = session.run(None, {{"images": images}})  # {images}\n'
            "```"
        )
    return "\n\n".join(parts)


def _files(about: Mapping[str, Any], checks: Mapping[str, Any]) -> str:
    off: Mapping[str, float] = checks["largest_difference"]
    lines = [
        f"- `{name}`, SHA-256 {digest}"
        + (
            f"; probabilities off by at most {off[name]:.1e} on {checks['images']} {checks['what']}"
            if name in off
            else ""
        )
        for name, digest in about["files"].items()
    ]
    return "\n".join([*lines, "- `model.json`: all of this for programs"])


def _again(taken: Taken) -> str:
    if taken.federated:
        return "It was trained by the sites of a federation, on images that only they have."
    words = command(taken.experiment)
    return f"    fedkper {' '.join(map(shlex.quote, words))}\n\nOn one machine it gives the same numbers."


def command(e: Experiment) -> Sequence[str]:
    """The words that run an experiment again: what it is, and every option that is not its default."""
    words = ["run"]
    for f in dataclasses.fields(e):
        value = getattr(e, f.name)
        if value != f.default or f.name in NAMED:
            words += ["--" + f.name.replace("_", "-"), str(value)]
    return words
