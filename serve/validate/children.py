"""Processes that a run starts: each in a session of its own, so that Ctrl-C reaches the run alone. None outlives it.

A run that is killed outright takes its children along too: Linux signals them when the thread that started them ends.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from serve.errors import InputError
from serve.keys import KEY_VARIABLES
from serve.validate.stopping import held_back

_ERROR = re.compile(r"(dspark-serve: |ERROR |[\w.]*(Error|Exception)\b)")
"""How a line begins that says what is wrong: ours, the loggers', or the last one of a traceback."""

GRACE_SECONDS = 60.0
"""What a child gets to end in; a server without requests takes about ten."""

# prctl(PR_SET_PDEATHSIG, SIGTERM), prctl(2), holds over the execv. In an interpreter of its own: Python code between
# fork and exec is unsafe once there are threads.
_BOUND = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


def program(name: str) -> str:
    """The path of a console script of this environment.

    Raises:
        InputError: it is not installed.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise InputError(f"{name} is not installed here: pip install '.[validate]' in dspark-serve's source folder")
    return found


def tool_environment(environment: Mapping[str, str], key: str | None) -> dict[str, str]:
    """The environment of the tools that ask servers: the key under the name that they read, and no plugin of vLLM's.

    A key of the user's own in that name is another server's: it is never sent.
    """
    kept = {name: value for name, value in environment.items() if name not in KEY_VARIABLES}
    # lm_eval wants one also where the server asks for none.
    return {**kept, "VLLM_PLUGINS": "", "OPENAI_API_KEY": key or "none"}


@contextlib.contextmanager
def child(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[psutil.Popen]:
    """A running child; when the block ends, however it ends, the child and all its children have ended.

    Args:
        command: What to run.
        log: Gets its output, appended.
        environment: All of its environment.
    """
    process: psutil.Popen | None = None
    try:
        # A child that has begun and is not known yet would be left behind.
        with log.open("ab") as output, held_back():
            process = psutil.Popen(
                [sys.executable, "-S", "-c", _BOUND, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        yield process
    finally:
        if process is not None:
            try:
                _end(process)
            except KeyboardInterrupt:  # before it could hold it back, or afterwards
                _end(process)
                raise


def complaint(log: Path) -> str:
    """The last line of a log that names an error, else the last one: libraries go on talking while they end."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return next(reversed(errors or lines), "it said nothing")


def _end(process: psutil.Popen) -> None:
    with held_back(), contextlib.suppress(psutil.NoSuchProcess):
        # psutil's wait, unlike Popen's, has no lock that a stop, breaking off an earlier wait, can have left held.
        family = [*process.children(recursive=True), process]
        process.terminate()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
