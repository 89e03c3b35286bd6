"""The errors that reach a person. Anything else that escapes is a fault of fedkper."""


class RunError(Exception):
    """A failure while running; the command line prints the message and exits with 1."""

    exit_code = 1


class InputError(RunError):
    """Wrong input or a wrong option; the message names the thing, the place and the remedy. Exit code 2."""

    exit_code = 2
