"""The line that a busy server logs."""

from pathlib import Path

import numpy as np

from patches.telemetry.counters import CounterWriter, read_all
from patches.telemetry.tally import count_step
from serve.activity import activity_line
from serve.totals import totals


def add(writer: CounterWriter, plan: str, *, confidence: float | None = None) -> None:
    """Two requests with three drafts each: five verified, three accepted."""
    writer.add_step(
        count_step(
            plan,
            max_drafts=3,
            proposed=np.array([3, 3]),
            verified=np.array([3, 2]),
            accepted=np.array([2, 1]),
            confidences=None if confidence is None else np.full((2, 3), confidence),
        )
    )


def test_a_busy_interval_is_told_with_every_engine_in_it(tmp_path: Path) -> None:
    engines = [CounterWriter(tmp_path, engine, 3, predicts=True) for engine in (0, 1)]
    add(engines[0], "full", confidence=0.5)
    before = totals(read_all(tmp_path), at=100.0)
    add(engines[0], "trimmed", confidence=0.5)
    add(engines[1], "trimmed", confidence=0.5)
    add(engines[1], "none", confidence=0.5)
    line = activity_line(before, totals(read_all(tmp_path), at=110.0))
    # Each adds survival .5 + .25 + .125 and .5 + .25.
    assert line == (
        "drafts per second: proposed 1.8, verified 1.5, accepted 0.9; mean acceptance length 2.50; "
        "accepted 9 where 4.9 were expected; steps: trimmed 2, none 1"
    )


def test_fixed_verification_expects_nothing(tmp_path: Path) -> None:
    writer = CounterWriter(tmp_path, 0, 3)
    before = totals(read_all(tmp_path), at=0.0)
    add(writer, "fixed")
    line = activity_line(before, totals(read_all(tmp_path), at=10.0))
    assert line is not None
    assert "expected" not in line
    assert line.endswith("; steps: fixed 1")


def test_rest_is_silent(tmp_path: Path) -> None:
    empty = totals(read_all(tmp_path), at=0.0)
    assert activity_line(empty, totals(read_all(tmp_path), at=10.0)) is None
    add(CounterWriter(tmp_path, 0, 3), "fixed")
    busy = totals(read_all(tmp_path), at=20.0)
    assert activity_line(busy, totals(read_all(tmp_path), at=30.0)) is None


def test_counters_that_began_anew_are_no_activity(tmp_path: Path) -> None:
    writer = CounterWriter(tmp_path, 0, 3)
    add(writer, "fixed")
    add(writer, "fixed")
    before = totals(read_all(tmp_path), at=0.0)
    add(CounterWriter(tmp_path, 0, 3), "fixed")
    assert activity_line(before, totals(read_all(tmp_path), at=10.0)) is None
