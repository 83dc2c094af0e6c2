"""Ctrl-C and SIGTERM end a run in order: what is measured is given up, its children end, the report is written.

A stop is noted and nothing else: an exception out of a signal handler may fall between any two steps, also where a
child has begun and nobody knows it yet. The run looks for the note wherever it waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.1
"""How often what waits looks for a stop."""

_SAID = b"\ndspark-serve: stopping; the report follows\n"

_noted: list[int] = []
"""Signals since the run began."""


class StoppedError(Exception):
    """The run was told to stop."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Note Ctrl-C and SIGTERM until the block ends; of the main thread."""

    def note(number: int, _frame: FrameType | None) -> None:
        if not _noted:
            os.write(2, _SAID)  # what print does is not safe in a handler
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


def unless_stopped(act: Callable[[], T]) -> T:
    """What `act` returns or raises; told to stop, it is left to itself, in a thread that nobody waits for.

    Raises:
        StoppedError: the run was told to stop.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while wait([outcome], POLL_SECONDS).not_done:
        go_on()
    return outcome.result()
