"""The commands of a federation as a person types them: what is made, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fedkper.cli_federation import COMMANDS, GROUP
from fedkper.experiment import Experiment
from fedkper.flower import certificates, processes
from fedkper.flower.settings import read_federation, read_site
from hospitals import changed, write_small
from terminal import fedkper, write_data

RULES = ["minimum", "wait", "limit", "tries"]
SMALL = ["--rounds", "2", "--epochs", "1", "--batch", "16", "--min-size", "5", "--alpha", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "fed"
    sites = ["--sites", "ams", "ber", "cph"]
    assert fedkper("federation", "new", folder, *sites, "--dataset", data, *SMALL) == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A federation's folder to break; its address is a port that was free a moment ago."""
    copy = tmp_path / "fed"
    shutil.copytree(made, copy)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for path in copy.rglob("federation.toml"):
        changed(path, "127.0.0.1:8443", address)
    return copy


def says(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    """Types a command that must fail with the exit code and one sentence. -> standard error"""
    capsys.readouterr()
    assert fedkper(*words) == code, capsys.readouterr()
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    assert said.err.splitlines()[-1].startswith("error: ") or said.err.count("error: ") == 1, said.err
    return said.err


def share(data: Path, folder: Path, site: str = "ams") -> list[object]:
    index = ["ams", "ber", "cph"].index(site)
    return ["site", folder / "sites" / site, "--share", f"{data}:{index}/3", "--wait", 1]


def test_the_options_of_every_command() -> None:
    """Scripts rely on these: whoever changes the list breaks them, and must mean it."""
    experiment = {f.name for f in dataclasses.fields(Experiment)}
    found = {
        name: [f.name for f in dataclasses.fields(command) if f.name not in experiment]
        for name, command in (COMMANDS | GROUP).items()
    }
    assert found == {
        "link": ["folder"],
        "site": ["folder", "data", "share", "wait"],
        "new": ["folder", "sites", "address", "listen", *RULES, "test", "certificate"],
        "status": ["folder"],
    }
    for words in ("federation new", "federation status", "link", "site"):
        assert fedkper(*words.split(), "--help") == 0


# --- federation new ------------------------------------------------------------------------------------


def test_a_new_federation_has_all_that_its_members_need(made: Path) -> None:
    federation = read_federation(made)
    assert federation.sites == ("ams", "ber", "cph")
    assert federation.rounds.minimum == 2
    assert federation.experiment.clients == 3
    assert federation.classes == ("0", "1", "2")
    for site in federation.sites:
        place = made / "sites" / site
        assert sorted(p.name for p in place.iterdir()) == ["ca.crt", "federation.toml", "key", "site.toml"]
        assert read_site(place).name == site
        assert read_site(place).policy.methods == ("fedkper",)
        assert read_federation(place).experiment == federation.experiment
        private = serialization.load_ssh_private_key((place / "key").read_bytes(), None)
        public = serialization.load_ssh_public_key((made / f"coordinator/keys/{site}.pub").read_bytes())
        assert private.public_key() == public  # type: ignore[union-attr]
        assert private.curve.name == "secp384r1"  # type: ignore[union-attr]
    secret = [made / "coordinator/ca.key", made / "coordinator/server.key", *made.glob("sites/*/key")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    assert certificates.check_server(made / "coordinator", "127.0.0.1") == ""
    assert certificates.check_server(made / "coordinator", "localhost") == ""
    text = (made / "README.md").read_text()
    assert all(command in text for command in ("fedkper link", "fedkper site", "fedkper federation status"))


def test_a_request_instead_of_a_certificate(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    words = [
        "federation",
        "new",
        folder,
        "--sites",
        "ams",
        "ber",
        "--dataset",
        data,
        "--certificate",
        "request",
    ]
    assert fedkper(*words, "--address", "coordinator.example:443") == 0
    made = x509.load_pem_x509_csr((folder / "coordinator/server.csr").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "coordinator.example" in names.get_values_for_type(x509.DNSName)
    assert not list(folder.rglob("*.crt"))
    assert "server.csr" in (folder / "README.md").read_text()


def test_a_users_own_model_goes_to_every_site(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    model = f"{data.with_name('net.py')}:Net"
    assert fedkper("federation", "new", folder, "--sites", "a", "b", "--dataset", data, "--model", model) == 0
    for place in (folder, folder / "sites/a", folder / "sites/b"):
        assert (place / "net.py").read_bytes() == data.with_name("net.py").read_bytes()
        assert read_federation(place).experiment.model == f"{place / 'net.py'}:Net"
        assert str(data) not in (place / "federation.toml").read_text().replace(f'dataset = "{data}"', "")


@pytest.mark.parametrize(
    ("words", "naming"),
    [
        ([], "--sites: name the sites"),
        (["--sites", "ams", "Ber"], "--sites Ber: use up to 31"),
        (["--sites", "ams", "ams"], "ams is named twice"),
        (["--sites", "ams", "--clients", "3"], "--clients 3: the sites are the clients"),
        (["--sites", "ams", "--score-clients", "3"], "--score-clients 3: all sites are scored"),
        (["--sites", "ams", "ber", "--minimum", "3"], "minimum 3: the federation has 2 sites"),
        (["--sites", "ams", "--address", "here"], "address here: must be HOST:PORT"),
        (["--sites", "ams", "--address", "klinikum-münchen.example:443"], "HOST must be an IP address, or a"),
        (["--sites", "ams", "--address", f"{'a' * 65}:443"], "a name of at most 64 letters"),
        (["--sites", "ams", "--address", "here:99999"], "address here:99999: must be HOST:PORT"),
        (["--sites", "ams", "--limit", "0"], "--limit 0.0: must be at least 1"),
        (["--sites", "ams", "--certificate", "none"], "--certificate none: must be one of own, request"),
        (["--sites", "ams", "--method", "fedkpr"], "did you mean 'fedkper'?"),
        (["--sites", "ams", "--nimimum", "1"], "--nimimum: no such option"),
    ],
)
def test_what_cannot_be_founded_is_refused(
    words: list[str], naming: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fed"
    assert naming in says(capsys, 2, "federation", "new", folder, "--dataset", data, *words)
    assert not folder.exists()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="only Linux tells what has ended from what runs")
def test_a_process_that_nobody_waited_for_counts_as_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert processes.alive(child.pid)
    assert child.stdin is not None
    child.stdin.close()
    end = time.monotonic() + 60
    while processes.alive(child.pid):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert child.wait() == 0
    assert not processes.alive(child.pid)


def test_a_file_is_no_folder_for_a_federation(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fed").write_text("mine")
    said = says(capsys, 2, "federation", "new", tmp_path / "fed", "--sites", "ams", "--dataset", data)
    assert "is there and not empty; name another folder" in said
    assert (tmp_path / "fed").read_text() == "mine"


def test_a_folder_in_use_is_left_alone(made: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.read_bytes() for p in made.rglob("*") if p.is_file()}
    words = ["federation", "new", made, "--sites", "ams", "--dataset", data]
    assert "is there and not empty; name another folder" in says(capsys, 2, *words)
    assert {p: p.read_bytes() for p in made.rglob("*") if p.is_file()} == before


def test_status_before_the_first_start(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fedkper("federation", "status", made) == 0
    said = capsys.readouterr().out
    assert "never started" in said
    assert all(site in said for site in ("ams", "ber", "cph"))


@pytest.mark.parametrize("words", [("federation", "status"), ("link",), ("site",)])
def test_another_folder_is_named(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ".toml: cannot be read" in says(capsys, 2, *words, tmp_path)


# --- the coordinator's start ---------------------------------------------------------------------------


def test_a_port_that_is_taken_is_said_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host, port = read_federation(folder).bound
    with socket.socket() as other:
        other.bind((host, port))
        other.listen()
        assert f"port {port} on 127.0.0.1 cannot be used" in says(capsys, 1, "link", folder)


def renew(folder: Path, hosts: list[str], days_from_now: int = 0, days: int = 30) -> None:
    (folder / "server.key").unlink()
    begins = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days_from_now, hours=-1)
    certificates.certify(folder, hosts, begins, days)


def other_authority(folder: Path) -> None:
    for name in ("ca.key", "ca.crt", "server.key"):
        (folder / name).unlink()
    certificates.authority(folder / "ca.key", folder / "ca.crt", "another")
    certificates.certify(folder, ["127.0.0.1"])


FAULTS: dict[str, tuple[Any, str]] = {
    "another name": (
        lambda f: renew(f, ["other.example"]),
        "is for the name other.example, not for 127.0.0.1",
    ),
    "expired": (lambda f: renew(f, ["127.0.0.1"], -10, 9), "expired on"),
    "not yet valid": (lambda f: renew(f, ["127.0.0.1"], 2), "not valid until"),
}


def test_a_key_that_cannot_be_used_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "coordinator/server.key").write_text("damaged")
    assert "server.key: is no private key in PEM form, or has a passphrase" in says(capsys, 2, "link", folder)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_coordinator_does_not_start_with_a_certificate_that_sites_refuse(
    fault: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, naming = FAULTS[fault]
    change(folder / "coordinator")
    assert naming in says(capsys, 2, "link", folder)


def test_a_certificate_of_another_authority_or_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = folder / "coordinator"
    kept = (place / "ca.crt").read_bytes()
    (place / "server.key").rename(place / "old.key")
    certificates.private_key(place / "server.key")
    assert "belongs to another key" in says(capsys, 2, "link", folder)
    (place / "server.key").unlink()
    (place / "old.key").rename(place / "server.key")
    other_authority(place)
    (place / "ca.crt").write_bytes(kept)
    assert "is signed by another authority" in says(capsys, 2, "link", folder)
    (place / "server.crt").write_text("no certificate")
    assert "is no certificate in PEM form" in says(capsys, 2, "link", folder)
    (place / "server.crt").unlink()
    assert "server.crt: cannot be read" in says(capsys, 2, "link", folder)


# --- the hospital's start ------------------------------------------------------------------------------


@contextmanager
def listening(folder: Path, certificate: Path | None) -> Iterator[None]:
    """A server at the coordinator's address, that shows the certificate in a folder, or speaks plain text."""
    server = socket.create_server(read_federation(folder).bound)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if certificate:
        context.load_cert_chain(certificate / "server.crt", certificate / "server.key")

    def serve() -> None:
        while True:
            try:
                found, _ = server.accept()
            except OSError:
                return
            with found:
                try:
                    if certificate:
                        context.wrap_socket(found, server_side=True).close()
                    else:
                        found.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


@pytest.mark.parametrize("fault", [*FAULTS, "another authority", "plain text"])
def test_a_site_refuses_a_coordinator_that_it_cannot_trust(
    fault: str, folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place: Path | None = folder / "coordinator"
    naming = "is signed by another authority"
    if fault == "another authority":
        other_authority(folder / "coordinator")
    elif fault == "plain text":
        place, naming = None, "does not speak TLS"
    else:
        change, naming = FAULTS[fault]
        change(folder / "coordinator")
    with listening(folder, place):
        said = says(capsys, 2, *share(data, folder))
    assert naming in said
    assert read_federation(folder).address in said


def test_a_site_before_its_coordinator_says_so_and_gives_up(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = says(capsys, 1, *share(data, folder))
    address = read_federation(folder).address
    assert f"no coordinator answers at {address} yet" in said
    assert f"no coordinator answers at {address} (Connection refused), tried for 1 s" in said
    assert "local test images" in said


@pytest.mark.parametrize(
    ("words", "naming"),
    [
        (["--share", "{data}:1/3"], "--share {data}:1/3: ams of this federation has share 0/3"),
        (["--share", "{data}"], "must be NAME:INDEX/COUNT"),
        (["--data", "missing.npz"], "missing.npz: no such file"),
        (["--data", "file.csv"], "file.csv: must be a .npz file in MedMNIST's form"),
        ([], "no data are named: give --data FILE"),
        (["--data", "x.npz", "--share", "synthetic:0/3"], "--data and --share: use one of them"),
        (["--wait", "-1"], "--wait -1.0: must be at least 0"),
    ],
)
def test_a_site_without_proper_data_does_not_start(
    words: list[str], naming: str, folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [word.replace("{data}", str(data)) for word in words]
    assert naming.replace("{data}", str(data)) in says(capsys, 2, "site", folder / "sites/ams", *typed)


def test_data_of_other_classes_are_refused_at_the_site(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    path = write_data(tmp_path / "own.npz")
    with np.load(path) as found:
        arrays = dict(found) | {"classes": np.array(["0", "2", "1"])}
    np.savez(path, **arrays)
    said = says(capsys, 2, "site", folder / "sites/ams", "--data", path)
    assert "class 1 is '2' here, '1' there" in said


def test_a_key_that_others_can_read_is_warned_about(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = folder / "sites/ams/key"
    os.chmod(key, 0o644)
    assert f"warning: {key}: can be read by others" in says(capsys, 1, *share(data, folder))
    key.write_text("no key")
    assert "is no private key in OpenSSH's form" in says(capsys, 2, *share(data, folder))
    key.unlink()
    assert "key: cannot be read" in says(capsys, 2, *share(data, folder))


def test_the_policy_is_checked_before_anybody_is_called(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(folder / "sites/ams/site.toml", "smallest_train = 10", "smallest_train = 1000000")
    assert "smallest_train is 1000000" in says(capsys, 2, *share(data, folder))
    assert not (folder / "sites/ams/flower").exists()
