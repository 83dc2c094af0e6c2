"""The line that a busy server logs: what was verified since the last one, from the workers' counter files.

The same numbers from the same source as `/metrics` and `/dspark/status`. A server at rest says nothing.
"""

from __future__ import annotations

from patches.telemetry.counters import PLANS
from serve.totals import Totals


def activity_line(before: Totals, after: Totals) -> str | None:
    """What happened between two moments, or None where nothing was verified, or the counters began anew."""
    steps = {plan: after.steps[plan] - before.steps[plan] for plan in PLANS}
    taken, requests, seconds = sum(steps.values()), after.requests - before.requests, after.at - before.at
    if taken <= 0 or requests <= 0 or seconds <= 0:
        return None
    accepted = after.accepted - before.accepted
    rates = ", ".join(
        f"{name} {(end - start) / seconds:.1f}"
        for name, start, end in (
            ("proposed", before.proposed, after.proposed),
            ("verified", before.verified, after.verified),
            ("accepted", before.accepted, after.accepted),
        )
    )
    parts = [f"drafts per second: {rates}", f"mean acceptance length {1 + accepted / requests:.2f}"]
    if after.expected is not None and before.expected is not None:
        parts.append(f"accepted {accepted} where {after.expected - before.expected:.1f} were expected")
    parts.append("steps: " + ", ".join(f"{plan} {count}" for plan, count in steps.items() if count))
    return "; ".join(parts)
