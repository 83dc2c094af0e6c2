"""How many drafts of a batch to verify: pure arithmetic over arrays, no torch, no vLLM.

The rule is DSpark's (confidence-scheduled verification) as upstream implements it in
`AdaptiveVerificationManager.get_num_tokens`: verify the number of drafts that maximises expected tokens per
millisecond, taking drafts in order of their survival probability.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class CostTables(NamedTuple):
    """Milliseconds of a step, by size."""

    draft_ms: NDArray[np.float64]
    """[max requests + 1] cost of drafting for that many requests."""
    verify_ms: NDArray[np.float64]
    """[max batch tokens + 1] cost of a target step over that many tokens."""


def survival_probabilities(confidences: NDArray[np.floating]) -> NDArray[np.float64]:
    """Probability that each draft and all before it are accepted.

    Args:
        confidences: [requests, steps] probability that a draft is accepted, given that those before it were.

    Returns:
        [requests, steps], never rising along a request. Broken confidences count as `patches.ranking` counts them: NaN
        as 0, others as the nearer bound.
    """
    # `fmax` prefers the number to NaN.
    sane = np.fmin(np.fmax(confidences, 0.0), 1.0)
    survival: NDArray[np.float64] = sane.cumprod(axis=1, dtype=np.float64)
    return survival


def full_budget(eligible: NDArray[np.integer], max_budget: int | None) -> int:
    """Every draft that may be verified, as far as the bound allows: the budget of fixed verification.

    Args:
        eligible: [requests] drafts of each request that may be verified.
        max_budget: Upper bound, for example what the rejection sampler can take in one chunk; None for none.
    """
    drafts = int(eligible.sum())
    return drafts if max_budget is None else min(drafts, max(0, max_budget))


def choose_budget(
    survival: NDArray[np.float64],
    eligible: NDArray[np.integer],
    *,
    sampling_requests: int,
    other_tokens: int,
    max_budget: int,
    full_is_allowed: bool = False,
    costs: CostTables,
) -> int:
    """The number of drafts whose verification maximises expected tokens per millisecond.

    Every sampling request yields one token whatever is verified; a draft adds its survival probability. Drafts
    are taken best first, so the k-th budget adds the k best survivals.

    Args:
        survival: [requests, steps] survival probabilities.
        eligible: [requests] drafts of each request that may be verified; the others are ignored.
        sampling_requests: Requests that sample a token in this step.
        other_tokens: Tokens of the batch that are not drafts.
        max_budget: Upper bound, for example what the rejection sampler can take in one chunk.
        full_is_allowed: Whether every draft may be verified whatever the bound (`patches.full_budgets`).
        costs: Cost tables that reach as many tokens as the largest budget makes.

    Returns:
        A budget from 0 to `full_budget`, or every draft. The smallest one among equals.
    """
    requests, steps = survival.shape
    scores = survival[np.arange(steps) < eligible[:, None]]
    scores[::-1].sort()  # best first
    every_draft = scores.size
    bound = full_budget(eligible, max_budget)
    largest = every_draft if full_is_allowed else bound
    expected_tokens = np.empty(largest + 1)
    expected_tokens[0] = 0.0
    np.cumsum(scores[:largest], out=expected_tokens[1:])
    expected_tokens += sampling_requests
    milliseconds = costs.verify_ms[other_tokens : other_tokens + largest + 1] + costs.draft_ms[requests]
    assert milliseconds.size == largest + 1, "a slice of too short a table is silently shorter"
    rates = expected_tokens / milliseconds
    best = int(rates[: bound + 1].argmax())
    # Between the bound and every draft no budget is allowed.
    if largest > bound and rates[largest] > rates[best]:
        best = largest
    return best
