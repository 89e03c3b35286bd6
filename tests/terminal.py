"""fedkper as a user starts it: a tiny data file, commands in this process and in others, what a run left."""

from __future__ import annotations

import importlib
import json
import multiprocessing as mp
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from fedkper.cli import main

# A federation of five on 8 x 8 images: a round takes about 20 ms.
TINY = [
    "--clients",
    "5",
    "--fraction",
    "0.5",
    "--epochs",
    "1",
    "--batch",
    "16",
    "--min-size",
    "5",
    "--alpha",
    "1",
    "--workers",
    "1",
]

_processes = mp.get_context("forkserver")
COMMANDS = [
    f"fedkper.cli_{name}" for name in ("run", "data", "sweep", "export", "paper", "report", "federation")
]
_processes.set_forkserver_preload([*COMMANDS, "fedkper.plots"])


def write_data(path: Path, seed: int = 0) -> Path:
    """240 + 30 images of three classes in MedMNIST's form, with the column "site" of four values."""
    draw = np.random.default_rng(seed)
    patterns = np.random.default_rng(99).integers(60, 190, (3, 8, 8, 3))
    arrays: dict[str, Any] = {"train_site": np.array(["a", "b", "c", "d"] * 60)}
    for split, n in (("train", 240), ("test", 30)):
        y = np.arange(n) % 3
        noisy = np.clip(patterns[y] + draw.normal(0, 40, (n, 8, 8, 3)), 0, 255)
        arrays |= {f"{split}_images": noisy.astype(np.uint8), f"{split}_labels": y}
    np.savez(path, **arrays)
    return path


def fedkper(*words: object) -> int:
    return main([str(word) for word in words])


def typed(base: list[Any], name: str, value: object, equals: bool = False) -> list[str]:
    """A command with one option set, in place of the base's."""
    option, words = "--" + name.replace("_", "-"), list(base)
    if option in words:
        at = words.index(option)
        del words[at : at + 2]
    return [*words, f"{option}={value}"] if equals else [*words, option, str(value)]


def process(log: Path, *words: object, folder: Path | None = None, limit: str = "") -> BaseProcess:
    """The same in another process, its output in `log`; `limit`: "full disk" or "read-only"."""
    child = _processes.Process(target=_child, args=(log, [str(w) for w in words], folder, limit))
    child.start()
    return child


def _child(log: Path, words: list[str], folder: Path | None, limit: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if folder:
        os.chdir(folder)
    if limit == "full disk":
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    if limit == "read-only" and os.geteuid() == 0:
        for name in COMMANDS:  # a process without rights may not even read the libraries
            importlib.import_module(name)
        os.seteuid(65534)  # root may write anywhere
    code = main(words)
    sys.stdout.flush()
    os._exit(code)


def untimed(folder: Path) -> str:
    """rounds.csv without the seconds."""
    lines = [row.split(",") for row in (folder / "rounds.csv").read_text().splitlines()]
    kept = [i for i, column in enumerate(lines[0]) if not column.endswith("seconds")]
    return "\n".join(",".join(row[i] for i in kept) for row in lines)


def results(folder: Path) -> dict[str, Any]:
    """All that must be equal in two runs of the same experiment, byte for byte."""
    names = ("clients.csv", "confusion.csv", "calibration.csv", "summary.json")
    files = [*(folder / name for name in names), *(folder / "checkpoint").iterdir()]
    return {p.name: p.read_bytes() for p in files} | {"rounds.csv": untimed(folder)}


def column(folder: Path, table: str, name: str) -> list[str]:
    lines = [row.split(",") for row in (folder / table).read_text().splitlines()]
    return [row[lines[0].index(name)] for row in lines[1:]]


def sampled(folder: Path) -> list[list[int]]:
    """The clients of each round, from clients.csv."""
    rounds = [int(t) for t in column(folder, "clients.csv", "round")]
    found: list[list[int]] = [[] for _ in range(max(rounds))]
    took_part = column(folder, "clients.csv", "sampled")
    for t, client, yes in zip(rounds, column(folder, "clients.csv", "client"), took_part, strict=True):
        if yes == "1":
            found[t - 1].append(int(client))
    return found


def strict(path: Path) -> Any:
    """A JSON file, or one a line; NaN and Infinity, which JSON does not have, are an error."""

    def refuse(name: str) -> None:
        raise ValueError(f"{path}: {name}")

    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    return json.loads(text, parse_constant=refuse)


def children(parent: int) -> list[int]:
    """The processes that another one has started, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if path.read_text().rpartition(")")[2].split()[1] == str(parent):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
