"""Whether a process ends."""

from __future__ import annotations

import time

import psutil


def gone(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False
