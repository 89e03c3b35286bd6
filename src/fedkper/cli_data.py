"""The commands on data: data list, data get, data show, data split."""

from __future__ import annotations

import os
from dataclasses import dataclass

import tyro

from fedkper import data, folders, run, tables
from fedkper.data import medmnist, partition_file
from fedkper.data import partition as partitions
from fedkper.data.dataset import Dataset
from fedkper.errors import InputError
from fedkper.options import Command, OptionalPath, Options, refuse_size


@dataclass(frozen=True)
class List(Command):
    """The published sets: counts, classes, channels, licence, and whether the file is there."""

    data: OptionalPath = None
    """folder of the data files"""

    def act(self) -> None:
        folder = data.folder(self.data)
        tables.sets(medmnist.rows(folder))
        tables.line(f"data folder: {folder}")
        tables.line("embedded, always there: synthetic (8 classes, 28 x 28 RGB, 4,000 + 1,000 images)")


@dataclass(frozen=True)
class OneSet(Command):
    """What the commands on one set take."""

    name: tyro.conf.Positional[str]
    size: int = 28
    """edge of the images: 28, 64, 128 or 224"""
    data: OptionalPath = None
    """folder of the data files"""

    def load(self) -> Dataset:
        refuse_size(self.name, self.name, self.size)
        dataset = data.load(self.name, self.size, self.data)
        for text in dataset.notices:
            tables.notice(text)
        return dataset


@dataclass(frozen=True)
class Get(OneSet):
    """Downloads a published set, with its checksum, into the data folder."""

    def act(self) -> None:
        dataset = self.load()
        place = medmnist.find(self.name, data.folder(self.data), self.size)
        tables.line(f"{dataset.name}: {place or 'embedded, nothing to download'}")


@dataclass(frozen=True)
class Show(OneSet):
    """What is in a set: counts per class, shape, licence, citation, notices."""

    def act(self) -> None:
        tables.dataset(self.load())


@dataclass(frozen=True)
class Split(Options):
    """Draws a partition and stores it in --out with a picture of who holds what.

    It takes all options of a run, so that one line serves both; those of the training change nothing.
    """

    def act(self) -> None:
        from fedkper import plots

        experiment = self.experiment().checked()
        if self.partition_file is not None:
            raise InputError("--partition-file: data split draws a partition; leave it out")
        dataset = data.load(experiment.dataset, experiment.size, self.data)
        partition = partitions.make(
            run.partitioning(experiment), dataset.train_y, dataset.hash, dataset.columns
        )
        train, test = partition.counts(dataset.train_y, len(dataset.classes))
        how = f"alpha {experiment.alpha:g}" if experiment.partition == "dirichlet" else experiment.partition
        name, seed = tables.plain(dataset.name), experiment.partition_seed
        title = f"{name}: {len(train)} clients, {how}, partition seed {seed}"
        with folders.out(self.out, f"{dataset.name}-split") as folder:
            if os.path.exists(folder / "run.json"):
                raise InputError(
                    f"--out {folder}: holds a run, whose partition must stay; name another folder"
                )
            folders.make(folder)
            try:
                partition_file.save(partition, folder / "partition.json")
                plots.holdings(train, test, dataset.classes, folder / "partition.png", title)
            except OSError as error:
                raise InputError(f"--out {folder}: cannot be written ({error.strerror})") from error
        tables.holdings(train, test, dataset.classes)
        tables.line(f"hash: {partition.hash}")
        tables.line(f"partition: {folder / 'partition.json'}")
        tables.line(f"picture: {folder / 'partition.png'}")


COMMANDS: dict[str, type[Command]] = {"list": List, "get": Get, "show": Show, "split": Split}
