"""Flower's own programs as child processes: their switches, their end, ports."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fedkper.errors import InputError, RunError

STOP_SECONDS = 10.0
# Whose end is the end of everything that it started, directly or not.
PARENT = "FEDKPER_PARENT"
PARENT_SECONDS = 0.5


def environment(home: Path, **more: str) -> dict[str, str]:
    """For every process of Flower: no telemetry, no look for updates, no installation, a home of its own."""
    here = os.path.dirname(sys.executable)
    local = ",".join(filter(None, (os.environ.get("NO_PROXY", ""), "127.0.0.1,localhost")))
    return {
        **os.environ,
        "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "NO_PROXY": local,
        "no_proxy": local,
        "PYTHONUNBUFFERED": "1",
        PARENT: str(os.getpid()),
        **more,
    }


def program(name: str) -> str:
    """The path of one of Flower's programs. Raises InputError if the extra is not installed."""
    found = shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)
    if not found:
        raise InputError("a federation needs the extra: pip install 'fedkper[flower]'")
    return found


def start(words: Sequence[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A child in the background, its output at the end of `log`. It ends when this process ends."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            [program(words[0]), *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=log.parent,
            start_new_session=True,  # Ctrl-C is for the parent, which ends its children in order
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """This process, which Flower started, ends when `fedkper link` or `fedkper site` is gone.

    Flower's own watch interrupts the main thread, which then looks long for a SuperLink that is gone.
    """
    parent = int(os.environ[PARENT])

    def watch() -> None:
        while alive(parent):
            time.sleep(PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def call(words: Sequence[str], log: Path, env: dict[str, str], seconds: float = 120) -> str:
    """What a short command prints. Raises RunError with its last line if it fails."""
    try:
        done = subprocess.run(
            [program(words[0]), *words[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=env,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{' '.join(words[:3])}: no end within {seconds:g} s; see {log}") from error
    with open(log, "a", encoding="utf-8") as file:
        file.write(done.stdout + done.stderr)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise RunError(f"{' '.join(words[:3])}: failed ({last[0].strip()}); see {log}")
    return done.stdout


def stop(process: subprocess.Popen[bytes] | None) -> None:
    """Asks a child to end, and ends it if it does not."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended, and for which its parent has yet to wait, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # gone, or not a Linux
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def wait_for_end(pid: int, seconds: float) -> None:
    """Waits for a process that is no child of this one, and ends it if it does not end by itself."""
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.1)
    if alive(pid):
        os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def require_free(host: str, port: int) -> None:
    """Raises RunError that names the port if another program has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RunError(
                f"port {port} on {host} cannot be used ({error.strerror}): stop the program that has it, or "
                "change `listen` in federation.toml"
            ) from error


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no message")


class Ended(KeyboardInterrupt):
    """SIGTERM: the parent is to end as for Ctrl-C."""


def end_on_term() -> None:
    """SIGTERM becomes an exception in the main thread, so that the children are ended in order."""

    def raise_it(number: int, frame: object) -> None:
        raise Ended

    signal.signal(signal.SIGTERM, raise_it)
