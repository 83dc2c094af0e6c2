"""Every process of the engine writes its Python stacks to a file when it is asked by a signal.

A process that hangs answers no call, and reading it from outside takes privileges that containers do not have. So every
process that loads the plugin opens a file of its own beforehand and lets `faulthandler` write to it: from a C signal
handler, which needs neither the interpreter's lock nor memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from patches.telemetry.counters import DIRECTORY_VARIABLE

SIGNAL = signal.SIGUSR2
"""vLLM, torch and Ray leave it alone; without our handler it would end a process."""


def answer_with_stacks() -> None:
    """Register the signal in this process. Without a usable directory there are no stacks, and nothing else is lost."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    with contextlib.suppress(OSError):
        file = os.open(stacks_file(Path(directory), os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # The file stays open for as long as the process lives.
        faulthandler.register(SIGNAL, file, all_threads=True, chain=False)


def stacks_file(directory: Path, pid: int) -> Path:
    """Where a process writes its stacks."""
    return directory / f"{pid}.stacks"


def ask_for_stacks(directory: Path, pids: Collection[int]) -> None:
    """Ask processes for their stacks. A process without a file is left alone: the signal would end it."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.truncate(stacks_file(directory, pid), 0)
            os.kill(pid, SIGNAL)


def read_stacks(directory: Path, pids: Collection[int], seconds: float) -> dict[int, str]:
    """What processes wrote since they were asked. Blocks until all have, or for some seconds.

    Returns:
        Process id -> its stacks; empty for one that did not answer, as a stopped process does not.
    """
    deadline = time.monotonic() + seconds
    found: dict[int, str] = {}
    while True:
        before, found = found, {pid: _content(stacks_file(directory, pid)) for pid in pids}
        # Two equal looks: a process writes its threads one after the other.
        if (all(found.values()) and found == before) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _content(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
