"""How numbers and names read in a report, the same in every section."""

from __future__ import annotations

from collections.abc import Iterable

from serve.validate.findings import ScoreDifference, TaskScore
from serve.validate.markdown import table
from serve.validate.references import percent
from serve.validate.results import Arm
from serve.validate.statistics import CONFIDENCE, STANDARD_ERRORS, Agreement, Ratio, Spread

NONE = "—"
PERCENT = f"{100 * CONFIDENCE:g} %"
"""Of every interval."""

FAILED = "†"
"""Marks what has failed requests behind it."""

ARMS = {Arm.OFF: "no speculation", Arm.FIXED: "fixed verification", Arm.ADAPTIVE: "adaptive verification"}

WITHIN = {
    Agreement.ALIKE: "yes",
    Agreement.HIGHER: "no: higher",
    Agreement.LOWER: "no: lower",
    Agreement.UNKNOWN: "cannot tell",
}

SCORE_HEAD = ["task", "metric", "arm", "score", "standard error", "questions", "acceptance length"]


def signed(ratio: float) -> str:
    """A ratio as a signed percentage; as a factor where a percentage would be unreadable."""
    return f"{percent(ratio):+.1f} %" if ratio < 100 else f"x{ratio:.2e}"


def interval(ratio: Ratio | None) -> str:
    """The interval alone, or that there is none."""
    if ratio is None:
        return NONE
    if ratio.low is None or ratio.high is None:
        return "none with one round"
    return f"{signed(ratio.low)} to {signed(ratio.high)}"


def spread_text(found: Spread | None, digits: int) -> str:
    """A value with its range, where it has one."""
    if found is None:
        return NONE
    value, low, high = (f"{each:,.{digits}f}" for each in (found.value, found.low, found.high))
    return value if low == high else f"{value} ({low} to {high})"


def share(value: float | None) -> str:
    """A share in percent."""
    return NONE if value is None else f"{100 * value:.1f} %"


def score_row(score: TaskScore) -> list[str]:
    """One score under `SCORE_HEAD`."""
    return [
        score.task,
        score.metric,
        score.arm,
        f"{score.value:.4f}",
        NONE if score.standard_error is None else f"{score.standard_error:.4f}",
        f"{score.samples:,}",
        NONE if score.acceptance_length is None else f"{score.acceptance_length:.3f}",
    ]


def score_difference_table(differences: Iterable[ScoreDifference]) -> list[str]:
    """Score less score, in percentage points."""
    rows = []
    for each in differences:
        found = each.difference
        interval = NONE
        if found.low is not None and found.high is not None:
            interval = f"{100 * found.low:+.2f} to {100 * found.high:+.2f}"
        errors = NONE if found.in_standard_errors is None else f"{found.in_standard_errors:.2f}"
        row = [each.task, each.metric, f"{each.arm} less {each.against}", f"{100 * found.value:+.2f}", interval, errors]
        rows.append([*row, WITHIN[found.agreement]])
    within = f"within {STANDARD_ERRORS}"
    return table(["task", "metric", "arms", "points", f"{PERCENT} interval", "standard errors", within], rows)
