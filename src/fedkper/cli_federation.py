"""The commands of a real federation: federation new, federation status, link, site."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fedkper import data, metrics, run, runfiles, tables
from fedkper.errors import InputError
from fedkper.experiment import Experiment
from fedkper.options import Command, OptionalPath, refuse_idle
from fedkper.ranges import Range, check


@dataclass(frozen=True, kw_only=True)
class New(Experiment, Command):
    """A new federation's folder: settings, certificates, a key pair for each site, and a README.

    The data set named by --dataset says which images and classes the federation has; its images are not used.
    """

    folder: tyro.conf.Positional[Path]
    """folder to make"""
    clients: Annotated[int, tyro.conf.Suppress] = Experiment.clients
    score_clients: Annotated[int, tyro.conf.Suppress] = 0
    sites: tuple[str, ...] = ()
    """names of the sites, in the order in which they are numbered"""
    address: str = "127.0.0.1:8443"
    """HOST:PORT at which the sites reach the coordinator; its certificate is for HOST"""
    listen: str = ""
    """HOST:PORT on which the coordinator listens behind a proxy; else 127.0.0.1 and the address's port"""
    fraction: Annotated[float, Range(0, 1, above=True)] = 1.0
    """share of the sites sampled a round"""
    minimum: Annotated[int, Range(0, 10_000)] = 0
    """sites that must join to start and answer for a round to count; 0: two thirds of them"""
    wait: Annotated[float, Range(1, 1e6)] = 600.0
    """seconds to wait for the sites before the first round"""
    limit: Annotated[float, Range(1, 1e6)] = 600.0
    """seconds that a round waits for answers"""
    tries: Annotated[int, Range(1, 100)] = 3
    """how often a round is tried"""
    test: str = ""
    """the coordinator's own test set, a name or a .npz file; without one there are no global scores"""
    certificate: Literal["own", "request"] = "own"
    """own: from an authority of the federation's own; request: to be signed by the hospitals' authority"""

    def act(self) -> None:
        from fedkper.flower import certificates, founding
        from fedkper.flower.settings import Federation, Rounds, refuse_contradictions, refuse_names

        if not self.sites:
            raise InputError("--sites: name the sites, such as --sites ams ber cph")
        if self.clients != Experiment.clients:
            raise InputError(f"--clients {self.clients}: the sites are the clients; leave it out")
        if self.score_clients:
            raise InputError(f"--score-clients {self.score_clients}: all sites are scored; leave it out")
        check(self)
        refuse_names(self.sites, "--sites")
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(Experiment)}
        experiment = Experiment(**(values | {"clients": len(self.sites)})).checked()
        refuse_idle(experiment)
        like = data.load(self.dataset, self.size)
        federation = Federation(
            id=founding.identity(),
            sites=self.sites,
            address=self.address,
            classes=like.classes,
            shape=like.shape,
            experiment=experiment,
            rounds=Rounds(
                minimum=self.minimum or math.ceil(len(self.sites) * 2 / 3),
                wait=self.wait,
                limit=self.limit,
                tries=self.tries,
            ),
            listen=self.listen,
            test=str(Path(self.test).absolute()) if self.test.endswith(".npz") else self.test,
        )
        refuse_contradictions(federation, "federation new")
        hosts = list(dict.fromkeys((certificates.host_of(self.address), "localhost", "127.0.0.1")))
        founding.found(self.folder, federation, hosts, self.certificate == "own")
        tables.line(f"federation {federation.id} of {len(self.sites)} sites: {self.folder}")
        tables.line(
            f"hand each site its folder below {self.folder / 'sites'}; then see {self.folder / 'README.md'}"
        )


@dataclass(frozen=True)
class Status(Command):
    """Where a federation stands: its sites, its round, what went wrong last."""

    folder: tyro.conf.Positional[Path]
    """the federation's folder at the coordinator"""

    def act(self) -> None:
        from fedkper.flower import link, processes
        from fedkper.flower.settings import read_federation

        federation = read_federation(self.folder)
        status = link.read_status(self.folder)
        state = str(status.get("state", "never started"))
        alive = "pid" in status and processes.alive(int(status["pid"]))
        if state in ("starting", "waiting", "running") and not alive:
            state = f"stopped; fedkper link {self.folder} goes on"
        tables.line(f"federation {federation.id}: {federation.experiment.method}, {state}")
        if "round" in status:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status["time"]))
            tables.line(f"{status['round'] or 0} of {status['rounds']} rounds done, as of {when}")
        sites = status.get("sites", {})
        rows = []
        for name in federation.sites:
            seen = sites.get(name, {})
            there = "connected" if seen.get("there") else "away"
            rows.append(
                {
                    "site": name,
                    "state": there if sites else "unknown",
                    "joined": bool(seen.get("joined")),
                    "last error": seen.get("error", ""),
                }
            )
        tables.rows(rows)
        if status.get("text"):
            tables.line(str(status["text"]))


@dataclass(frozen=True)
class Link(Command):
    """Runs a federation's coordinator to its end, or goes on where it was stopped."""

    folder: tyro.conf.Positional[Path]
    """the federation's folder, made by federation new"""

    def act(self) -> None:
        from fedkper.flower import link

        link.link(self.folder, lambda text: tables.line(text, file=tables.err))
        folder = self.folder / "run"
        tables.rejected(folder)
        experiment = run.stored_experiment(folder)
        tables.results([(experiment.method, metrics.summarise(runfiles.read_curves(folder)))], "method")
        tables.line(f"run folder: {folder}")


@dataclass(frozen=True)
class TakePart(Command):
    """Runs a hospital's node until its federation is finished. The data stay here."""

    folder: tyro.conf.Positional[Path]
    """the site's folder, as the coordinator handed it over"""
    data: OptionalPath = None
    """the site's data: a .npz file in MedMNIST's form; else `data` in site.toml"""
    share: str = ""
    """for rehearsals: NAME:INDEX/COUNT, such as synthetic:0/3, the part that the simulator's client has"""
    wait: Annotated[float, Range(0, 1e6)] = 600.0
    """seconds to try to reach the coordinator"""

    def act(self) -> None:
        from fedkper.flower import holding, node

        check(self)
        if self.data is not None and self.share:
            raise InputError("--data and --share: use one of them")
        source = f"{holding.SHARE}{self.share}" if self.share else ""
        if self.data is not None:
            source = str(self.data.absolute())
        node.site(self.folder, source, self.wait, lambda text: tables.line(text, file=tables.err))
        rows = [
            {"round": int(row["round"]), "model": row["model"], "images": int(row["images"])}
            | {name: f"{float(row[name]):.3f}" if row[name] else "–" for name in ("accuracy", "auc")}
            for row in node.numbers(self.folder)[-9:]
        ]
        if rows:
            tables.line(f"{self.folder.name}: this site's own numbers, made here")
            tables.rows(rows)
        tables.line(f"what was sent: {self.folder / 'audit.jsonl'}")


COMMANDS: dict[str, type[Command]] = {"link": Link, "site": TakePart}
GROUP: dict[str, type[Command]] = {"new": New, "status": Status}
