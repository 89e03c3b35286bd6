"""Coordinator and hospitals as processes of their own, over TLS on this machine's loopback.

What takes longer than a minute has the marker `federation`: make test-federation.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedkper.flower import processes
from fedkper.flower.settings import read_federation
from fedkper.tree import load
from hospitals import changed, require_simulated, table, write_small
from terminal import column, fedkper, strict

# Bounds of waiting, far beyond what is needed, for machines under load.
LONG = 900.0


class Proxy:
    """Forwards connections from the sites to the coordinator, and keeps every byte."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.server.getsockname()[1]
        self.seen = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                site, _ = self.server.accept()
            except OSError:
                return
            try:
                coordinator = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                site.close()
                continue
            threading.Thread(target=self._join, args=(site, coordinator), daemon=True).start()

    def _join(self, site: socket.socket, coordinator: socket.socket) -> None:
        """Both directions, until one end is closed."""
        with site, coordinator:
            back = threading.Thread(target=self._forward, args=(coordinator, site), daemon=True)
            back.start()
            self._forward(site, coordinator)
            back.join()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                self.seen += part
                sink.sendall(part)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Network:
    """A federation's folder, and the commands that were started on it; whatever is left is ended."""

    def __init__(self, folder: Path, data: Path, sites: tuple[str, ...], *words: object) -> None:
        self.folder, self.data, self.sites = folder, data, sites
        self.port = processes.free_port()
        self.proxy = Proxy(self.port)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        model = f"{data.with_name('net.py')}:Net"
        options: dict[object, object] = {"--rounds": 2, "--epochs": 1, "--batch": 16, "--min-size": 5}
        options |= {"--alpha": 1, "--wait": 200, "--minimum": len(sites), "--dataset": data, "--test": data}
        options |= {"--address": f"127.0.0.1:{self.proxy.port}", "--listen": f"127.0.0.1:{self.port}"}
        options |= {"--model": model} | dict(zip(words[::2], words[1::2], strict=True))
        given = [word for pair in options.items() for word in pair]
        made = ["federation", "new", folder, "--sites", *sites, *given]
        assert fedkper(*made) == 0
        for site in sites:
            path = folder / "sites" / site / "site.toml"
            changed(path, "smallest_test = 5", "smallest_test = 1")

    def start(self, name: str, *words: object, before: tuple[str, ...] = ()) -> None:
        if name in self.running:
            self.running[name].wait(LONG)  # the one before
        command = [*before, sys.executable, "-m", "fedkper.cli", *(str(word) for word in words)]
        with open(self.folder / f"{name}.out", "ab") as output:
            self.running[name] = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True
            )

    def link(self, before: tuple[str, ...] = ()) -> None:
        self.start("link", "link", self.folder, before=before)

    def site(self, name: str, before: tuple[str, ...] = ()) -> None:
        share = f"{self.data}:{self.sites.index(name)}/{len(self.sites)}"
        words = ["site", self.folder / "sites" / name, "--share", share, "--wait", 100]
        self.start(name, *words, before=before)

    def said(self, name: str) -> str:
        path = self.folder / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def until(self, condition: Callable[[], Any], what: str, seconds: float = LONG) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what} did not come: {self.everything()}"
            time.sleep(0.2)

    def ended(self, name: str) -> int:
        try:
            return self.running[name].wait(LONG)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} does not end: {self.everything()}") from None

    def everything(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.out")))

    def children(self) -> list[int]:
        """Processes, of Flower or of ours, that work on this folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                text = path.read_bytes()
                words = (path.parent / "cmdline").read_bytes()
            except OSError:
                continue
            if words and str(self.folder).encode() in text + words:
                found.append(int(path.parent.name))
        return found

    def working(self, site: str) -> set[int]:
        """The processes in which a site answers messages."""
        found = set()
        for pid in self.children():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                mine = f"FEDKPER_SITE={self.folder / 'sites' / site}\0".encode()
                if b"flwr-clientapp" in words and mine in Path(f"/proc/{pid}/environ").read_bytes() + b"\0":
                    found.add(pid)
        return found

    def held(self, site: str, round: int) -> int:
        """Stops the process in which a site trains, and tells its number."""
        self.until(lambda: f"round {round}: training" in self.said(site), f"round {round} at {site}")
        (pid,) = self.working(site)
        os.kill(pid, signal.SIGSTOP)
        return pid

    def close(self) -> None:
        for process in self.running.values():
            processes.stop(process)
        for pid in self.children():
            processes.wait_for_end(pid, 10)
        self.proxy.server.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("data"))


@pytest.fixture
def network(data: Path, tmp_path: Path) -> Iterator[Callable[..., Network]]:
    made: list[Network] = []

    def make(sites: tuple[str, ...], *words: object) -> Network:
        made.append(Network(tmp_path / "fed", data, sites, *words))
        return made[-1]

    yield make
    for found in made:
        found.close()


def require_equal(net: Network, simulated: Path) -> None:
    require_simulated(net.folder / "run", read_federation(net.folder).experiment, simulated)


@pytest.mark.federation
def test_fedkper_over_tls_gives_the_simulators_numbers(
    network: Callable[..., Network], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = network(("ams", "ber"), "--method", "fedkper")
    net.site("ams")  # before the coordinator is there
    net.until(lambda: "no coordinator answers" in net.said("ams"), "the site's word")
    net.link()
    net.site("ber")
    assert net.ended("link") == 0, net.everything()
    assert [net.ended(name) for name in net.sites] == [0, 0], net.everything()
    require_equal(net, tmp_path / "simulated")

    assert "fedkper" in net.said("link")
    assert "this site's own numbers, made here" in net.said("ams")
    for word in (b"conv1", b"norm.", b"head.", b"fc.weight", b"running_mean", b"fedkper", b"local_accuracy"):
        assert word not in net.proxy.seen
    assert len(net.proxy.seen) > 50_000
    told = [net.folder / "coordinator" / name for name in ("coordinator.log", "link.log", "status.json")]
    for path in told:
        assert str(net.folder / "sites") not in path.read_text(), path
        assert "tiny" not in path.read_text(), path
    capsys.readouterr()
    assert fedkper("federation", "status", net.folder) == 0
    assert "finished" in capsys.readouterr().out
    assert fedkper("summary", net.folder / "run") == 0
    net.until(lambda: not net.children(), "the end of every process", 30)
    processes.require_free("127.0.0.1", net.port)


# --- the long ones -------------------------------------------------------------------------------------


def killed(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def tree_of(process: subprocess.Popen[bytes]) -> list[int]:
    """A process and all that it started, directly or not."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [process.pid]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def rounds_done(net: Network) -> int:
    path = net.folder / "run" / "rounds.csv"
    return len(column(net.folder / "run", "rounds.csv", "round")) if path.exists() else 0


@pytest.mark.federation
def test_ditto_survives_the_death_of_a_site_and_of_the_coordinator(
    network: Callable[..., Network], tmp_path: Path
) -> None:
    net = network(("ams", "ber"), "--method", "ditto", "--rounds", 4, "--limit", 120)
    net.link()
    for site in net.sites:
        net.site(site)
    net.until(lambda: "round 2: training" in net.said("ber"), "round 2 at ber")
    killed(tree_of(net.running["ber"]))  # in mid-training
    net.site("ber")
    net.until(lambda: rounds_done(net) >= 2, "round 2")
    net.until(lambda: "round 3: training" in net.said("ams"), "round 3 at ams")
    killed(tree_of(net.running["link"]))
    state = strict(net.folder / "sites/ber/state" / read_federation(net.folder).id / "own.json")
    assert "2" in state
    net.link()
    assert net.ended("link") == 0, net.everything()
    assert [net.ended(name) for name in net.sites] == [0, 0], net.everything()
    assert column(net.folder / "run", "rounds.csv", "round") == ["1", "2", "3", "4"]
    assert "goes on after round" in net.said("link")
    require_equal(net, tmp_path / "simulated")
    for index, name in enumerate(net.sites):
        own = f"own-{index:06d}-000004.safetensors"
        mine = load(net.folder / "sites" / name / "state" / read_federation(net.folder).id / own)
        theirs = load(tmp_path / "simulated/checkpoint" / own)
        assert max(float((mine[k] - theirs[k]).abs().max()) for k in theirs) < 1e-5


# Seconds of training on a few images.
SLOWLY = ("--epochs", 600)


def took_part(net: Network, site: str) -> list[str]:
    """The rounds whose model a site is part of."""
    rows = table(net.folder / "run" / "clients.csv")
    index = str(net.sites.index(site))
    return [row["round"] for row in rows if row["client"] == index and float(row["weight"] or 0) > 0]


@pytest.mark.federation
def test_a_late_answer_is_dropped_and_the_site_is_back_in_the_next_round(
    network: Callable[..., Network],
) -> None:
    net = network(("ams", "ber", "cph"), "--rounds", 3, "--minimum", 2, "--limit", 60, *SLOWLY)
    net.link()
    for site in net.sites:
        net.site(site)
    slow = net.held("cph", 2)
    net.until(lambda: rounds_done(net) == 2, "round 2")
    os.kill(slow, signal.SIGCONT)
    assert net.ended("link") == 0, net.everything()
    assert took_part(net, "ams") == took_part(net, "ber") == ["1", "2", "3"]
    assert took_part(net, "cph") == ["1", "3"]
    assert "round 2: cph: SILENT" in net.said("link")
    assert "round 3: cph" not in net.said("link")
    seconds = float(column(net.folder / "run", "rounds.csv", "train_seconds")[1])
    assert 60 <= seconds < 120


@pytest.mark.federation
def test_long_training_and_sites_that_come_and_go(network: Callable[..., Network]) -> None:
    net = network(("ams", "ber"), "--rounds", 4, "--limit", 90, "--tries", 5, *SLOWLY)
    net.link()
    for site in net.sites:
        net.site(site)
    slow = net.held("ams", 1)
    time.sleep(70)  # longer than Flower waits for a sign of life
    os.kill(slow, signal.SIGCONT)
    for done in (1, 2, 3):
        net.until(lambda: rounds_done(net) == done, f"round {done}")  # noqa: B023
        net.running["ber"].send_signal(signal.SIGTERM)
        assert net.ended("ber") == 130
        net.site("ber")
    assert net.ended("link") == 0, net.everything()
    assert took_part(net, "ams") == took_part(net, "ber") == ["1", "2", "3", "4"]
    assert "ams: SILENT" not in net.said("link")


@pytest.mark.federation
def test_when_the_sites_fail_the_link_ends_and_frees_its_port(network: Callable[..., Network]) -> None:
    net = network(("ams", "ber"), "--method", "fedavg", "--tries", 1, "--rounds", 2)
    net.link()
    for site in net.sites:
        net.site(site)
    net.until(lambda: rounds_done(net) == 1, "round 1")
    for site in net.sites:
        changed(net.folder / "sites" / site / "site.toml", 'methods = ["fedavg"]', 'methods = ["ditto"]')
    assert net.ended("link") == 1, net.everything()
    said = net.said("link")
    assert "0 of 2 sites answered, 2 needed" in said
    assert "ams: POLICY" in said
    assert "ber: POLICY" in said
    assert "Traceback" not in said
    processes.require_free("127.0.0.1", net.port)
    for site in net.sites:
        changed(net.folder / "sites" / site / "site.toml", 'methods = ["ditto"]', 'methods = ["fedavg"]')
    net.link()  # at once, on the same port
    assert net.ended("link") == 0, net.everything()
    assert column(net.folder / "run", "rounds.csv", "round") == ["1", "2"]


@pytest.mark.federation
def test_strangers_and_late_comers(network: Callable[..., Network]) -> None:
    net = network(("ams", "ber", "cph"), "--wait", 150, "--minimum", 2)
    stranger = net.folder / "sites/cph/key"
    stranger.unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", stranger], check=True)
    net.link()
    net.site("cph")  # with a key that nobody has registered
    assert net.ended("cph") == 1, net.everything()
    assert "it does not know this site's key" in net.said("cph")
    net.site("ams")
    assert net.ended("link") == 1, net.everything()
    assert "needs 2 of 3 sites, 1 joined (ams) within 150 s" in net.said("link")
    net.running["ams"].send_signal(signal.SIGTERM)
    assert net.ended("ams") == 130
    net.until(lambda: not net.children(), "the end of every process", 30)


@pytest.mark.federation
def test_interrupted_it_leaves_nothing_behind_and_goes_on(network: Callable[..., Network]) -> None:
    net = network(("ams", "ber"), "--method", "fedavg", "--rounds", 3)
    net.link()
    for site in net.sites:
        net.site(site)
    net.until(lambda: rounds_done(net) == 1, "round 1")
    net.running["link"].send_signal(signal.SIGINT)
    assert net.ended("link") == 130, net.everything()
    assert "stopped" in net.said("link")
    processes.require_free("127.0.0.1", net.port)
    net.link()
    net.until(lambda: rounds_done(net) == 2, "round 2")
    killed([strict(net.folder / "coordinator/status.json")["pid"]])  # as if memory had run out
    assert net.ended("link") == 1, net.everything()
    assert "the coordinator's process ended" in net.said("link")
    net.link()
    assert net.ended("link") == 0, net.everything()
    assert column(net.folder / "run", "rounds.csv", "round") == ["1", "2", "3"]


@pytest.mark.federation
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_no_process_connects_to_anything_but_this_machine(
    network: Callable[..., Network], tmp_path: Path
) -> None:
    net = network(("ams", "ber"), "--method", "fedavg", "--rounds", 1)
    traced = {
        name: ("strace", "-f", "-q", "--seccomp-bpf", "-e", "trace=connect", "-o", str(tmp_path / name))
        for name in ("link", "ams")
    }
    net.link(before=traced["link"])
    net.site("ams", before=traced["ams"])
    net.site("ber")
    assert net.ended("link") == 0, net.everything()
    assert net.ended("ams") == 0, net.everything()
    found = {
        name: set(re.findall(r'inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"', path.read_text()))
        for name, path in ((name, tmp_path / name) for name in traced)
    }
    assert all(found.values()), found
    addresses = {v4 or v6 for pairs in found.values() for v4, v6 in pairs}
    assert addresses <= {"127.0.0.1", "::1", "0.0.0.0"}, found


def answered(port: int, path: str, authority: Path) -> int:
    """The status of an HTTPS answer."""
    context = ssl.create_default_context(cafile=authority)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(f"https://localhost:{port}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.federation
@pytest.mark.skipif(shutil.which("nginx") is None or os.geteuid() != 0, reason="nginx, as root, is missing")
def test_the_proxy_of_the_deploy_example_shows_the_sites_part_only(
    network: Callable[..., Network], tmp_path: Path
) -> None:
    port = processes.free_port()
    net = network(("ams", "ber"), "--method", "fedavg", "--rounds", 1, "--address", f"localhost:{port}")
    text = (Path(__file__).parents[1] / "deploy/nginx.conf").read_text()
    for old, new in {
        "/srv/fedkper": str(net.folder),
        "/var/log/nginx": str(tmp_path),
        "coordinator.example": "localhost",
        "listen 443": f"listen 127.0.0.1:{port}",
        "127.0.0.1:9443": f"127.0.0.1:{net.port}",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "nginx.conf").write_text(text)
    words = f"daemon off; pid {tmp_path}/nginx.pid; error_log {tmp_path}/error.log;"
    net.running["nginx"] = subprocess.Popen(["nginx", "-c", tmp_path / "nginx.conf", "-g", words])
    net.link()
    for site in net.sites:
        net.site(site)
    net.until(lambda: "joined" in net.said("ams"), "the joining")
    authority = net.folder / "coordinator/ca.crt"
    assert answered(net.port, "/health", authority) == 200
    for hidden in ("/health", "/v1/control/", "/v1/runtime/", "/v1/fleet/../control/", "/docs", "/"):
        assert answered(port, hidden, authority) == 404, hidden
    assert net.ended("link") == 0, net.everything()
    assert [net.ended(name) for name in net.sites] == [0, 0], net.everything()
    seen = (tmp_path / "fedkper.log").read_text().splitlines()
    assert len([line for line in seen if "/v1/fleet/" in line and '" 200 ' in line]) > 20


WIDE = """
from torch import nn

class Wide(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Linear(shape[0] * shape[1] * shape[2], 1000)
        layers = (nn.Linear(1000, 1000) for _ in range({layers}))
        self.unused = nn.ModuleList(layers)  # sent, but not trained
        self.head = nn.Linear(1000, classes)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())
"""


@pytest.mark.federation
@pytest.mark.parametrize("megabytes", [4, 64, 600])
def test_large_models_travel(megabytes: int, network: Callable[..., Network], tmp_path: Path) -> None:
    path = tmp_path / "wide.py"
    path.write_text(WIDE.replace("{layers}", str(megabytes // 4)))
    net = network(("ams", "ber"), "--method", "fedavg", "--rounds", 1, "--limit", 280)
    for place in (net.folder, *(net.folder / "sites" / site for site in net.sites)):
        shutil.copy(path, place / "wide.py")
        changed(place / "federation.toml", "net.py:Net", "wide.py:Wide")
    net.link()
    for site in net.sites:
        net.site(site)
    assert net.ended("link") == 0, net.everything()
    (sent,) = column(net.folder / "run", "rounds.csv", "up_bytes")
    assert int(sent) > 2 * megabytes * 1_000_000
