"""What the draft counts of a cell say a request gets from a step."""

from __future__ import annotations

from serve.validate.results import Drafts


def acceptance_length(drafts: Drafts | None) -> float | None:
    """Tokens a request gets from a verification step, the bonus token included; None without one."""
    return None if drafts is None else quotient(drafts.emitted, drafts.steps)


def verified_width(drafts: Drafts) -> float | None:
    """Tokens of a request that a step verifies, the bonus token included."""
    return quotient(drafts.width, drafts.steps)


def quotient(of: float, to: float) -> float | None:
    """A share; None of nothing."""
    return of / to if to > 0 else None
