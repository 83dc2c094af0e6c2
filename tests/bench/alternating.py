"""Times of calls that take turns, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np


def microseconds(
    calls: dict[str, Callable[[], object]], repeats: int, synchronize: Callable[[], object]
) -> dict[str, dict[str, float]]:
    """Median time of each call until the device is done, and until the host may go on.

    Args:
        calls: By name.
        repeats: Timed calls of each, after a tenth as many that only warm up.
        synchronize: Returns once the device is done.
    """
    for call in calls.values():
        for _ in range(repeats // 10 + 1):
            call()
    synchronize()
    wall: dict[str, list[float]] = {name: [] for name in calls}
    enqueue: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            enqueue[name].append(time.perf_counter() - started)
            synchronize()
            wall[name].append(time.perf_counter() - started)
    return {
        name: {
            "wall_us": round(1e6 * float(np.median(wall[name])), 1),
            "enqueue_us": round(1e6 * float(np.median(enqueue[name])), 1),
        }
        for name in calls
    }
