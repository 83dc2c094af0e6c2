"""Ctrl-C and SIGTERM end a run in order: what is measured is given up, its children end, the report is written.

A stop is a KeyboardInterrupt, which may fall anywhere, also where a `finally` begins. What has to be done there whole
is done again when a stop broke it off; that takes a `try` on the spot, since a function's own may not have begun.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)

_Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C or SIGTERM; later ones are ignored until the block ends."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        for each in STOPS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _handled(stop):
        yield


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect when the block ends: nothing in it is broken off."""
    came: list[int] = []
    with _handled(lambda number, _frame: came.append(number)):
        yield
    if came:
        signal.raise_signal(came[0])


@contextlib.contextmanager
def unstoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM are ignored until the block ends."""
    with _handled(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handled(handler: _Handler | signal.Handlers) -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in STOPS}
    try:
        for each in STOPS:
            signal.signal(each, handler)
        yield
    finally:
        for each in STOPS:
            signal.signal(each, before[each])
