"""A site's personal state on its disk: after its last rounds, bound to a federation, a site and a round."""

from __future__ import annotations

import json
from pathlib import Path

from fedkper import tree
from fedkper.checkpoint import own_path
from fedkper.errors import InputError
from fedkper.flower.parcel import Code, SiteError


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

    def keep(self, round: int, checksum: str, began: int) -> None:
        """Notes the state after `round`, made from that after `began`, and removes what nobody can ask for.

        Kept are both, since the round's model may never be merged, and the one before `began`, since the
        coordinator may go back to the checkpoint before its last. Later ones are of a run that is no more.
        """
        states = self._checksums() | {round: checksum}
        before = max((known for known in states if known < began), default=0)
        kept = {known: states[known] for known in sorted({before, began, round} & states.keys())}
        tree.write(self.folder / "own.json", json.dumps(kept).encode())
        mine = {self.path(known) for known in kept}
        for path in [*self.folder.glob("own-*.safetensors"), *self.folder.glob(".*.tmp")]:
            if path not in mine:
                path.unlink(missing_ok=True)

    def _checksums(self) -> dict[int, str]:
        path = self.folder / "own.json"
        if not path.exists():
            return {}
        try:
            return {int(round): str(checksum) for round, checksum in json.loads(path.read_text()).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise SiteError(Code.STATE, f"{path}: damaged ({error})") from error
