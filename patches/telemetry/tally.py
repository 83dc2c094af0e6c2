"""What one verification step adds to the counters: pure arithmetic over arrays, no torch, no vLLM.

A draft has a position 0 to K - 1 in its request's block. It *survives* where it and every draft before it are
accepted, so accepted drafts are a prefix, as verified ones are. Its confidence is the probability that it is accepted
given that those before it were; whether that came true is known only where those before it were accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from patches.budget import survival_probabilities

BINS = 10
"""Bins of the reliability diagram, of equal width over [0, 1]."""

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Reliability:
    """What was predicted of the drafts of one step.

    Attributes:
        expected: [K] sum of the survival probabilities of the verified drafts, by position.
        predictions: [BINS] drafts whose outcome given those before them is known, by confidence.
        accepted: [BINS] those of them that were accepted.
    """

    expected: NDArray[np.float64]
    predictions: Counts
    accepted: Counts


@dataclass(frozen=True)
class StepCounts:
    """One verification step.

    Attributes:
        plan: One of `patches.telemetry.counters.PLANS`.
        proposed: [K] drafts really drafted and scheduled, by position.
        verified: [K] drafts that were verified, by position.
        accepted: [K] drafts accepted, by position.
        acceptance_lengths: [K + 2] requests by accepted drafts and the bonus token.
        verified_lengths: [K + 2] requests by verified drafts and the bonus token.
        reliability: None where nothing predicted acceptance.
    """

    plan: str
    proposed: Counts
    verified: Counts
    accepted: Counts
    acceptance_lengths: Counts
    verified_lengths: Counts
    reliability: Reliability | None = None


def count_step(
    plan: str,
    *,
    max_drafts: int,
    proposed: NDArray[np.integer],
    verified: NDArray[np.integer],
    accepted: NDArray[np.integer],
    confidences: NDArray[np.floating] | None = None,
) -> StepCounts:
    """Count one step.

    Args:
        plan: One of `patches.telemetry.counters.PLANS`.
        max_drafts: K, the drafts a request can have in a step.
        proposed: [requests with drafts] drafts really drafted, 1 to K.
        verified: [requests with drafts] the drafts of those that were verified.
        accepted: [requests with drafts] the drafts of those that were accepted.
        confidences: [requests with drafts, K] what the step ranked by, or None.
    """
    by_proposed, by_verified, by_accepted = (
        np.bincount(counts, minlength=max_drafts + 1) for counts in (proposed, verified, accepted)
    )
    return StepCounts(
        plan=plan,
        proposed=_by_position(by_proposed),
        verified=_by_position(by_verified),
        accepted=_by_position(by_accepted),
        acceptance_lengths=_with_bonus(by_accepted),
        verified_lengths=_with_bonus(by_verified),
        reliability=None if confidences is None else _judge(confidences, verified, accepted),
    )


def _judge(
    confidences: NDArray[np.floating], verified: NDArray[np.integer], accepted: NDArray[np.integer]
) -> Reliability:
    probabilities = np.fmax(confidences, 0)  # 0 for a NaN, which would stay in the sums for ever
    positions = np.arange(probabilities.shape[1])
    was_verified = positions < verified[:, None]
    was_accepted = positions < accepted[:, None]
    told = was_verified & (positions <= accepted[:, None])
    bins = np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)
    refuted, confirmed = np.bincount((bins + BINS * was_accepted)[told], minlength=2 * BINS).reshape(2, BINS)
    return Reliability(
        expected=np.where(was_verified, survival_probabilities(probabilities), 0.0).sum(axis=0),
        predictions=refuted + confirmed,
        accepted=confirmed,
    )


def _by_position(requests_by_count: Counts) -> Counts:
    """[K + 1] requests by how many drafts they have -> [K] requests that have a draft at each position."""
    return requests_by_count[::-1].cumsum()[::-1][1:]


def _with_bonus(requests_by_count: Counts) -> Counts:
    return np.concatenate(([0], requests_by_count))
