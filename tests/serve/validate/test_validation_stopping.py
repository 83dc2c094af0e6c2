"""A stop takes effect once, wherever it falls, and leaves nothing half done."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from serve.validate import children, stopping
from serve.validate.children import child
from serve.validate.stopping import held_back, stoppable, unstoppable

PLACES = (children.__file__, stopping.__file__, contextlib.__file__)


@contextlib.contextmanager
def stop_at(number: int) -> Iterator[list[str]]:
    """Get SIGTERM at the so-many-th place in the code of `PLACES`; yields the places until then.

    CPython looks for signals where a function begins and where a call of C code returns: there a profiler is asked too.
    """
    places: list[str] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code.co_filename not in PLACES or event not in ("call", "c_return") or len(places) >= number:
            return
        function = frame.f_code.co_name
        if function == "stop_at":  # its own end
            return
        called = f" after {arg.__name__}" if event == "c_return" else ""
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {function}{called}")
        if len(places) == number:
            signal.raise_signal(signal.SIGTERM)

    sys.setprofile(profile)
    try:
        yield places
    finally:
        sys.setprofile(None)


def test_a_stop_leaves_no_child_behind_wherever_it_falls(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    stopped = []
    for number in range(1, 1000):
        came = False
        with stoppable():
            try:
                with stop_at(number) as places, child(["/bin/sleep", "600"], tmp_path / "log", os.environ):
                    pass
            except KeyboardInterrupt:
                came = True
        left = set(psutil.Process().children()) - before
        assert not left, places[-6:]
        if len(places) < number:
            break
        stopped.append((places[-1], came))
    assert not came  # the last one had no stop, and all places before it had
    assert {place.split()[1] for place, _ in stopped} >= {"child", "_end", "held_back"}
    # Whoever was told to stop, stops.
    assert [place for place, came in stopped if not came] == []


def test_a_stop_is_held_back_once_and_in_order() -> None:
    done = []

    def act() -> None:
        with held_back():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
        done.append("more")

    with stoppable(), pytest.raises(KeyboardInterrupt):
        act()
    assert done == ["whole"]


def test_a_stop_is_ignored_where_nothing_is_left_to_stop() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with stoppable(), unstoppable():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
