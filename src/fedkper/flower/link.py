"""The coordinator's machine: Flower's SuperLink, the sites' keys, and the run in a process of the SuperLink.

coordinator/nodes.json         which of the SuperLink's nodes is which site, anew with every start
coordinator/link.log           what Flower says
coordinator/coordinator.log    what the coordinator says
coordinator/status.json        where it stands
run/                           an ordinary run's folder
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedkper import runfiles, tree
from fedkper.errors import InputError, RunError
from fedkper.flower import processes
from fedkper.flower.settings import Federation, read_federation

START_SECONDS = 300.0
PAUSE = 0.5
# What Flower checks and resolves; the sites run their own installed package, this ships no code.
THIN = """[project]
name = "fedkper-run"
version = "{version}"
description = "A federation of fedkper: the code is the one that each site has installed"
license = "Apache-2.0"
dependencies = ["flwr>=1.42"]
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "local"
[tool.flwr.app.components]
serverapp = "fedkper.flower.app:server"
clientapp = "fedkper.flower.app:client"
"""
CONNECTION = """[superlink]
default = "fedkper"
[superlink.fedkper]
address = "{host}:{port}"
root-certificates = "{authority}"
"""


def serve(folder: Path, line_of: Callable[[dict[int, str], int], Any]) -> None:
    """The run, inside the process that the SuperLink starts for it. Its end is told in status.json."""
    from fedkper.flower.coordinator import Coordinator

    place = folder / "coordinator"

    def say(text: str) -> None:
        with open(place / "coordinator.log", "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def note(values: dict[str, Any]) -> None:
        write_status(folder, values)

    note({"state": "starting"})
    try:
        federation = read_federation(folder)
        nodes = json.loads((place / "nodes.json").read_text())
        names = {int(node): name for name, node in nodes.items()}
        line = line_of(names, federation.limits.largest_message * 10**6)
        Coordinator(federation, folder / "run", line, say, note).run()
        say("finished")
    except RunError as error:
        say(f"failed: {error}")
        note({**read_status(folder), "state": "failed", "text": str(error), "exit_code": error.exit_code})
        raise SystemExit(1) from error
    except Exception as error:
        say(f"failed: {type(error).__name__}: {error}")
        with open(place / "link.log", "a", encoding="utf-8") as file:
            file.write(traceback.format_exc())
        note({**read_status(folder), "state": "failed", "text": f"{type(error).__name__}: {error}"})
        raise


def write_status(folder: Path, values: dict[str, Any]) -> None:
    status = {**values, "pid": os.getpid(), "time": time.time()}
    tree.write(folder / "coordinator" / "status.json", json.dumps(status).encode())


def read_status(folder: Path) -> dict[str, Any]:
    """Where a federation stands, as its coordinator wrote it last; empty before the first start."""
    try:
        values = json.loads((folder / "coordinator" / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def link(folder: Path, tell: Callable[[str], None]) -> None:
    """Runs a federation's coordinator to its end. Raises RunError if the run fails.

    `tell` gets every line that the coordinator says. Whatever ends this ends Flower's processes too.
    """
    from fedkper.flower import certificates

    folder = folder.absolute()
    federation = read_federation(folder)
    place = folder / "coordinator"
    if finished(folder, federation):
        tell(f"all {federation.experiment.rounds} rounds are done already")
        return
    if warning := certificates.check_server(place, certificates.host_of(federation.address)):
        tell(f"warning: {warning}")
    keys = _keys(place, federation)
    where, port = federation.bound
    processes.require_free(where, port)
    env = processes.environment(place / "flower", FEDKPER_LINK=str(folder))
    processes.end_on_term()
    superlink: subprocess.Popen[bytes] | None = None
    (place / "status.json").unlink(missing_ok=True)
    try:
        superlink = _superlink(folder, federation, env)
        _up(superlink, where, port, place)
        if where not in ("127.0.0.1", "localhost", "::1"):
            tell(
                f"warning: {where}:{port} also offers Flower's control interface, by which anyone who "
                "reaches it can start runs: let only /v1/fleet through (deploy/nginx.conf)"
            )
        _register(place, keys, env)
        _submit(place, env)
        tell(f"coordinator listens on {where}:{port}, sites come to {federation.address}")
        _follow(folder, superlink, tell)
    finally:
        processes.stop(superlink)
        if pid := read_status(folder).get("pid"):
            processes.wait_for_end(int(pid), 10)


def finished(folder: Path, federation: Federation) -> bool:
    """Whether the run in a federation's folder has all its rounds."""
    path = folder / "run" / "rounds.csv"
    return path.exists() and len(runfiles.read_curves(path.parent).sampled) >= federation.experiment.rounds


def _superlink(folder: Path, federation: Federation, env: dict[str, str]) -> subprocess.Popen[bytes]:
    place, (host, port) = folder / "coordinator", federation.bound
    home = Path(env["FLWR_HOME"])
    home.mkdir(exist_ok=True)
    connection = CONNECTION.format(host=_reached(host), port=port, authority=place / "ca.crt")
    tree.write(home / "config.toml", connection.encode())
    words = ["flower-superlink", "--host", host, "--port", str(port)]
    words += ["--ssl-ca-certfile", str(place / "ca.crt"), "--ssl-certfile", str(place / "server.crt")]
    words += ["--ssl-keyfile", str(place / "server.key"), "--enable-supernode-auth"]
    # Its state stays in memory: what must survive is in run/, and in a file a large model locks it for
    # longer than it waits.
    words += ["--disable-runtime-dependency-installation", "--database", ":flwr-in-memory:"]
    return processes.start(words, place / "link.log", env)


def _reached(host: str) -> str:
    """Where this machine reaches what listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _up(superlink: subprocess.Popen[bytes], host: str, port: int, place: Path) -> None:
    """Waits until the SuperLink answers. Raises RunError with its last words if it ends instead."""
    context = ssl.create_default_context(cafile=place / "ca.crt")
    context.check_hostname = False  # the name is the one that the sites use, and was checked before
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if superlink.poll() is not None:
            log = place / "link.log"
            raise RunError(f"flower-superlink ended ({processes.last_line(log)}); see {log}")
        try:
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
            )
            with opener.open(f"https://{_reached(host)}:{port}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RunError(f"flower-superlink does not answer on port {port} after {START_SECONDS:g} s")


def _keys(place: Path, federation: Federation) -> dict[str, Path]:
    """The sites' public keys. Raises InputError for one that cannot be read."""
    keys = {site: place / "keys" / f"{site}.pub" for site in federation.sites}
    for key in keys.values():
        try:
            key.read_bytes()
        except OSError as error:
            raise InputError(
                f"{key}: cannot be read ({error.strerror}); it is the site's public key"
            ) from error
    return keys


def _register(place: Path, keys: dict[str, Path], env: dict[str, str]) -> None:
    """Makes the sites' keys known to the SuperLink."""
    nodes = {}
    for site, key in keys.items():
        words = ["flwr", "supernode", "register", str(key), "fedkper", "--format", "json"]
        answer = json.loads(processes.call(words, place / "link.log", env))
        nodes[site] = str(answer["node-id"])
    tree.write(place / "nodes.json", json.dumps(nodes).encode())


def _submit(place: Path, env: dict[str, str]) -> None:
    """Starts the run: Flower takes a folder with one pyproject.toml, and ships that to the sites."""
    from fedkper import __version__

    thin = place / "thin"
    thin.mkdir(exist_ok=True)
    tree.write(thin / "pyproject.toml", THIN.format(version=__version__).encode())
    processes.call(["flwr", "run", str(thin), "fedkper"], place / "link.log", env)


def _follow(folder: Path, superlink: subprocess.Popen[bytes], tell: Callable[[str], None]) -> None:
    """Tells what the coordinator says until the run ends. Raises RunError if it failed or died."""
    log = folder / "coordinator" / "coordinator.log"
    at, begun = log.stat().st_size if log.exists() else 0, time.monotonic()
    while True:
        status = read_status(folder)
        ended = status.get("state") in ("finished", "failed")
        if log.exists():
            with open(log, encoding="utf-8") as file:
                file.seek(at)
                text = file.read()
                at = file.tell()
            for line in text.splitlines():
                tell(line)
        if ended:
            break
        if superlink.poll() is not None:
            raise RunError(f"flower-superlink ended; see {folder / 'coordinator' / 'link.log'}")
        if (status and not processes.alive(int(status["pid"]))) or (
            not status and time.monotonic() - begun > START_SECONDS
        ):
            raise RunError(
                f"the coordinator's process ended; see {folder / 'coordinator' / 'link.log'}. The finished "
                "rounds are safe: start again to go on"
            )
        time.sleep(PAUSE)
    if status["state"] == "failed":
        error = RunError(str(status.get("text", "")))
        error.exit_code = int(status.get("exit_code", 1))
        raise error
