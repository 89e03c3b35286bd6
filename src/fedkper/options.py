"""The options of a command line: those that commands share, and how words become values.

Whatever is wrong in the words is said in one sentence with the option's name.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from fedkper import run, runfiles, track
from fedkper.errors import InputError
from fedkper.experiment import Experiment, from_file, preset, read_file
from fedkper.ranges import Range, convert, kind_of, near
from fedkper.run import Execution

# How --help shows an option that need not be given.
OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
OptionalInt = Annotated[
    int | None, Range(1, 1024), tyro.conf.arg(metavar="INT", help_behavior_hint="(default: one a core)")
]


class Command:
    """A command: its fields are its options."""

    @classmethod
    def heard(cls, words: list[str]) -> list[str]:
        """The words in the form that `read` takes."""
        return words

    @classmethod
    def meant(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values that were named, with what follows from them. Raises InputError if they clash."""
        return values

    def act(self) -> None:
        """Carries the command out."""
        raise NotImplementedError


@dataclass(frozen=True)
class Options(Experiment, Command):
    """What every command that trains takes: the experiment, and how and where to run it."""

    data: OptionalPath = None
    """folder of the data files; else $FEDKPER_DATA, else the user's cache"""
    workers: OptionalInt = None
    """processes that train; results do not depend on it"""
    device: str = "cpu"
    """cpu, cuda or cuda:N"""
    lanes: Annotated[
        int | None,
        Range(1, 100_000),
        tyro.conf.arg(metavar="INT", help_behavior_hint="(default: as many as fit)"),
    ] = None
    """clients that train side by side in one process, for an accelerator; on a CPU one is quickest"""
    partition_file: OptionalPath = None
    """a stored partition (fedkper data split) instead of drawing one; must fit the options"""
    out: OptionalPath = None
    """folder of the results; a new one below runs/ if not given"""
    preset: Annotated[str, tyro.conf.arg(help_behavior_hint="")] = ""
    """paper-blood, paper-organc or paper-organs: the paper's setting; options beside it win"""
    config: OptionalPath = None
    """a run.json, to repeat that run, or a JSON file with some options; options beside it win"""
    track: OptionalPath = None
    """folder in which TensorBoard finds the curves while the run goes on; changes no number"""

    @classmethod
    def meant(cls, values: dict[str, Any]) -> dict[str, Any]:
        if {"seed", "seeds"} <= values.keys():
            raise InputError("--seed and --seeds: use one of them")
        return defaults(values) | values

    def experiment(self) -> Experiment:
        """The experiment. Raises InputError for an option that would have no effect in it."""
        experiment = Experiment(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Experiment)})
        if not getattr(self, "resume", False):
            refuse_idle(experiment)
        return experiment

    def execution(self) -> Execution:
        board = None if self.track is None else track.checked(self.track)
        return Execution(self.data, self.workers, self.device, self.lanes, board)


def refuse_idle(e: Experiment) -> None:
    """Raises InputError for an option that another one makes idle; whoever gives it expects an effect."""
    refuse_size(f"--dataset {e.dataset}", e.dataset, e.size)
    if e.column and e.partition != "column":
        raise InputError(f"--column {e.column}: has no effect with --partition {e.partition}; leave it out")
    if e.classes_per_client != Experiment.classes_per_client and e.partition != "pathological":
        raise InputError(
            f"--classes-per-client {e.classes_per_client}: has no effect with --partition {e.partition}; "
            "leave it out"
        )


def refuse_size(option: str, name: str, size: int) -> None:
    """Raises InputError for --size with a set whose images have a size of their own."""
    if size != Experiment.size and (name == "synthetic" or name.endswith(".npz")):
        raise InputError(f"--size {size}: has no effect with {option}, which has its own; leave it out")


def read(command: type, words: Sequence[str], prog: str) -> dict[str, Any]:
    """The values that the words name, by field of `command`: --field VALUE, --field=VALUE.

    A field of type bool takes no value, a tuple takes all up to the next option, a field without a default
    is positional. Raises InputError for an unknown option (with a near match), one given twice, a missing
    or empty value, and a value of another type. Ranges are checked with those of a configuration file.
    """
    hints = get_type_hints(command, include_extras=True)
    required = [f.name for f in dataclasses.fields(command) if f.default is dataclasses.MISSING]
    known = {"--" + f.name.replace("_", "-"): f.name for f in dataclasses.fields(command)}
    known = {option: name for option, name in known.items() if name not in required}
    values: dict[str, Any] = {}
    at = 0
    while at < len(words):
        if not words[at].startswith("-"):
            _take_positional(values, required, hints, words[at], prog)
            at += 1
            continue
        option, equals, value = words[at].partition("=")
        option, at = option.replace("_", "-"), at + 1
        if option not in known:
            raise InputError(f"{option}: no such option; {prog} --help lists them{near(option, known)}")
        hint = hints[known[option]]
        kind, many = kind_of(hint)
        end = at
        if not equals and kind is not bool:
            limit = len(words) if many else min(at + 1, len(words))
            while end < limit and not words[end].startswith("--"):
                end += 1
        texts = [value] if equals else list(words[at:end])
        if known[option] in values:
            raise InputError(f"{option}: given twice; which one is meant?")
        values[known[option]], at = _value(texts, hint, option), end
    if missing := [name for name in required if name not in values]:
        raise InputError(f"{prog}: {missing[0].upper()} is missing; see {prog} --help")
    return values


def _value(texts: list[str], hint: Any, option: str) -> Any:
    kind, many = kind_of(hint)
    if kind is bool:
        if texts:
            raise InputError(f"{option} {texts[0]}: takes no value")
        return True
    if not texts:
        raise InputError(f"{option}: its value is missing")
    values = tuple(_one(text, hint, option) for text in texts)
    return values if many else values[0]


def _one(text: str, hint: Any, option: str) -> Any:
    if not text.strip():
        raise InputError(f"{option}: its value is empty")
    return convert(text, hint, option)


def _take_positional(
    values: dict[str, Any], names: Sequence[str], hints: dict[str, Any], word: str, prog: str
) -> None:
    if not names:
        raise InputError(f"{prog}: '{word}' is not expected here; options start with --")
    name = next((n for n in names if n not in values), names[-1])
    _, many = kind_of(hints[name])
    if name in values and not many:
        raise InputError(f"{prog}: '{word}' is one too many")
    value = _one(word, hints[name], f"{prog}: {name.upper()}")
    values[name] = (*values.get(name, ()), value) if many else value


def defaults(given: dict[str, Any]) -> dict[str, Any]:
    """What options have where the command line names none: the preset's, the file's, the resumed run's."""
    stored: dict[str, Any] = {}
    if given.get("resume"):
        for name in sorted({"preset", "config", "partition_file"} & given.keys()):
            raise InputError(f"--resume: the run keeps its own options; leave out --{name.replace('_', '-')}")
        folder = given.get("out")
        if folder is None:
            raise InputError("--resume: name the run's folder: --resume FOLDER")
        if not os.path.isfile(folder / "run.json"):
            raise InputError(f"--resume {folder}: holds no run (no run.json); check the path")
        base, stored = run.stored_experiment(folder), runfiles.read_json(folder, "run.json")
    elif "preset" in given and "config" in given:
        raise InputError("--preset and --config: each names all options of a run; use one of them")
    elif "preset" in given:
        base = preset(given["preset"])
    elif "config" in given:
        base, stored = from_file(given["config"]), read_file(given["config"])
    else:
        base = Experiment()
    execution = stored.get("execution")
    where = execution.get("data") if isinstance(execution, dict) else None
    return base.to_json() | ({"data": Path(where)} if isinstance(where, str) else {})
