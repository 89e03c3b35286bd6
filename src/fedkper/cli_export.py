"""The commands that take results and models out of runs, and use a model: export, predict."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fedkper import folders, run, tables, tree
from fedkper.errors import InputError, RunError
from fedkper.export import export, imagefiles, predict, tidy
from fedkper.export.imagefiles import Picture
from fedkper.export.predict import ONNX, SAFETENSORS
from fedkper.options import Command, OptionalPath
from fedkper.ranges import Range, check
from fedkper.run import Execution

FORMATS = {"safetensors": (SAFETENSORS,), "onnx": (ONNX,), "both": (SAFETENSORS, ONNX)}
OptionalClient = Annotated[int | None, Range(0, 999_999), tyro.conf.arg(metavar="INT", help_behavior_hint="")]


@dataclass(frozen=True)
class Export(Command):
    """Numbers and models out of runs: --curves for one table of all numbers, --model for a model."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs, or folders that hold some at any depth; with --model one run"""
    curves: OptionalPath = None
    """FILE.csv or FILE.parquet: a line for each number of rounds.csv and clients.csv"""
    model: OptionalPath = None
    """new folder for the global model, with model.json and MODEL_CARD.md"""
    client: OptionalClient = None
    """with --model: the personal model of this client (from 0) since its last visit, not the global one"""
    format: Literal["safetensors", "onnx", "both"] = "safetensors"
    """of --model"""
    data: OptionalPath = None
    """with --model: folder of the data files, to check the model on test images; else where they were"""

    def act(self) -> None:
        check(self)
        self._refuse()
        found = folders.runs(self.runs, lambda path: tables.notice(f"{path}: holds no run, left out"))
        if self.model is not None and len(found) > 1:
            raise InputError(
                f"--model: takes one run, but {len(found)} are named, such as {found[0]} and {found[1]}"
            )
        if self.model is not None:
            export.check(self.model, FORMATS[self.format])
        if self.curves is not None:
            count = tidy.write(found, self.curves)
            tables.line(
                f"curves: {self.curves} ({count:,} numbers of {len(found)} run{'s' * (len(found) > 1)})"
            )
        if self.model is not None:
            self._model(found[0], self.model)

    def _refuse(self) -> None:
        """Raises InputError for options that do not go together."""
        if self.curves is None and self.model is None:
            raise InputError(
                "export: what is wanted? --curves FILE.csv for the numbers, --model FOLDER for the model"
            )
        if self.curves is not None:
            tidy.check(self.curves)
            refuse_folder("--curves", self.curves)
        idle = {"--client": self.client is not None, "--data": self.data is not None}
        idle["--format"] = self.format != "safetensors"
        for option in (name for name, given in idle.items() if given and self.model is None):
            raise InputError(f"{option}: has no effect without --model; leave it out")

    def _model(self, folder: Path, out: Path) -> None:
        taken = export.take(folder, self.client)
        if taken.notice:
            tables.notice(taken.notice)
        rounds = taken.experiment.rounds
        if taken.round < rounds:
            tables.notice(f"{folder}: {taken.round} of {rounds} rounds are done; this is its model so far")
        if taken.experiment.precision != "float32":
            tables.notice(
                f"the run computed in {taken.experiment.precision}; the exported model computes in float32"
            )
        experiment = dataclasses.replace(taken.experiment, precision="float32")  # the check needs no GPU
        if taken.federated and self.data is not None:
            raise InputError("--data: has no effect on a federation's model, whose images are at the sites")
        dataset = None if taken.federated else run.load(experiment, *_where(taken, self.data))
        checks = export.write(taken, dataset, out, FORMATS[self.format])
        whose = "global model" if self.client is None else f"model of client {self.client}"
        tables.line(f"{whose}, round {taken.visit} of {rounds}: {out}")
        on = f"{checks['images']} {checks['what']}"
        for name, difference in checks["largest_difference"].items():
            tables.line(f"{name}: probabilities off by at most {difference:.1e} on {on}")


def _where(taken: export.Taken, given: Path | None) -> tuple[Execution, str | None]:
    """Where the data of a run are, for run.load: as given, else where they were when it ran."""
    stored = taken.stored.get("execution")
    known = stored if isinstance(stored, dict) else {}
    data, folder = known.get("data"), known.get("folder")
    place = given or (Path(data) if isinstance(data, str) else None)
    return Execution(data=place), folder if isinstance(folder, str) else None


@dataclass(frozen=True)
class Predict(Command):
    """The classes of images, by an exported model: a line of CSV each, with a probability a class."""

    model: tyro.conf.Positional[Path]
    """folder that export --model wrote"""
    images: tyro.conf.Positional[tuple[Path, ...]]
    """PNG, JPEG, BMP or TIFF files, .npy or .npz arrays, folders of them"""
    out: OptionalPath = None
    """FILE.csv; else to the terminal"""
    resize: bool = False
    """changes pictures of another size than the model takes, which are refused otherwise"""

    def act(self) -> None:
        if self.out is not None:
            refuse_folder("--out", self.out)
        model, files = predict.load(self.model), imagefiles.found(self.images)
        tally = predict.Tally()
        rows = [predict.heading(model), *predict.lines(model, files, self.resize, tally, _broken)]
        for what, count in tally.changes.items():
            tables.notice(f"{count:,} picture{'s' * (count > 1)}: {what}")
        if tally.undefined:
            empty = f"{tally.undefined:,} without an answer, so with empty cells"
            tables.notice(f"{empty}: the model gives no number (NaN)")
        self._write(predict.as_csv(rows))
        if tally.broken:
            raise RunError(f"{tally.broken:,} not classified, as said above; {tally.done:,} classified")

    def _write(self, text: str) -> None:
        if self.out is None:
            print(text, end="")
            return
        try:
            tree.write(self.out, text.encode(errors="surrogateescape"))
        except OSError as error:
            raise RunError(f"--out {self.out}: cannot be written ({error.strerror})") from error
        tables.line(f"predictions: {self.out}")


def _broken(picture: Picture) -> None:
    place = picture.file if picture.at is None else f"{picture.file}, index {picture.at}"
    tables.line(f"{place}: {picture.fault}", "red", tables.err)


def refuse_folder(option: str, file: Path) -> None:
    """Raises InputError if a file cannot be written there, before anything is computed."""
    if os.path.isdir(file):
        raise InputError(f"{option} {file}: is a folder; name a file in it")
    if not os.path.isdir(file.absolute().parent):
        raise InputError(f"{option} {file}: its folder {file.parent} does not exist")


COMMANDS: dict[str, type[Command]] = {"export": Export, "predict": Predict}
