"""Federations for the tests: a folder as `fedkper federation new` makes it, and its sites in this process."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

with warnings.catch_warnings():  # of Flower's own dependencies, while they are imported
    warnings.simplefilter("ignore")
    from flwr.app import Message
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    from fedkper.flower import app

from fedkper import run
from fedkper.experiment import Experiment
from fedkper.flower import founding
from fedkper.flower.coordinator import Coordinator
from fedkper.flower.parcel import Parcel
from fedkper.flower.settings import Federation, Limits, Policy, Rounds, read_federation
from fedkper.flower.site import Hospital
from fedkper.run import Execution
from fedkper.tree import load
from terminal import write_data

# Columns that no two runs have in common.
COSTS = {"train_seconds", "merge_seconds", "eval_seconds", "down_bytes", "up_bytes"}
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.fc = nn.Linear(shape[0] * shape[1] * shape[2], 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        x = self.norm(self.fc(x.flatten(1))).relu()
        return self.head(self.third(self.second(x).relu()).relu())
"""
NAMES = ("ams", "ber", "cph")
CLASSES = ("0", "1", "2")
SHAPE = (8, 8, 3)


def write_small(folder: Path) -> Path:
    """Small images, and beside them a user's own model with BatchNorm and two layers of one shape."""
    (folder / "net.py").write_text(NET)
    return write_data(folder / "tiny.npz")


def federation_of(
    dataset: Path, names: Sequence[str] = NAMES, waits: Rounds | None = None, **fields: Any
) -> Federation:
    """A federation on the small images and with the small model of `write_small`."""
    defaults: dict[str, Any] = {"fraction": 1.0, "rounds": 3, "epochs": 1, "batch": 16, "min_size": 5}
    defaults |= {
        "model": f"{dataset.with_name('net.py')}:Net",
        "dataset": str(dataset),
        "alpha": 1.0,
        "clients": len(names),
    }
    return Federation(
        id="0123456789abcdef",
        sites=tuple(names),
        address="127.0.0.1:1",
        classes=CLASSES,
        shape=SHAPE,
        experiment=Experiment(**(defaults | fields)),
        rounds=waits or Rounds(minimum=2, wait=1, limit=20, tries=1),
        limits=Limits(),
        test=str(dataset),
    )


def write(folder: Path, federation: Federation, policy: Policy | None = None) -> None:
    """The settings of coordinator and sites, without certificates: DIR/federation.toml, DIR/sites/NAME/."""
    files = founding.user_files(federation)
    folder.mkdir(parents=True, exist_ok=True)
    founding.write_federation(folder, federation, files)
    allowed = policy or Policy(
        methods=(founding.plain_method(federation),), smallest_train=1, smallest_test=1, send_head=True
    )
    for index, name in enumerate(federation.sites):
        place = folder / "sites" / name
        place.mkdir(parents=True, exist_ok=True)
        founding.write_federation(place, federation, files)
        share = f"share:{federation.experiment.dataset}:{index}/{len(federation.sites)}"
        founding.write_site(place, name, allowed, share)


class InProcess(Grid):
    """Sites as function calls, through the messages and records of Flower."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.names = dict(enumerate(names, 100))
        self.folder = folder
        self.away: set[str] = set()
        self.bend: Callable[[str, Parcel, Parcel], Parcel | None] = lambda name, request, reply: reply
        """what becomes of a site's answer; None: it never comes"""
        self.asked: list[tuple[str, Parcel]] = []
        self.sent: dict[str, Message] = {}
        self.replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node, name in self.names.items() if name not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            name = self.names[message.metadata.dst_node_id]
            message.metadata.__dict__["_message_id"] = number = f"{len(self.asked)}"
            numbers.append(number)
            request = app.unpack(message.content)
            self.asked.append((name, request))
            self.sent[number] = message
            reply = app.answer(Hospital(self.folder / "sites" / name), message)
            bent = self.bend(name, request, app.unpack(reply.content))
            if bent is not None:
                self.deliver(number, bent)
        return numbers

    def deliver(self, number: str, reply: Parcel) -> None:
        """An answer to the message of that number lies ready."""
        self.replies[number] = Message(app.pack(reply), reply_to=self.sent[number])

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(number) for number in list(message_ids) if number in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        raise NotImplementedError

    def line(self) -> app.FlowerLine:
        return app.FlowerLine(self, self.names, 10**9)


class Rehearsal:
    """A coordinator and its sites in one process, with what the coordinator said."""

    def __init__(self, folder: Path, federation: Federation) -> None:
        self.folder = folder
        self.federation = read_federation(folder)
        self.grid = InProcess(folder, federation.sites)
        self.said: list[str] = []
        self.noted: list[dict[str, Any]] = []

    def coordinator(self) -> Coordinator:
        return Coordinator(
            self.federation, self.folder / "run", self.grid.line(), self.said.append, self.noted.append
        )

    def run(self) -> dict[str, Any]:
        return self.coordinator().run()


def rehearsal(folder: Path, federation: Federation, policy: Policy | None = None) -> Rehearsal:
    write(folder, federation, policy)
    return Rehearsal(folder, federation)


def changed(path: Path, old: str, new: str) -> None:
    """Edits a settings file; the old text must be there once."""
    text = path.read_text()
    assert text.count(old) == 1, (old, text)
    path.write_text(text.replace(old, new))


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a run's table, without times and traffic."""
    with open(path, newline="") as file:
        return [{k: v for k, v in row.items() if k not in COSTS} for row in csv.DictReader(file)]


def require_simulated(real: Path, experiment: Experiment, simulated: Path) -> None:
    """A federation's run has the simulator's numbers, which are made in `simulated`, and its model."""
    run.start(experiment, simulated, Execution(workers=1))
    for name in ("rounds.csv", "clients.csv"):
        rows, expected = table(real / name), table(simulated / name)
        assert len(rows) == len(expected) > 0
        for a, b in zip(rows, expected, strict=True):
            assert {k: v == "" for k, v in a.items()} == {k: v == "" for k, v in b.items()}, (name, a, b)
            for key in (key for key in a if a[key]):
                assert abs(float(a[key]) - float(b[key])) <= 1e-6, (name, key, a, b)
    last = f"checkpoint/shared-{experiment.rounds:06d}.safetensors"
    mine, theirs = load(real / last), load(simulated / last)
    assert mine.keys() == theirs.keys()
    for name, leaf in theirs.items():  # the counters of BatchNorm are whole numbers
        assert (mine[name].dtype, mine[name].shape) == (leaf.dtype, leaf.shape), name
        assert float((mine[name].double() - leaf.double()).abs().max()) <= 1e-6, name
