"""A whole federation on this machine: a coordinator and three hospitals as processes of their own, over TLS.

Every process is started by the command that a person would type on its machine. It takes a few minutes, most
of it waiting: Flower starts a process for every message.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from fedkper import folders
from fedkper.flower.processes import free_port, stop

SITES = ("amsterdam", "berlin", "copenhagen")
FEDKPER = [sys.executable, "-m", "fedkper.cli"]
ROUNDS = os.environ.get("ROUNDS", "5")


def follow(name: str, process: subprocess.Popen[str], last: list[str]) -> None:
    """Prints what a process says as it says it, and keeps it."""
    assert process.stdout is not None
    for line in process.stdout:
        last.append(line.rstrip("\n"))
        print(f"{name:>11} | {line}", end="", flush=True)


def start(name: str, words: list[str], last: list[str]) -> tuple[subprocess.Popen[str], threading.Thread]:
    print(f"{name:>11} $ fedkper {' '.join(words)}", flush=True)
    process = subprocess.Popen(
        [*FEDKPER, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    thread = threading.Thread(target=follow, args=(name, process, last))
    thread.start()
    return process, thread


def result(lines: list[str]) -> list[str]:
    """What a process printed at its end: the table and what follows."""
    heads = [
        i for i, line in enumerate(lines) if line.endswith("made here") or line.split()[:1] == ["global"]
    ]
    return lines[heads[0] :] if heads else lines


def main() -> int:
    folder = folders.unique(Path("runs"), "federation-demo") / "federation"
    words = ["federation", "new", str(folder), "--sites", *SITES, "--rounds", ROUNDS, "--test", "synthetic"]
    words += ["--address", f"127.0.0.1:{free_port()}", "--epochs", "2"]
    print(f"{'coordinator':>11} $ fedkper {' '.join(words)}", flush=True)
    subprocess.run([*FEDKPER, *words], check=True)
    said: dict[str, list[str]] = {name: [] for name in ("coordinator", *SITES)}
    running = [start("coordinator", ["link", str(folder)], said["coordinator"])]
    try:
        for index, site in enumerate(SITES):
            share = f"synthetic:{index}/{len(SITES)}"
            running.append(start(site, ["site", str(folder / "sites" / site), "--share", share], said[site]))
        codes = [process.wait() for process, _ in running]
    except KeyboardInterrupt:
        codes = [130]
    finally:
        for process, _ in reversed(running):  # the sites first: they sign off
            stop(process)
        for _, thread in running:
            thread.join()
    if any(codes):
        return max(codes)
    for name in ("coordinator", *SITES):
        print(f"\n== {name}", *result(said[name]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
