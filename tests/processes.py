"""Whether processes ended. A zombie has: its number only waits for the parent to ask."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def left(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    return [process for process in processes if process.is_running() and _is_no_zombie(process)]


def gone(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return True
    for _ in range(200):
        if not left([process]):
            return True
        time.sleep(0.05)
    return False


def _is_no_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
