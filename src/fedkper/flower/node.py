"""A hospital's machine: its data and policy are checked, then Flower's SuperNode waits for work."""

from __future__ import annotations

import csv
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedkper.errors import InputError, RunError
from fedkper.flower import processes
from fedkper.flower.settings import Federation
from fedkper.flower.site import Hospital

PAUSE = 0.5
RETRY_SECONDS = 3.0
# A SuperNode that was killed is taken for connected until its lease ends, 60 s later.
LEASE_SECONDS = 75.0
# Seconds for the last answer to leave.
PARTING_SECONDS = 6.0
# Seconds after which a coordinator that does not answer is looked for anew, and said to be missing.
LOST_SECONDS = 60.0
# After these a SuperNode of Flower 1.42 no longer works, but its process lives on.
LOST = ("SSL/TLS handshake error detected", "Giving up reconnection")

# Flower's code for both, which only time tells apart.
REFUSED = "[code: 2004]"
TURNED_AWAY = "it does not know this site's key, or still takes another node with that key for connected"

Tell = Callable[[str], None]


def site(folder: Path, source: str, wait: float, tell: Tell) -> None:
    """Takes part in a federation until it is finished. Raises InputError for what is wrong here or refused.

    `wait`: seconds to try to reach the coordinator, at the start and whenever it is lost.
    """
    from fedkper.flower import certificates

    folder = folder.absolute()
    hospital = Hospital(folder, source)
    settings = hospital.settings
    hospital.require_policy()
    if warning := certificates.check_site_key(folder / "key"):
        tell(f"warning: {warning}")
    data = hospital.data
    tell(f"{settings.name}: {len(data.train_y):,} train and {len(data.test_y):,} local test images")
    node = Node(folder, hospital.federation, source, wait, tell)
    processes.end_on_term()
    (folder / "status.json").unlink(missing_ok=True)
    try:
        node.start()
        _follow(folder, settings.name, node, tell)
    finally:
        node.stop()


class Node:
    """A SuperNode, which is started anew when it is turned away or stuck."""

    def __init__(self, folder: Path, federation: Federation, source: str, wait: float, tell: Tell) -> None:
        self.folder = folder
        self.address = federation.address
        self.patience = LEASE_SECONDS + len(federation.sites)
        """seconds of being turned away that may be only a lease, or a coordinator that still learns keys"""
        self.wait = wait
        self.tell = tell
        self.log = folder / "flower.log"
        self.env = processes.environment(
            folder / "flower", FEDKPER_SITE=str(folder), FEDKPER_SITE_DATA=source
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.begin = 0

    def start(self) -> bool:
        """Looks at the coordinator's certificate and starts. Returns whether the coordinator was awaited.

        Raises RunError if it does not come within the limit.
        """
        awaited = self._reach()
        self.begin = self.log.stat().st_size if self.log.exists() else 0
        Path(self.env["FLWR_HOME"]).mkdir(exist_ok=True)
        words = ["flower-supernode", "--superlink", self.address]
        words += ["--root-certificates", str(self.folder / "ca.crt")]
        words += ["--auth-supernode-private-key", str(self.folder / "key")]
        words += ["--port", str(processes.free_port()), "--max-wait-time", str(LOST_SECONDS)]
        self.process = processes.start(words, self.log, self.env)
        return awaited

    def stop(self) -> None:
        processes.stop(self.process)

    def broken(self) -> str:
        """What it said last, if it has ended or is stuck; else nothing."""
        assert self.process is not None
        said = self.log.read_bytes()[self.begin :].decode(errors="replace")
        if self.process.poll() is None and not any(sign in said for sign in LOST):
            return ""
        codes = [line for line in said.splitlines() if any(sign in line for sign in ("[code: ", *LOST))]
        return (codes or [processes.last_line(self.log)])[-1].strip()

    def _reach(self) -> bool:
        """Whether the coordinator was not there at once."""
        from fedkper.flower import certificates

        end, told = time.time() + self.wait, False
        while True:
            try:
                certificates.look(self.address, self.folder / "ca.crt")
                return told
            except OSError as error:
                cause = error.strerror or str(error)
            if time.time() >= end:
                raise RunError(
                    f"no coordinator answers at {self.address} ({cause}), tried for {self.wait:g} s: is it "
                    "running, and is the address in federation.toml the right one?"
                )
            if not told:
                until = time.strftime("%H:%M:%S", time.localtime(end))
                self.tell(f"no coordinator answers at {self.address} yet ({cause}); trying until {until}")
                told = True
            time.sleep(min(RETRY_SECONDS, max(0.1, end - time.time())))


def _follow(folder: Path, name: str, node: Node, tell: Tell) -> None:
    """Tells what happens until the federation is finished; starts the node anew when it is broken."""
    last: dict[str, Any] = {}
    failing, told = 0.0, ""
    while True:
        status = _status(folder)
        if status != last:
            last, failing, told = status, 0.0, ""
            _tell(status, tell)
            if status.get("state") in ("finished", "refused"):
                time.sleep(PARTING_SECONDS)
            if status.get("state") == "finished":
                return
            if status.get("state") == "refused":
                raise InputError(f"{name} cannot join: {status['code']}: {status['text']}")
        if said := node.broken():
            failing = failing or time.monotonic()
            cause = f": {TURNED_AWAY}" if REFUSED in said else ""
            if time.monotonic() - failing > node.patience:
                raise RunError(f"the coordinator turns this site away ({said}){cause}; see {node.log}")
            if said != told:
                tell(f"not connected ({said}){cause}; trying again for {node.patience:g} s")
            told = said
            node.stop()
            time.sleep(RETRY_SECONDS)
            if node.start():  # it was not there at all, and has yet to learn of its sites
                failing = 0.0
        time.sleep(PAUSE)


def _status(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _tell(status: dict[str, Any], tell: Tell) -> None:
    state, at = status.get("state"), f"round {status.get('round')}"
    if state == "joined":
        tell("joined the federation")
    elif state in ("training", "trained", "scored"):
        tell(f"{at}: {state}")
    elif state == "failed":
        tell(f"{status.get('code')}: {status.get('text')}")


def numbers(folder: Path) -> list[dict[str, str]]:
    """The site's own scores, a row a round and model; of a round that was done twice the last."""
    path = folder / "numbers.csv"
    if not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        rows = {(int(row["round"]), row["model"]): row for row in csv.DictReader(file)}
    return [rows[key] for key in sorted(rows)]
