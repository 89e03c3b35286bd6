"""A run from its experiment: data, partition, model and folder, then the rounds. Starting and resuming."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedkper import __version__, data, describe, models, userfile
from fedkper.data import medmnist, partition_file
from fedkper.data import partition as partitions
from fedkper.data.dataset import Dataset
from fedkper.data.partition import Partition, Partitioning
from fedkper.errors import InputError, RunError
from fedkper.execute import cores
from fedkper.experiment import Experiment, from_json
from fedkper.methods import parse as parse_method
from fedkper.record import Record, refuse_used
from fedkper.runfiles import read_json
from fedkper.sample import clients_per_round
from fedkper.simulate import Member, OnRound, simulate_together
from fedkper.site import Site, site_of
from fedkper.track import tracked

# More processes than clients a round still share the scoring; more than this wait for each other.
FEW = 8


@dataclass(frozen=True)
class Execution:
    """What may differ between two runs with the same numbers."""

    data: Path | None = None
    """folder of the data files; else $FEDKPER_DATA, else the user's cache"""
    workers: int | None = None
    """processes that train; one a core if not given, but no more than a round has work for"""
    device: str = "cpu"
    """cpu, cuda or cuda:N"""
    lanes: int | None = None
    """clients that train side by side; if not given one on a CPU, elsewhere as many as fit into memory"""
    track: Path | None = None
    """folder for TensorBoard, if curves are to be written there"""


@dataclass(frozen=True)
class Watch:
    """What a person is told meanwhile."""

    begun: Callable[[Experiment, Dataset, int], None] = lambda experiment, dataset, done: None
    """when everything is checked and loaded, with the number of rounds done already"""
    on_round: OnRound = lambda round, line: None
    on_event: Callable[[dict[str, Any]], None] = lambda event: None


QUIET = Watch()


def load(experiment: Experiment, execution: Execution, folder: str | None = None) -> Dataset:
    """The data of a run. Raises InputError for whatever is wrong with the request.

    `folder`: where a file with a relative path was when the run was started; looked for there first.
    """
    experiment.checked()
    check_device(execution)
    if experiment.precision == "tf32" and execution.device == "cpu":
        raise InputError("--precision tf32: needs --device cuda; on a CPU use float32 or bf16")
    name = experiment.dataset
    if folder is not None and os.path.isfile(there := os.path.join(folder, os.path.basename(name))):
        name = there
    return data.load(name, experiment.size, execution.data)


def prepare(experiment: Experiment, dataset: Dataset, stored: Path | None = None) -> tuple[Site, Partition]:
    """Makes or reads the partition and builds the model.

    `stored`: a partition file; refused with the differing values if it does not fit the experiment.
    Raises InputError before anything is trained.
    """
    request = partitioning(experiment)
    if stored is None:
        partition = partitions.make(request, dataset.train_y, dataset.hash, dataset.columns)
    else:
        if not os.path.isfile(stored):
            raise InputError(f"--partition-file {stored}: no such file")
        partition = partition_file.load(stored)
        partition_file.require(partition, request, dataset.hash, str(stored))
    e, classes = experiment, len(dataset.classes)
    model = models.build(e.model, dataset.shape, classes, e.seed, e.head, e.precision)
    site = site_of(experiment, dataset, partition, model)
    unfit = site.method.check(site.task([0], 0).sgd)
    if unfit:
        raise InputError(f"--method {experiment.method}: {unfit}")
    site.method.init(model, model.init())  # a model that the method cannot take apart is refused here
    return site, partition


def partitioning(e: Experiment) -> Partitioning:
    return Partitioning(
        e.partition, e.clients, e.alpha, e.min_size, e.classes_per_client, e.column, e.split, e.partition_seed
    )


@dataclass(frozen=True)
class Request:
    """A run to be started in `folder`, or to go on where the folder holds it."""

    experiment: Experiment
    folder: Path
    watch: Watch = QUIET


def start(
    experiment: Experiment,
    folder: Path,
    execution: Execution,
    stored: Path | None = None,
    watch: Watch = QUIET,
) -> dict[str, Any]:
    """A new run in `folder`, which must be new or empty, with a `stored` partition if given. Returns the
    summary.
    """
    dataset = load(experiment, execution)
    with _starting(Request(experiment, folder, watch), execution, stored, dataset) as member:
        return _simulate([member], execution)[0]


def together(
    execution: Execution, stored: Path | None, dataset: Dataset, requests: Sequence[Request]
) -> list[dict[str, Any]]:
    """Runs that differ in their seed only, started or resumed, and carried out together."""
    with ExitStack() as stack:
        members = []
        for request in requests:
            if os.path.isfile(request.folder / "run.json"):
                member = stack.enter_context(_resuming(request, execution, dataset))
            else:
                member = stack.enter_context(_starting(request, execution, stored, dataset))
            members.append(member)
        return _simulate(members, execution)


def _simulate(members: Sequence[Member], execution: Execution) -> list[dict[str, Any]]:
    count = workers(execution, members[0].site.experiment, len(members))
    return simulate_together(members, count, execution.device, execution.lanes)


@contextmanager
def _starting(
    request: Request, execution: Execution, stored: Path | None, dataset: Dataset
) -> Iterator[Member]:
    """A new run, ready for its first round; its folder is closed at the end."""
    experiment, folder, watch = request.experiment, request.folder, request.watch
    site, partition = prepare(experiment, dataset, stored)
    record = Record.create(folder)
    try:
        record.on_event = watch.on_event
        try:
            partition_file.save(partition, folder / "partition.json")
        except OSError as error:
            raise RunError(f"{folder / 'partition.json'}: cannot be written ({error.strerror})") from error
        how = _execution(execution, experiment)
        record.write_json("run.json", describe.simulation(experiment, how, dataset, partition, site.model))
        watch.begun(experiment, dataset, 0)
        with tracked(watch.on_round, execution.track, folder) as on_round:
            yield Member(site, record, on_round)
    finally:
        record.close()


def check(experiment: Experiment, folder: Path, dataset: Dataset, stored: Path | None = None) -> None:
    """Raises InputError if the run in `folder` could not be started, or resumed where there is one."""
    if os.path.isfile(folder / "run.json"):
        stored_run = read_json(folder, "run.json")
        _require_same(folder, experiment, stored_experiment(folder), stored_run)
        _require_data(folder, experiment, dataset, stored_run)
        prepare(experiment, dataset, folder / "partition.json")
    else:
        refuse_used(folder)
        prepare(experiment, dataset, stored)


def resume(
    folder: Path,
    experiment: Experiment,
    execution: Execution,
    watch: Watch = QUIET,
) -> dict[str, Any]:
    """Goes on with the run in `folder` from its last checkpoint. Returns the summary.

    `experiment` is the stored one or that with more rounds; any other difference is refused, as are other
    data: the numbers would be those of neither run. Another device or number of workers is recorded.
    """
    with _resuming(Request(experiment, folder, watch), execution, None) as member:
        return _simulate([member], execution)[0]


@contextmanager
def _resuming(request: Request, execution: Execution, dataset: Dataset | None) -> Iterator[Member]:
    """A run that is there, ready for its next round; its folder is closed at the end."""
    experiment, folder, watch = request.experiment, request.folder, request.watch
    before, stored = stored_experiment(folder), read_json(folder, "run.json")
    _require_same(folder, experiment, before, stored)
    record = Record.open(folder)
    try:
        record.on_event = watch.on_event
        restored = record.restore()  # before anything is changed, so that damage is found first
        done = restored[0]
        if experiment.rounds < done:
            raise InputError(f"--rounds {experiment.rounds}: the run in {folder} has done {done} already")
        was = stored.get("execution")
        where = was.get("folder") if isinstance(was, dict) else None
        dataset = dataset or load(experiment, execution, where if isinstance(where, str) else None)
        _require_data(folder, experiment, dataset, stored)
        site, _ = prepare(experiment, dataset, folder / "partition.json")
        if experiment.rounds > done:
            changes = {"rounds": experiment.rounds, "device": execution.device}
            changes |= {"workers": workers(execution, experiment)}
            record.event("resumed", after_round=done, fedkper=__version__, **changes)
        if experiment != before:
            record.write_json("run.json", {**stored, "experiment": experiment.to_json()})
        watch.begun(experiment, dataset, done)
        with tracked(watch.on_round, execution.track, folder) as on_round:
            yield Member(site, record, on_round, restored)
    finally:
        record.close()


def _require_same(folder: Path, experiment: Experiment, before: Experiment, stored: dict[str, Any]) -> None:
    """Raises InputError unless the run in `folder` is of this experiment, the number of rounds apart."""
    if experiment.rounds != before.rounds and parse_method(before.method).needs_rounds:
        raise InputError(
            f"--rounds {experiment.rounds}: {before.method} plans its {before.rounds} rounds from the start, "
            "and more would change them. Start a new run for that"
        )
    changed = [
        f"--{f.name.replace('_', '-')} {getattr(experiment, f.name)} (the run has {getattr(before, f.name)})"
        for f in dataclasses.fields(Experiment)
        if getattr(before, f.name) != getattr(experiment, f.name) and f.name != "rounds"
    ]
    if changed:
        raise InputError(
            f"--resume {folder}: cannot go on with {'; '.join(changed)}. Start a new run for that"
        )
    known = stored.get("files")  # a run of an earlier version has none
    files = userfile.hashes((experiment.method, experiment.model))
    edited = [n for n in files if isinstance(known, dict) and files[n] != known.get(n)]
    if edited:
        raise InputError(
            f"--resume {folder}: {', '.join(edited)} was changed since the run was started: the numbers "
            "would be those of neither version. Restore the file, or start a new run"
        )


def _require_data(folder: Path, experiment: Experiment, dataset: Dataset, stored: dict[str, Any]) -> None:
    """Raises InputError unless the run in `folder` was started with these data."""
    known = stored["data"].get("hash") if isinstance(stored.get("data"), dict) else None
    if dataset.hash != known:
        raise InputError(
            f"--resume {folder}: {experiment.dataset} holds other data (hash {dataset.hash[:12]}) than "
            f"the run was started with ({str(known)[:12]}); name the folder of those with --data"
        )


def stored_experiment(folder: Path) -> Experiment:
    """The experiment of a run. Raises InputError for a folder that holds none, and for a damaged run.json."""
    values = read_json(folder, "run.json").get("experiment")
    if not isinstance(values, dict):
        raise InputError(f"{folder / 'run.json'}: damaged, it does not say what was run")
    return from_json(values, str(folder / "run.json"))


def check_device(execution: Execution) -> None:
    """Raises InputError for a device that this machine lacks: never a silent change to another."""
    if execution.workers is not None and not 1 <= execution.workers <= 1024:
        raise InputError(f"--workers {execution.workers}: must be at least 1 and at most 1024")
    if execution.lanes is not None and not 1 <= execution.lanes <= 100_000:
        raise InputError(f"--lanes {execution.lanes}: must be at least 1 and at most 100000")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", execution.device):
        raise InputError(f"--device {execution.device}: must be cpu, cuda or cuda:N")
    kind, _, index = execution.device.partition(":")
    found = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= found:
        raise InputError(
            f"--device {execution.device}: this machine has {found or 'no'} CUDA device(s); use --device cpu"
        )
    if kind == "cuda" and (execution.workers or 1) > 1:
        raise InputError(
            f"--workers {execution.workers}: has no effect with --device {execution.device}, which trains in "
            "one process; leave it out"
        )
    if (execution.lanes or 1) > 1 and (execution.workers or 1) > 1:
        raise InputError(
            f"--workers {execution.workers}: has no effect with --lanes {execution.lanes}, which train in "
            "one process; leave one of them out"
        )


def workers(execution: Execution, experiment: Experiment, runs: int = 1) -> int:
    """Processes that train: those asked for, else one a core as far as there is work. `runs` together."""
    if execution.device != "cpu" or (execution.lanes or 1) > 1:
        return 1
    busy = max(FEW, runs * clients_per_round(experiment.clients, experiment.fraction))
    return execution.workers or min(cores(), busy)


def _execution(execution: Execution, experiment: Experiment) -> dict[str, Any]:
    """For run.json. Folders are absolute, so that the run can be resumed from another place."""
    folder = None
    if experiment.dataset.endswith(".npz") and not os.path.isabs(experiment.dataset):
        file = medmnist.find(experiment.dataset, data.folder(execution.data), experiment.size)
        folder = None if file is None else str(file.absolute().parent)
    return {
        "data": None if execution.data is None else str(execution.data.absolute()),
        "folder": folder,
        "device": execution.device,
        "workers": workers(execution, experiment),
        "lanes": execution.lanes,
    }
