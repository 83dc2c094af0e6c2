"""Temperatures that follow what verification accepts: NumPy only.

What decides is a draft's *survival*, the product of the confidences up to it, so it is the product that is calibrated:
position by position from the left, each temperature against whether its draft survived, with those before it as they
are (sequential temperature scaling of the DSpark paper). Admission depends on what was predicted and never on the
outcome, so the drafts that were not verified leave no bias.

The fit is online Newton descent on the negative log-likelihood with exponential forgetting, in the logarithm of the
temperature. It is slow and bounded, since it acts on what it learns from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

COLDEST, HOTTEST = 0.25, 4.0
"""Bounds of a temperature."""
MAX_CHANGE = 0.05
"""Largest change of a temperature's logarithm in a second: about 5 %."""
WINDOW_ROWS, WINDOW_SECONDS = 2048, 30.0
"""The memory reaches back so many requests and steps, or so long, whichever is longer."""
LEAST_INFORMATION = 20.0
"""Fisher information that a temperature starts with and never falls below: what tells little moves little."""
EPSILON = 1e-6
"""Confidences are kept this far from 0 and 1, where log-odds are infinite."""

Floats = NDArray[np.float64]


class TemperatureFit:
    """Temperatures [K] that follow what is observed. No torch, no clock."""

    def __init__(self, steps: int) -> None:
        self._logarithms = np.zeros(steps)
        self._information = np.full(steps, LEAST_INFORMATION)

    @property
    def temperatures(self) -> Floats:
        """[K] what to divide log-odds by."""
        return np.exp(self._logarithms)

    def observe(
        self, log_odds: Floats, verified: NDArray[np.integer], accepted: NDArray[np.integer], seconds: float
    ) -> None:
        """Learn from some steps.

        Args:
            log_odds: [requests, K] the head's own, before any temperature.
            verified: [requests] drafts verified.
            accepted: [requests] drafts accepted.
            seconds: Since it last learnt.
        """
        gradient, information = _derivatives(log_odds, self._logarithms, verified, accepted)
        kept = max(np.exp(-len(verified) / WINDOW_ROWS), np.exp(-seconds / WINDOW_SECONDS))
        self._information = np.maximum(kept * self._information + information, LEAST_INFORMATION)
        # An idle minute is no licence for a leap.
        limit = MAX_CHANGE * min(seconds, 1.0)
        change = np.clip(-gradient / self._information, -limit, limit)
        self._logarithms = np.clip(self._logarithms + change, np.log(COLDEST), np.log(HOTTEST))


def _derivatives(
    log_odds: Floats, logarithms: Floats, verified: NDArray[np.integer], accepted: NDArray[np.integer]
) -> tuple[Floats, Floats]:
    """[K] gradient and Fisher information of the negative log-likelihood of survival, by log-temperature.

    With z = log-odds / temperature and c its sigmoid, position k survives with p = c_1 ... c_k. Moving its own
    temperature moves p by dp = -p (1 - c) z.
    """
    scaled = log_odds / np.exp(logarithms)
    confidence = 1 / (1 + np.exp(-scaled))
    survival = np.clip(np.cumprod(confidence, axis=1), EPSILON, 1 - EPSILON)
    positions = np.arange(log_odds.shape[1])
    survived = positions < accepted[:, None]
    moved = -survival * (1 - confidence) * scaled
    weight = np.where(positions < verified[:, None], moved / (survival * (1 - survival)), 0.0)
    return (weight * (survival - survived)).sum(axis=0), (weight * moved).sum(axis=0)


def log_odds_of(confidences: NDArray[np.floating]) -> Floats:
    """Log-odds of probabilities, finite everywhere; those of a NaN are 0."""
    probabilities = np.clip(np.nan_to_num(confidences.astype(np.float64), nan=0.5), EPSILON, 1 - EPSILON)
    return np.asarray(np.log(probabilities) - np.log1p(-probabilities))
