"""The ring behind the 15 minutes, and the counts of all engines."""

from pathlib import Path

import numpy as np

from patches.telemetry.counters import CounterWriter, read_all
from patches.telemetry.tally import count_step
from serve.history import EVERY_SECONDS, SPAN_SECONDS, History
from serve.status import verification_counts
from serve.totals import Totals


def at(seconds: float, **counted: int) -> Totals:
    return Totals(at=seconds, steps={}, expected=None, **counted)


def test_a_point_for_every_two_notes_with_its_mode() -> None:
    history = History()
    assert history.as_json(now=0.0) == []
    history.note(at(0.0, requests=0, proposed=0, verified=0, accepted=0), "adaptive")
    history.note(at(15.0, requests=10, proposed=50, verified=40, accepted=14), "adaptive")
    history.note(at(30.0, requests=10, proposed=50, verified=40, accepted=14), "fixed")
    history.note(at(45.5, requests=14, proposed=70, verified=60, accepted=30), None)
    assert history.as_json(now=50.0) == [
        {"seconds_ago": 35.0, "acceptance_length": 2.4, "mode": "adaptive"},
        {"seconds_ago": 20.0, "acceptance_length": None, "mode": "fixed"},
        {"seconds_ago": 4.5, "acceptance_length": 5.0, "mode": None},
    ]


def test_it_holds_fifteen_minutes_and_no_more() -> None:
    history = History()
    for i in range(1000):
        history.note(at(15.0 * i, requests=i, proposed=0, verified=0, accepted=i), "adaptive")
    points = history.as_json(now=15.0 * 999)
    assert len(points) == SPAN_SECONDS / EVERY_SECONDS == 60
    assert points[0]["seconds_ago"] == SPAN_SECONDS - EVERY_SECONDS
    assert points[-1] == {"seconds_ago": 0.0, "acceptance_length": 2.0, "mode": "adaptive"}


def test_positions_and_reliability_of_two_engines(tmp_path: Path) -> None:
    for engine in (0, 1):
        writer = CounterWriter(tmp_path, engine, 2, predicts=True)
        writer.add_step(
            count_step(
                "trimmed" if engine else "fixed",
                max_drafts=2,
                proposed=np.array([2, 2]),
                verified=np.array([2, 1]),
                accepted=np.array([1, 1]),
                confidences=np.array([[0.95, 0.25], [0.55, 0.5]]),
            )
        )
    counts = verification_counts(list(read_all(tmp_path)))
    assert counts["steps"] == {"full": 0, "trimmed": 1, "none": 0, "fixed": 1}
    assert counts["positions"] == [
        {"position": 0, "proposed": 4, "verified": 4, "accepted": 4, "expected": 3.0},
        {"position": 1, "proposed": 4, "verified": 2, "accepted": 0, "expected": 0.475},
    ]
    judged = {row["from"]: (row["predictions"], row["accepted"]) for row in counts["reliability"] if row["predictions"]}
    assert judged == {0.9: (2, 2), 0.2: (2, 0), 0.5: (2, 2)}
    assert [row["to"] for row in counts["reliability"]][-1] == 1.0


def test_where_nothing_predicts_it_is_left_out_and_without_speculation_there_is_nothing(tmp_path: Path) -> None:
    assert verification_counts([]) == {
        "steps": {"full": 0, "trimmed": 0, "none": 0, "fixed": 0},
        "positions": [],
        "reliability": None,
    }
    CounterWriter(tmp_path, 0, 3)
    counts = verification_counts(list(read_all(tmp_path)))
    assert counts["reliability"] is None
    assert [row["expected"] for row in counts["positions"]] == [None] * 3
