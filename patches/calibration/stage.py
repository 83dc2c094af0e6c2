"""The manager's stage: calibrates the confidences that budget and ranking go by, or only watches them.

`shadow` fits and reports, `on` also divides the confidences' log-odds by the temperatures. Only tensor-parallel rank 0
fits, from its own counts. Its calibrated confidences reach the other ranks as `patches.consensus` shares them, so every
rank plans from the same bits; where ranks share nothing, `on` stays `shadow`.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from patches.calibration.fit import EPSILON, Floats, TemperatureFit, log_odds_of
from patches.calibration.mode import CalibrationMode, chosen_mode

logger = logging.getLogger("vllm.dspark")

FIT_SECONDS = 1.0
"""The fit learns this often, and new temperatures take effect then."""
MOST_ROWS = 512
"""Requests and steps that are kept for a fit; what a busy second has beyond them is left out."""


class Calibration:
    """Fits on the thread that counts, applies on the thread that plans.

    Both meet in `temperatures` alone, an array that is replaced and never written to.
    """

    def __init__(self, steps: int, device: torch.device, *, applies: bool) -> None:
        """Begin with temperatures of 1.

        Args:
            steps: K.
            device: Where confidences are.
            applies: Whether confidences are calibrated or only judged.
        """
        self.temperatures: Floats = np.ones(steps)
        self.applied: Floats = self.temperatures
        """[K] what the confidences that are ranked next were divided by."""
        self._applies = applies
        self._fit = TemperatureFit(steps)
        self._fitted_at: float | None = None
        self._waiting: list[tuple[NDArray[Any], ...]] = []
        self._rows = 0
        self._device = device
        self._inverse: torch.Tensor | None = None

    def observe(
        self,
        confidences: NDArray[np.floating],
        applied: Floats,
        verified: NDArray[np.integer],
        accepted: NDArray[np.integer],
        now: float,
    ) -> None:
        """Learn from one counted step.

        Args:
            confidences: [requests, K] what was ranked.
            applied: [K] temperatures that are in them already.
            verified: [requests] drafts verified.
            accepted: [requests] drafts accepted.
            now: Seconds of a steady clock.
        """
        if self._rows < MOST_ROWS:
            self._waiting.append((confidences, np.tile(applied, (len(verified), 1)), verified, accepted))
            self._rows += len(verified)
        if self._fitted_at is None:
            self._fitted_at = now
        if now - self._fitted_at >= FIT_SECONDS:
            self._learn(now - self._fitted_at)
            self._fitted_at = now

    def _learn(self, seconds: float) -> None:
        confidences, applied, verified, accepted = map(np.concatenate, zip(*self._waiting, strict=True))
        self._waiting.clear()
        self._rows = 0
        self._fit.observe(log_odds_of(confidences) * applied, verified, accepted, seconds)
        self.temperatures = self._fit.temperatures

    def calibrated(self, confidences: torch.Tensor) -> torch.Tensor:
        """The confidences to plan from, in stream order and without a wait.

        Args:
            confidences: [requests, K] the head's, on the device. They stay as they are: the head's own estimator, where
                there is one, learns from them.
        """
        if self._applies and self.temperatures is not self.applied:
            self.applied = self.temperatures
            self._inverse = self._on_device((1 / self.applied).astype(np.float32))
        if self._inverse is None:
            return confidences
        return confidences.logit(EPSILON).mul_(self._inverse).sigmoid_()

    def _on_device(self, values: NDArray[np.float32]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type != "cpu":  # from pageable memory the copy would wait for the device
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def begin_calibration(steps: int, device: torch.device, *, reaches_every_rank: bool) -> Calibration | None:
    """The stage as `DSPARK_CALIBRATION` asks for it, or None where it is off.

    Args:
        steps: K.
        device: Where confidences are.
        reaches_every_rank: Whether what this rank plans from, every rank plans from.

    Raises:
        ValueError: the variable names no mode.
    """
    mode = chosen_mode()
    if mode is CalibrationMode.OFF:
        return None
    applies = mode is CalibrationMode.ON
    if applies and not reaches_every_rank:
        logger.warning("dspark calibration is only reported: tensor-parallel ranks do not share their confidences")
    return Calibration(steps, device, applies=applies and reaches_every_rank)
