"""What coordinator and site must agree on, entry by entry, before the first round.

Each side makes the entries from its own federation.toml, its own package and its own copy of the model; a
site compares the two. Parameters carry names, so nothing is ever paired by position.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import cached_property
from typing import Any

import torch

from fedkper import __version__, models, userfile
from fedkper.describe import PREPROCESSING
from fedkper.errors import InputError
from fedkper.flower.settings import Federation
from fedkper.lanes import Lanes
from fedkper.method import Method, Update, client_round
from fedkper.methods import parse
from fedkper.site import Site
from fedkper.tree import Tree, described, nbytes, unlike

SHOWN = 8
# Options that concern rehearsals, one process or one seed's schedule, and are no part of what a site does.
_NOT_SHARED = {"clients", "method", "model", "head", "dataset", "size"}


class Plan:
    """A federation's model and method, built from its settings, and what a site sends in a round."""

    def __init__(self, federation: Federation) -> None:
        e = federation.experiment
        self.federation = federation
        self.model: Lanes = models.build(
            e.model, federation.shape, len(federation.classes), e.seed, e.head, e.precision
        )
        self.method: Method = parse(e.method)
        self.first, self.initial_own = self.method.init(self.model, self.model.init())
        unfit = self.method.check(self.site().task([0], 0).sgd)
        if unfit:
            raise InputError(f"method {e.method}: {unfit}")

    def site(self, **data: Any) -> Site:
        """A Site of the simulator: with the given tensors, or a single black image and nothing to test on."""
        black = torch.zeros(1, *self.federation.shape, dtype=torch.uint8)
        none = torch.zeros(0, dtype=torch.int64)
        fields: dict[str, Any] = {
            "train_x": black,
            "train_y": torch.zeros(1, dtype=torch.int64),
            "test_x": black[:0],
            "test_y": none,
            "train_index": [torch.zeros(1, dtype=torch.int64)],
            "test_index": [none],
            "scored": [0],
        }
        e, classes = self.federation.experiment, len(self.federation.classes)
        return Site(experiment=e, method=self.method, model=self.model, classes=classes, **(fields | data))

    @cached_property
    def example(self) -> Update:
        """An update of a site with one black image: the names, types and shapes of every other one.

        Its tensors are without numbers (device meta), so that a large model is not held once more.
        """
        task = dataclasses.replace(self.site().task([0], 0), epochs=0)
        update = client_round(self.method, task, self.first, self.initial_own)
        head = {k: v for k, v in update.own.items() if "/" not in k} if self.needs_head(update) else {}
        trees = ({k: v.to("meta") for k, v in t.items()} for t in (update.shared, update.sums, head))
        shared, sums, head = trees
        return update._replace(shared=shared, sums=sums, own=head)

    def needs_head(self, update: Update) -> bool:
        """Whether the model scored as global cannot be formed without the sites' personal heads."""
        scored = self.method.global_model(self.model, self.first, update._replace(own={}))
        return not self.model.names <= scored.keys()

    def sent(self) -> dict[str, Tree]:
        """The trees that a site sends after training, as examples."""
        update = self.example
        trees = {"shared": update.shared, "sums": update.sums, "head": update.own}
        return {name: tree for name, tree in trees.items() if tree}

    def largest_message(self) -> int:
        """Bytes of the largest message of a round."""
        return max(nbytes(self.first), sum(nbytes(tree) for tree in self.sent().values()))

    def entries(self) -> dict[str, str]:
        """The contract: every entry as text."""
        f, e = self.federation, self.federation.experiment
        files = userfile.hashes((e.method, e.model))
        found = {"fedkper": __version__, "federation": f.id, "preprocessing": PREPROCESSING}
        found |= {"image": "{} x {} pixels, {} channels".format(*f.shape)}
        found |= {"classes": str(len(f.classes))} | {f"class {i}": name for i, name in enumerate(f.classes)}
        found |= {"sites": ", ".join(f.sites), "model": f"{named(e.model)} head '{e.head}'"}
        found |= {"method": named(e.method)}
        found |= {f"method.{k}": str(v) for k, v in dataclasses.asdict(self.method).items()}
        found |= {f"experiment.{k}": str(v) for k, v in e.to_json().items() if k not in _NOT_SHARED}
        found |= {f"file {name}": digest for name, digest in files.items()}
        found |= {f"received {k}": v for k, v in _outlined(self.first).items()}
        for kind, tree in self.sent().items():
            found |= {f"sent {kind} {k}": v for k, v in _outlined(tree).items()}
        return found

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.entries())

    def misfit(self, kind: str, tree: Tree) -> str:
        """Why a received tree is none that a site of this federation sends; empty if it is one."""
        if reason := unlike(tree, self.sent().get(kind, {}), kind):
            return reason
        for name, leaf in tree.items():
            if leaf.numel() and max(map(abs, leaf.aminmax())) > self.federation.limits.largest_value:
                return f"{name} has numbers beyond {self.federation.limits.largest_value:g}"
        return ""


def fingerprint(entries: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def differences(here: dict[str, str], there: dict[str, str]) -> list[str]:
    """The first differing entries, a line each, and how many more there are."""
    lines = [
        f"{key}: {_quoted(here.get(key))} at the site, {_quoted(there.get(key))} at the coordinator"
        for key in dict.fromkeys((*there, *here))
        if here.get(key) != there.get(key)
    ]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


def _quoted(value: str | None) -> str:
    return "missing" if value is None else f"'{value[:80]}'"


def named(text: str) -> str:
    """A method or model without the folder of a user's own file, which differs from site to site."""
    if not userfile.is_one(text):
        return text
    path, name, rest = userfile.split(text)
    return f"{path.name}:{name}" + (f":{rest}" if rest else "")


def plain_method(federation: Federation) -> str:
    """The method without its fields, as site.toml names it."""
    text = named(federation.experiment.method)
    return ":".join(text.split(":")[: 2 if userfile.is_one(text) else 1])


def _outlined(tree: Tree) -> dict[str, str]:
    return {name: f"{at}: {described(leaf)}" for at, (name, leaf) in enumerate(tree.items())}
