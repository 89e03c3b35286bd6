"""The commands paper table1, fig3, fig4, fig5 and all."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from fedkper import folders, tables
from fedkper.errors import InputError
from fedkper.experiment import PRESETS, Experiment
from fedkper.methods import parse as parse_method
from fedkper.options import Command, OptionalPath, Options
from fedkper.paper import efficiency as paper_efficiency
from fedkper.paper import figures as paper_figures
from fedkper.paper import missing as paper_missing
from fedkper.paper import show as paper_print
from fedkper.paper.runs import TWELVE, Found, Setting, find, method_name, same_setting, settings
from fedkper.paper.table import block
from fedkper.paper.write import save
from fedkper.ranges import Range, check
from fedkper.sweep.sweep import Outcome
from fedkper.userfile import is_one

ARMS = ("fedavg", "fedkper:aggregation=false", "fedkper:distillation=false", "fedkper")
PAIR = ("fedavg", "fedkper")
SEEDS = (1, 2, 3)
FIGURES = {
    "fig3": paper_figures.peaks_and_drops,
    "fig4": paper_figures.ablation,
    "fig5": paper_efficiency.efficiency,
}
# Options of a run that have no use here, and what has their place.
REFUSED = {
    "method": "name them with --methods",
    "seed": "name them with --seeds",
    "workers": "--jobs is how many runs go on at a time, each in one process",
    "partition_file": "the partition is drawn from --partition-seed",
    "track": "fedkper export writes the curves of finished runs",
}


@dataclass(frozen=True, kw_only=True)
class Paper(Options):
    """What the commands share. Options of the experiment choose one setting among the runs."""

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    needs: ClassVar[tuple[str, ...]]
    """methods that are shown and missed, if --methods names none"""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs or of sweeps, searched at any depth"""
    methods: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """methods to show, and to run with --run; those of the paper if not given"""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="(default: 1 2 3)")] = ()
    """seeds to run with --run; shown are those that are there"""
    run: bool = False
    """first run what is missing, below the folder; not needed where it holds no run and options say what"""
    jobs: Annotated[
        int | None, Range(1, 1024), tyro.conf.arg(metavar="INT", help_behavior_hint="(default: one a core)")
    ] = None
    """runs at a time; results do not depend on it"""
    out: OptionalPath = None
    """folder of the table and the figures; paper in the first folder of runs if not given"""
    method: Annotated[str, tyro.conf.Suppress] = Experiment.method
    seed: Annotated[int, tyro.conf.Suppress] = Experiment.seed
    workers: Annotated[int | None, tyro.conf.Suppress] = None
    partition_file: Annotated[Path | None, tyro.conf.Suppress] = None
    track: Annotated[Path | None, tyro.conf.Suppress] = None

    @classmethod
    def meant(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(values.keys() & REFUSED.keys()):
            raise InputError(f"--{name.replace('_', '-')}: has no use here; {REFUSED[name]}")
        return super().meant(values)

    def act(self) -> None:
        check(self)
        self._check_methods()
        failed = self._train() if self._wants_training() else []
        if failed and not any(folders.below(self.runs[0])):
            raise paper_missing.failures(failed)
        found, notes = find(self.runs)
        all_settings, doubles = settings(found)
        for text in notes + doubles:
            tables.notice(text)
        shown = self._selected(all_settings)
        out = self.out or self.runs[0] / "paper"
        folders.make(out)
        tables.line(f"written to {out}: {_together(self._show(shown, out))}")
        self._tell_missing(shown, found)
        if failed:
            raise paper_missing.failures(failed)

    def _check_methods(self) -> None:
        if self.methods and self.name == "fig4":
            raise InputError("--methods: fig4 shows its four arms; leave it out")
        for method in self.methods:
            if not is_one(method):
                parse_method(method)

    def _base(self) -> Experiment:
        """The experiment of the options; its method and seed say nothing."""
        return dataclasses.replace(self.experiment(), method=Experiment.method, seed=Experiment.seed)

    def _chosen(self) -> bool:
        """Whether options choose a setting."""
        return bool(self.preset or self.config) or self._base() != Experiment()

    def _selected(self, shown: list[Setting]) -> list[Setting]:
        """The settings to show: that of the options, or all."""
        if not self._chosen():
            return shown
        base = self._base()
        ours = [
            dataclasses.replace(s, prefer=base.partition_seed)
            for s in shown
            if same_setting(s.experiment, base)
        ]
        if not ours:
            raise InputError(
                f"{self.runs[0]}: holds no run of {base.dataset} with these options, but "
                f"{len(shown)} other setting{'s' if len(shown) > 1 else ''}; --run runs them"
            )
        part = base.partition_seed
        dealt = {r.experiment.partition_seed for s in ours for r in s.runs}
        if part != Experiment.partition_seed and part not in dealt:
            raise InputError(
                f"--partition-seed {part}: {self.runs[0]} holds none, but runs of partition seed "
                f"{', '.join(map(str, sorted(dealt)))}; --run runs them"
            )
        return ours

    # --- what is missing ------------------------------------------------------------------------------

    def _wants_training(self) -> bool:
        """--run, or a first start: a folder without runs and options that say what to run."""
        if self.run and len(self.runs) > 1:
            raise InputError("--run: name one folder, in which the runs are made")
        empty = all(not os.path.isdir(path) or not any(folders.below(path)) for path in self.runs)
        if self.run or not empty:
            return self.run
        if len(self.runs) == 1 and self._chosen():
            return True
        there = "holds no run" if os.path.isdir(self.runs[0]) else "no such folder"
        raise InputError(
            f"{self.runs[0]}: {there}; name a folder with runs, or say what to run in it, such as "
            f"--preset paper-blood"
        )

    def _train(self) -> list[Outcome]:
        """Runs what is missing. Returns what failed."""
        folder = self.runs[0]
        found = find([folder])[0] if os.path.isdir(folder) and any(folders.below(folder)) else []
        base, data = self._base(), self.data
        if not self._chosen() and found:
            known = settings(found)[0]
            if len(known) > 1:
                raise InputError(
                    f"--run: {folder} holds runs of {len(known)} settings; choose one, such as with --preset "
                    "or --config RUN/run.json"
                )
            base = dataclasses.replace(known[0].experiment, partition_seed=known[0].partitions()[0][0])
            stored = found[0].stored.get("execution")
            where = stored.get("data") if isinstance(stored, dict) else None
            data = data or (Path(where) if isinstance(where, str) else None)
        what = self._missing(base, found)
        if not what.experiments:
            return []
        tables.notice(f"running {what}")
        execution = dataclasses.replace(self.execution(), data=data)
        return paper_missing.train(what, folder, found, execution, self.jobs)

    def _missing(self, base: Experiment, found: Sequence[Found]) -> paper_missing.Missing:
        return paper_missing.missing(base, self.methods or self.needs, self.seeds or SEEDS, found)

    def _tell_missing(self, shown: Sequence[Setting], found: Sequence[Found]) -> None:
        """What the paper's table and figures still lack, and how to get it; of other settings if chosen."""
        for setting in shown:
            base = dataclasses.replace(setting.experiment, partition_seed=setting.partitions()[0][0])
            names = [n for n, values in PRESETS.items() if same_setting(base, Experiment(**values))]
            if not (names or self._chosen()):
                continue
            what = self._missing(base, found)
            if what.experiments:
                choice = f" --preset {names[0]}" if names else ""
                command = f"fedkper paper {self.name} {shlex.quote(str(self.runs[0]))}{choice} --run"
                tables.notice(f"not run yet: {what}")
                tables.line(f"  {command}" + ("" if names else " and the same options"), "yellow", tables.err)

    # --- what is shown --------------------------------------------------------------------------------

    def _show(self, shown: Sequence[Setting], out: Path) -> list[Path]:
        """Prints and writes all parts. Raises InputError if there is none that could be."""
        written: list[Path] = []
        reasons: list[str] = []
        if "table1" in self.parts:
            blocks = [block(setting, _labels(self.methods)) for setting in shown]
            for one in blocks:
                paper_print.show(one)
                tables.line("")
            written += save(blocks, out)
        for part in self.parts:
            for setting, name in zip(shown, _names(shown), strict=True):
                try:
                    written += self._figure(part, setting, out / f"{part}-{name}") if part in FIGURES else []
                except InputError as error:
                    reasons.append(str(error))
        if not written:
            raise InputError("; ".join(reasons))
        for reason in reasons:
            tables.notice(f"not drawn: {reason}")
        return written

    def _figure(self, part: str, setting: Setting, stem: Path) -> list[Path]:
        methods = ARMS if part == "fig4" else self.methods or PAIR
        if part != "fig4" and self.name == "all":
            methods = tuple(m for m in methods if m in PAIR) or methods[:2]
        runs = paper_figures.chosen(setting, _labels(methods), part)
        if part == "fig5":
            paper_print.efficiency(setting, runs)
        return paper_figures.write(lambda: FIGURES[part](setting, runs), stem)


@dataclass(frozen=True, kw_only=True)
class Table1(Paper):
    """The paper's Table 1 from runs, beside the published numbers, as CSV, Markdown and LaTeX."""

    name = "table1"
    parts = ("table1",)
    needs = TWELVE


@dataclass(frozen=True, kw_only=True)
class Fig3(Paper):
    """Figure 3: the peaks of the global accuracy and what is lost between them, as SVG and PDF."""

    name = "fig3"
    parts = ("fig3",)
    needs = PAIR


@dataclass(frozen=True, kw_only=True)
class Fig4(Paper):
    """Figure 4: the ablation, FedAvg, either of FedKPer's two ideas alone, and both, as SVG and PDF."""

    name = "fig4"
    parts = ("fig4",)
    needs = ARMS


@dataclass(frozen=True, kw_only=True)
class Fig5(Paper):
    """Figure 5: accuracy over seconds, and at equal times, the first method being the baseline."""

    name = "fig5"
    parts = ("fig5",)
    needs = PAIR


@dataclass(frozen=True, kw_only=True)
class All(Paper):
    """The table and the figures 3, 4 and 5."""

    name = "all"
    parts = ("table1", "fig3", "fig4", "fig5")
    needs = (*TWELVE, *ARMS[1:3])


COMMANDS: dict[str, type[Command]] = {"table1": Table1, "fig3": Fig3, "fig4": Fig4, "fig5": Fig5, "all": All}


def _labels(methods: Sequence[str]) -> list[str]:
    """The rows that methods, as they are typed, have."""
    return [method_name(Experiment(method=m), {}) for m in methods]


def _names(shown: Sequence[Setting]) -> list[str]:
    """A part of a file's name for each setting: the data set, and where it comes again what sets it apart."""
    names: list[str] = []
    for setting in shown:
        name = re.sub(r"[^A-Za-z0-9]+", "-", setting.dataset).strip("-")[:40] or "data"
        e = setting.experiment
        if sum(other.dataset == setting.dataset for other in shown) > 1:
            name += f"-{e.clients}clients-{e.rounds}rounds"
        again = sum(re.sub(r"\.\d+$", "", other).lower() == name.lower() for other in names)
        names.append(f"{name}.{again + 1}" if again else name)
    return names


def _together(paths: Sequence[Path]) -> str:
    """table1.csv, table1.md -> table1.csv/md"""
    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(path.stem, []).append(path.suffix[1:])
    return ", ".join(f"{stem}.{'/'.join(suffixes)}" for stem, suffixes in kinds.items())
