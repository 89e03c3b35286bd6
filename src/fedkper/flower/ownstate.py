"""A site's personal state on its disk: after its last rounds, bound to a federation, a site and a round."""

from __future__ import annotations

import json
from pathlib import Path

from fedkper import tree
from fedkper.checkpoint import own_path
from fedkper.errors import InputError
from fedkper.flower.parcel import Code, SiteError

# The coordinator may go back to the checkpoint before its last, and a round may be asked for again.
KEPT = 3


class OwnState:
    """The folder state/FEDERATION of a site: own-INDEX-ROUND.safetensors, and own.json, their checksums."""

    def __init__(self, folder: Path, index: int) -> None:
        self.folder = folder
        self.index = index
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, round: int) -> Path:
        """Where the state after `round` is, or will be."""
        return own_path(self.folder, self.index, round)

    def find(self, round: int) -> Path | None:
        """The state after `round`; None for 0, and if there is none. Raises SiteError if it is damaged."""
        if round <= 0:
            return None
        checksum, path = self._checksums().get(round), self.path(round)
        if checksum is None or not path.exists():
            return None
        try:
            tree.load(path, checksum)
        except InputError as error:
            raise SiteError(Code.STATE, str(error)) from error
        return path

    def keep(self, round: int, checksum: str) -> None:
        """Notes a state that was written, and removes those that no checkpoint can ask for."""
        states = self._checksums() | {round: checksum}
        kept = dict(sorted(states.items())[-KEPT:])
        tree.write(self.folder / "own.json", json.dumps(kept).encode())
        for old in states.keys() - kept.keys():
            self.path(old).unlink(missing_ok=True)

    def _checksums(self) -> dict[int, str]:
        path = self.folder / "own.json"
        if not path.exists():
            return {}
        try:
            return {int(round): str(checksum) for round, checksum in json.loads(path.read_text()).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise SiteError(Code.STATE, f"{path}: damaged ({error})") from error
