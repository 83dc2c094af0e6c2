"""Whether processes ended. A zombie has: its number only waits for the parent to ask."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def left(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def gone(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False
