"""The state of a run after its last two rounds, in the folder checkpoint/; each file is replaced atomically.

shared-000012.safetensors       what the server has after round 12
scored-000012.safetensors       leaves in which the model scored as "global" differs from it, if any
own-000003-000012.safetensors   what client 3 has kept since round 12, its last one
state-000012.json               written last: the files of round 12 and their checksums make it valid
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkper import tree
from fedkper.errors import InputError
from fedkper.tree import Tree

KEPT = 2
# Rounds done, what the server has, the round of each client's own state, and a notice.
Restored = tuple[int, Tree, dict[int, int], str]


def save(
    folder: Path, round: int, shared: Tree, differing: Tree, own: Mapping[int, str], visits: dict[int, int]
) -> None:
    """The state after `round`; the JSON file comes last and makes it valid. The one before is kept.

    `differing`: leaves in which the model scored as "global" differs from `shared`; `own`: checksums of what
    this round's clients keep, which is in `own_path` already; `visits`: for every client seen, the round its
    state is of.
    """
    checksum = tree.save(shared, folder / _shared_name(round))
    new = {own_path(folder, client, round).name: s for client, s in own.items()}
    owns = _owns(folder, round - 1) | new
    wanted = {own_path(folder, client, at).name for client, at in visits.items()}
    state: dict[str, Any] = {
        "round": round,
        "shared": checksum,
        "scored": tree.save(differing, folder / _scored_name(round)) if differing else "",
        "own": {name: s for name, s in owns.items() if name in wanted},
        "visits": visits,  # in a federation the states themselves are at the sites
    }
    tree.write(_state_path(folder, round), json.dumps(state).encode())
    _clear(folder, round, state["own"])


def restore(folder: Path) -> Restored:
    """The newest valid state: rounds done, shared, visits, and a notice if the newest was damaged.

    0 rounds if there is no state. Raises InputError if there are some and none is valid.
    """
    notice = ""
    for path in sorted(folder.glob("state-*.json"), reverse=True):
        try:
            state = json.loads(path.read_text())
            shared = tree.load(folder / _shared_name(state["round"]), state["shared"])
            if state.get("scored"):
                tree.load(folder / _scored_name(state["round"]), state["scored"])
            for name, checksum in state["own"].items():
                tree.load(folder / name, checksum)
            if "visits" in state:
                visits = {int(client): int(at) for client, at in state["visits"].items()}
            else:  # of an earlier version
                visits = {int(name[4:10]): int(name[11:17]) for name in state["own"]}
        except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            cause = str(error) if isinstance(error, InputError) else f"{path}: damaged"
            notice = f"{cause}; went back to the checkpoint before"
            continue
        return state["round"], shared, visits, notice
    if notice:
        raise InputError(f"{notice.partition(';')[0]}; no other checkpoint is valid: start a new run")
    return 0, {}, {}, ""


def differing(folder: Path, round: int) -> Tree | None:
    """Leaves in which the model scored as "global" after `round`, a valid state's, differs from `shared`.

    None where there is no such state, or an earlier version wrote it without them.
    """
    path = _state_path(folder, round)
    checksum = json.loads(path.read_text()).get("scored") if path.is_file() else None
    return tree.load(folder / _scored_name(round), checksum) if checksum else None if checksum is None else {}


def own_path(folder: Path, client: int, round: int) -> Path:
    """Where a client's personal state is, as it was after `round`."""
    return folder / f"own-{client:06d}-{round:06d}.safetensors"


def _clear(folder: Path, round: int, own: dict[str, str]) -> None:
    """Removes what neither of the two newest states needs."""
    keep = {f"{kind}-{round - back:06d}" for kind in ("state", "shared", "scored") for back in range(KEPT)}
    previous = _owns(folder, round - 1)
    for path in folder.iterdir():
        if path.stem not in keep and path.name not in own and path.name not in previous:
            path.unlink()


def _owns(folder: Path, round: int) -> dict[str, str]:
    """Name -> checksum of the clients' files that belong to the state after `round`; empty without one."""
    path = _state_path(folder, round)
    owns: dict[str, str] = json.loads(path.read_text())["own"] if path.is_file() else {}
    return owns


def _state_path(folder: Path, round: int) -> Path:
    return folder / f"state-{round:06d}.json"


def _shared_name(round: int) -> str:
    return f"shared-{round:06d}.safetensors"


def _scored_name(round: int) -> str:
    return f"scored-{round:06d}.safetensors"
