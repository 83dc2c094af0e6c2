"""How `dspark-serve` fails: one line that names the thing and the remedy, and an exit code that tells the kind."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every `dspark-serve` command."""

    OK = 0
    START_FAILED = 1
    BAD_INPUT = 2
    ENGINE_DIED = 3
    ENGINE_STALLED = 4
    PARTIAL = 5


EXIT_MEANINGS = {
    ExitCode.OK: "Done, or stopped as asked: requests under way were finished or given their time",
    ExitCode.START_FAILED: "The engine could not be started with this configuration, or the server itself failed; "
    "`patches --check`: a patch is refused; `health`: no server is alive there; `validate`, `bench`: something could "
    "not be measured",
    ExitCode.BAD_INPUT: "A wrong command line, profile, value or path, or a failed preflight: no weight was read",
    ExitCode.ENGINE_DIED: "The engine was serving and died; the last log line says why",
    ExitCode.ENGINE_STALLED: "The engine had requests and completed no step for `--stall-seconds`; the log has a "
    "record that begins with `stall:`",
    ExitCode.PARTIAL: "`validate`, `bench`: stopped by Ctrl-C or SIGTERM; the report holds what was measured, and the "
    "same command measures the rest",
}


class InputError(Exception):
    """What the user gave cannot work. The message says in one line what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
