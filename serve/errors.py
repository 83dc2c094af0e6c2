"""How `dspark-serve` fails: one line that names the thing and the remedy, and an exit code that tells the kind."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every `dspark-serve` command."""

    OK = 0
    START_FAILED = 1
    """The engine could not be started with this configuration."""
    BAD_INPUT = 2
    """A wrong command line, profile, value or path, or a failed preflight; nothing was started, no weight was read."""
    ENGINE_DIED = 3
    """The engine was serving and died."""


class InputError(Exception):
    """What the user gave cannot work. The message says in one line what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
