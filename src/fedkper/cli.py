"""The command line: from words to a command, and from its end to an exit code.

What the commands need is imported when one is chosen: PyTorch takes a second to import, for which
`fedkper --help` need not wait, and Ctrl-C meanwhile is a normal end.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedkper import __version__
from fedkper.errors import InputError, RunError

if TYPE_CHECKING:
    from fedkper.options import Command

HELP = """usage: fedkper COMMAND [options]

Federated learning for medicine: generalization, personalization, forgetting.

  run         one experiment                       fedkper run --method fedkper --preset paper-blood
  compare     several methods or seeds, a table    fedkper compare --methods fedavg fedkper
  sweep       any options varied, several at once  fedkper sweep --seeds 1 2 3 --vary lr=0.1,0.01
  summary     the table again, from the folders    fedkper summary runs/*
  report      one HTML file on runs                fedkper report runs --out report.html
  paper all   the paper's table and figures        fedkper paper all runs; table1, fig3, fig4, fig5 alone
  export      numbers or a model out of runs       fedkper export RUN --model FOLDER, --curves FILE.csv
  predict     an exported model on images          fedkper predict FOLDER IMAGES
  federation  a real one: new DIR, status DIR       link DIR at the coordinator, site DIR at a hospital
  data list   the published data sets              data get NAME, data show NAME, data split

Each has --help. The embedded data set needs no download: --dataset synthetic (the default).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 for a failure while running; 2 for wrong input; 130 if interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal lacks is no reason to stop
            stream.reconfigure(errors="replace")
    try:
        return dispatch(words)
    except RunError as error:
        _say(f"error: {error}", "bold red")
        return error.exit_code
    except KeyboardInterrupt:
        _say("stopped", "yellow")
        return 130
    except BrokenPipeError:  # `fedkper summary runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _say(text: str, style: str) -> None:
    """One line on standard error, also if what tables.py needs could not be imported to the end."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    console.print(text, style=style, soft_wrap=True)


def dispatch(words: list[str]) -> int:
    at = 1 if words[:1] in (["data"], ["paper"], ["federation"]) else 0
    name = words[at] if len(words) > at else ""
    if name in ("", "-h", "--help"):
        print(HELP, end="")
        return 0 if name else 2
    if words[0] == "--version":
        print(f"fedkper {__version__}")
        return 0
    from fedkper import cli_data, cli_export, cli_federation, cli_paper, cli_report, cli_run, cli_sweep
    from fedkper.ranges import near

    commands = cli_run.COMMANDS | cli_sweep.COMMANDS | cli_export.COMMANDS | cli_federation.COMMANDS
    commands |= cli_report.COMMANDS
    groups = {"data": cli_data.COMMANDS, "paper": cli_paper.COMMANDS, "federation": cli_federation.GROUP}
    known = groups[words[0]] if at else commands
    if name not in known:
        listing = ", ".join([*commands, *(f"{group} {c}" for group in groups for c in groups[group])])
        hint = f"; did you mean 'fedkper {name}'?" if name in commands else near(name, known)
        raise InputError(f"'{' '.join(words[: at + 1])}': no such command{hint}; there are: {listing}")
    return _act(known[name], words[at + 1 :], f"fedkper {' '.join(words[: at + 1])}")


def _act(command: type[Command], words: list[str], prog: str) -> int:
    """Reads a command's options and carries it out, or shows its help."""
    from fedkper import options

    if "-h" in words or "--help" in words:
        return _help(command, prog)
    values = options.read(command, command.heard(words), prog)
    command(**command.meant(values)).act()
    return 0


def _help(command: type[Command], prog: str) -> int:
    import tyro

    try:
        tyro.cli(command, args=["--help"], prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as done:
        return int(done.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
