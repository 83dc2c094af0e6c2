"""Counters of all engines together: what the log line, the last minute and the history are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from patches.telemetry.counters import PLANS, Snapshot


@dataclass(frozen=True)
class Totals:
    """Counters of all engines together, at one moment.

    Attributes:
        at: Seconds of a steady clock.
        requests: Requests-and-steps.
        proposed, verified, accepted: Drafts.
        steps: Plan -> verification steps.
        expected: Predicted survival of the verified drafts; None where nothing predicts.
    """

    at: float
    requests: int
    proposed: int
    verified: int
    accepted: int
    steps: dict[str, int]
    expected: float | None


def totals(snapshots: Iterable[Snapshot], at: float) -> Totals:
    """Add the engines up."""
    engines = list(snapshots)
    predictions = [sum(s.expected) for s in engines if s.expected is not None]
    return Totals(
        at=at,
        requests=sum(sum(s.acceptance_lengths) for s in engines),
        proposed=sum(sum(s.proposed) for s in engines),
        verified=sum(sum(s.verified) for s in engines),
        accepted=sum(sum(s.accepted) for s in engines),
        steps={plan: sum(s.steps[plan] for s in engines) for plan in PLANS},
        expected=sum(predictions) if predictions else None,
    )


def acceptance_length(before: Totals, after: Totals) -> float | None:
    """Mean tokens a request and step between two moments, the bonus token included; None where none was verified."""
    requests = after.requests - before.requests
    return round(1 + (after.accepted - before.accepted) / requests, 4) if requests else None
