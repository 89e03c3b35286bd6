"""Flower's ClientApp and ServerApp: thin shells around a site and a coordinator. Only this file imports flwr.

A SuperNode starts a process for every message, and so does a SuperLink for a run; both find their folder in
the environment that `fedkper site` and `fedkper link` set. What a site raises never reaches Flower, which
would send its text to the coordinator.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedkper.flower.parcel import Code, Parcel
from fedkper.flower.processes import end_with_parent
from fedkper.flower.site import Hospital
from fedkper.tree import Tree

SITE, SOURCE, LINK = "FEDKPER_SITE", "FEDKPER_SITE_DATA", "FEDKPER_LINK"
# Flower's codes for a message or an answer that is not there, or a site that is not: 3, 4, 5.
GONE = (3, 4, 5)
# Seconds between two looks for answers.
PAUSE = 0.5

T = TypeVar("T")

client = ClientApp()
server = ServerApp()


@client.query()
def ask(message: Message, context: Context) -> Message:
    """Every message to a site; what is to be done stands in its words."""
    end_with_parent()
    hospital = Hospital(Path(os.environ[SITE]), os.environ.get(SOURCE, ""))
    return answer(hospital, message)


@server.main()
def coordinate(grid: Grid, context: Context) -> None:
    """The coordinator's whole run."""
    from fedkper.flower.link import serve

    end_with_parent()
    serve(Path(os.environ[LINK]), lambda names, limit: FlowerLine(grid, names, limit))


def answer(hospital: Hospital, message: Message) -> Message:
    try:
        request = unpack(message.content)
    except Exception:  # another sender than a coordinator of this version
        request = Parcel({"action": "unreadable"})
    reply = hospital.answer(request)
    try:
        content = pack(reply)
    except Exception:  # numbers of a type that Flower cannot carry; its text must not leave
        content = pack(Parcel({"code": int(Code.INTERNAL)}))
    return Message(content, reply_to=message)


class FlowerLine:
    """The sites as a SuperLink knows them. A name is bound to a key where the site is registered."""

    def __init__(self, grid: Grid, names: dict[int, str], limit: int) -> None:
        self.grid = grid
        self.names = names
        self.limit = limit
        """bytes of an answer's tensors"""

    def present(self) -> set[str]:
        return {self.names[node] for node in _answers(self.grid.get_node_ids) if node in self.names}

    def ask(self, requests: dict[str, Parcel], seconds: float) -> dict[str, Parcel]:
        """Sends, and collects what comes in time. An answer that comes later is never read."""
        nodes = {name: node for node, name in self.names.items()}
        open_: dict[str, str] = {}
        for name, request in requests.items():  # one by one, so that memory holds one message
            message = Message(pack(request), dst_node_id=nodes[name], message_type="query", ttl=seconds)
            for number in _answers(self.grid.push_messages, [message]):
                if number:
                    open_[number] = name
        end, replies = time.monotonic() + seconds, {}
        while open_ and time.monotonic() < end:
            # One by one: what fails on its way is one answer, and memory holds one message.
            for message in (m for number in list(open_) for m in _answers(self.grid.pull_messages, [number])):
                name = open_.pop(message.metadata.reply_to_message_id, "")
                # Flower itself answers for a site that it takes for gone: that is silence.
                if name and not (message.has_error() and message.error.code in GONE):
                    replies[name] = self._reply(message)
            if open_:
                time.sleep(PAUSE)
        return replies

    def _reply(self, message: Message) -> Parcel:
        if message.has_error():
            return Parcel({"code": int(Code.INTERNAL)})
        try:
            if size(message.content) > self.limit:
                return Parcel({"code": int(Code.MESSAGE)})
            return unpack(message.content)
        except Exception:  # whatever a site may send instead of an answer
            return Parcel({"code": int(Code.MESSAGE)})


def _answers(call: Callable[..., Iterable[T]], *args: Any) -> list[T]:
    """What a SuperLink answers; nothing where it fails, as under load: it is asked again later."""
    try:
        return list(call(*args))
    except httpx.HTTPError:
        return []


def pack(parcel: Parcel) -> RecordDict:
    """Words as a ConfigRecord, each tree as an ArrayRecord with the tensors' names."""
    record = RecordDict({"words": ConfigRecord(dict(parcel.words))})
    for name, tree in parcel.trees.items():
        record[name] = ArrayRecord({k: Array(v.numpy()) for k, v in tree.items()})
    return record


def unpack(record: RecordDict) -> Parcel:
    """The parcel in a record. Raises whatever numpy does for a tensor that is none."""
    words = record.config_records["words"]
    trees = {name: _tree(found) for name, found in record.array_records.items()}
    plain = {k: v for k, v in words.items() if isinstance(v, (str, int, float, bool))}
    return Parcel(plain, trees)


def _tree(found: ArrayRecord) -> Tree:
    # A copy: what was received cannot be written to, and sums over memory that is not aligned are rounded
    # differently. ascontiguousarray would give a counter without axes an axis.
    return {k: torch.from_numpy(np.array(v.numpy(), order="C")) for k, v in found.items()}


def size(record: RecordDict) -> int:
    """Bytes of a record's arrays."""
    return sum(len(array.data) for found in record.array_records.values() for array in found.values())
