"""Ctrl-C and SIGTERM end a run in order: what is measured is given up, its children end, the report is written.

A stop is noted and nothing else: an exception out of a signal handler may fall between any two steps, also where a
child has begun and nobody knows it yet. The run looks for the note wherever it waits.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

POLL_SECONDS = 0.1
"""How often what waits looks for a stop."""

_noted: list[int] = []
"""Signals since the run began."""


class StoppedError(Exception):
    """The run was told to stop."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Note Ctrl-C and SIGTERM until the block ends; of the main thread."""

    def note(number: int, _frame: FrameType | None) -> None:
        _noted.append(number)

    _noted.clear()
    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        _noted.clear()


def go_on() -> None:
    """Look for a stop.

    Raises:
        StoppedError: one was noted.
    """
    if _noted:
        raise StoppedError
