"""Processes that a run starts, each in a session of its own, so that Ctrl-C reaches the run alone; none outlives it.

A child's own children end with it, unless they begin a session themselves and its end hides whose they were. A run that
is killed outright takes its children along too: Linux signals them when the thread that started them ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from serve.errors import InputError
from serve.keys import KEY_VARIABLES
from serve.validate.stopping import POLL_SECONDS, go_on

logger = logging.getLogger("dspark-serve")

_ERROR = re.compile(r"(dspark-serve: |ERROR |[\w.]*(Error|Exception)\b)")
"""How a line begins that says what is wrong: ours, the loggers', or the last one of a traceback."""

GRACE_SECONDS = 60.0
"""What a child gets to end in; a server without requests takes about ten."""

KILLED_SECONDS = 10.0
"""What one that was killed gets; only a driver that hangs keeps it longer."""

# prctl(PR_SET_PDEATHSIG, SIGTERM), prctl(2), holds over the execv, and says nothing of a parent that is gone already.
# In an interpreter of its own: Python code between fork and exec is unsafe once there are threads.
_BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


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
def child(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A running child; when the block ends, however it ends, the child and all its children have ended.

    Args:
        command: What to run.
        log: Gets its output, appended.
        environment: All of its environment.

    Raises:
        StoppedError: the run was told to stop, before the block or in it: what it raised is no finding then.
    """
    go_on()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _BOUND, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    try:
        yield process
    finally:
        _end(process)
        go_on()


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """What a child ended with, once it has.

    Raises:
        StoppedError: the run was told to stop before.
    """
    while (code := process.poll()) is None:
        go_on()
        time.sleep(POLL_SECONDS)
    return code


def complaint(log: Path) -> str:
    """The last line of a log that names an error, else the last one: libraries go on talking while they end."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return next(reversed(errors or lines), "it said nothing")


def _end(process: subprocess.Popen[bytes]) -> None:
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    # Those whose parent ended before them are nobody's children, but still of its session's group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILLED_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("process %d was killed and has not ended after %.0f s", process.pid, KILLED_SECONDS)
    psutil.wait_procs(family, KILLED_SECONDS)
