"""Follows each verification step of one worker from its preparation to its counts.

- `prepared`: the batch is fixed. What was really drafted and how much of it the budget admits is known on the host;
  the confidences that the ranking goes by are put aside on the device, before the drafter's next ones replace them.
- `sampled`: the tokens are on their way to the host (`AsyncOutput`), and what only the device knows goes with them: the
  confidences and, where the budget binds, the drafts that were refused. The output's own event covers both copies.
- `finished`: the tokens are on the host, and the step is counted.

The record of a step travels on its output, so that steps in flight do not mix. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream

from patches.admission import eligible_drafts
from patches.calibration.stage import Calibration
from patches.modes import Mode
from patches.telemetry import trace
from patches.telemetry.counters import CounterWriter
from patches.telemetry.tally import count_step
from patches.telemetry.timing import StepTimer, StepTimes

logger = logging.getLogger("vllm.dspark")


@dataclass
class Step:
    """A verification step whose outcome is not known yet.

    Attributes:
        plan: One of `patches.telemetry.counters.PLANS`.
        rows: Rows of the batch that have drafts.
        proposed: [rows] drafts really drafted.
        budget: Drafts to verify, of all rows.
        live_confidences: [requests, K] what the ranking goes by, on the device; None where nothing predicts.
        calibration: The stage that learns from the step, if there is one.
        temperatures: [K] what it has divided the confidences' log-odds by; None without one.
        times: The step's marks, where it is timed.
        confidences: The same on the host, once the output's event has passed.
        rejected: [requests] drafts verified and refused, likewise; None where the budget tells what was verified.
    """

    plan: str
    rows: NDArray[np.intp]
    proposed: NDArray[np.int32]
    budget: int
    live_confidences: torch.Tensor | None = None
    calibration: Calibration | None = None
    temperatures: NDArray[np.float64] | None = None
    times: StepTimes | None = None
    confidences: NDArray[np.float32] | None = None
    rejected: NDArray[np.int32] | None = None

    @property
    def trimmed(self) -> bool:
        """Whether only the device knows which drafts are verified; a fixed step's may exceed what the sampler takes."""
        return 0 < self.budget < int(self.proposed.sum())


def step_plan(mode: Mode, *, proposed: int, budget: int) -> str:
    """The `plan` label of a step."""
    if mode is Mode.FIXED:
        return "fixed"
    if budget == proposed:
        return "full"
    return "trimmed" if budget else "none"


class StepRecorder:
    """The telemetry of one worker. A fault ends it, never the engine."""

    def __init__(self, writer: CounterWriter, device: torch.device) -> None:
        self.timer = StepTimer(device)
        self._writer: CounterWriter | None = writer
        self._pending: Step | None = None
        self._timed: StepTimes | None = None
        self._reported: NDArray[np.float64] | None = None

    def prepared(self, runner: Any, batch: Any) -> None:
        """Note the step that `runner` has just prepared, if drafts are verified in it."""
        with self._ending_on_fault():
            self._pending = _describe(runner, batch) if self._writer is not None else None
            if self._pending is not None:
                self.timer.begin(_predicted_seconds(runner.adaptive_verification, batch))

    def take(self) -> Step | None:
        """The step in preparation, which is sampled now."""
        step, self._pending = self._pending, None
        return step

    def sampled(self, step: Step, runner: Any, output: Any) -> None:
        """Send what only the device knows of the step to the host, behind the output's own copies."""
        with self._ending_on_fault():
            step.times = self.timer.take()
            if step.live_confidences is None and not step.trimmed:
                return
            # The copy stream already waits for the sampler, and so for everything copied here.
            with stream(runner.output_copy_stream, runner.main_stream):
                if step.live_confidences is not None:
                    step.confidences = async_copy_to_np(step.live_confidences)
                if step.trimmed:
                    step.rejected = async_copy_to_np(output.sampler_output.num_rejected)
                output.copy_event.record(runner.output_copy_stream)

    def finished(self, step: Step, output: Any) -> None:
        """Count the step: its output is on the host."""
        with self._ending_on_fault():
            if self._writer is None:
                return
            accepted = output.num_sampled_tokens_np[step.rows] - 1
            verified = _verified(step, accepted)
            confidences = None if step.confidences is None else step.confidences[step.rows]
            self._writer.add_step(
                count_step(
                    step.plan,
                    max_drafts=self._writer.max_drafts,
                    proposed=step.proposed,
                    verified=verified,
                    accepted=accepted,
                    confidences=confidences,
                )
            )
            self._count_times(step.times)
            if step.calibration is not None and confidences is not None and step.temperatures is not None:
                step.calibration.observe(confidences, step.temperatures, verified, accepted, time.monotonic())
                self._report(step.calibration.temperatures)
            if trace.enabled():
                request_ids = output.model_runner_output.req_ids
                trace.record_verification(
                    [request_ids[row] for row in step.rows],
                    plan=step.plan,
                    proposed=int(step.proposed.sum()),
                    verified=int(verified.sum()),
                    accepted=accepted.tolist(),
                )

    def _count_times(self, times: StepTimes | None) -> None:
        """Count the timed step before this one: its drafter is done for certain, this one's may still run."""
        if times is None:
            return
        before, self._timed = self._timed, times
        seconds = before.seconds() if before is not None else None
        if before is not None and seconds is not None and self._writer is not None:
            self._writer.add_times(seconds, before.predicted_seconds)

    def _report(self, temperatures: NDArray[np.float64]) -> None:
        if temperatures is not self._reported and self._writer is not None:
            self._reported = temperatures
            self._writer.set_temperatures(temperatures)

    @contextlib.contextmanager
    def _ending_on_fault(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            logger.exception("dspark telemetry is off after a fault")
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.withdraw()


def _describe(runner: Any, batch: Any) -> Step | None:
    """The step's record, or None where no drafts are verified."""
    scheduled_drafts = batch.num_draft_tokens_per_req
    if scheduled_drafts is None:
        return None
    eligible = eligible_drafts(
        scheduled_drafts, batch.num_scheduled_tokens, batch.num_computed_tokens_np, batch.prefill_len_np
    )
    proposed = int(eligible.sum())
    if proposed == 0:
        return None
    rows = np.flatnonzero(eligible)
    manager = runner.adaptive_verification
    if manager is None:
        return Step(plan="fixed", rows=rows, proposed=eligible[rows], budget=proposed)
    budget, calibration = manager.plan.budget, manager.calibration
    return Step(
        plan=step_plan(manager.plan.mode, proposed=proposed, budget=budget),
        rows=rows,
        proposed=eligible[rows],
        budget=budget,
        live_confidences=manager.live_confidences(batch.idx_mapping),
        calibration=calibration,
        temperatures=None if calibration is None else calibration.applied,
    )


def _predicted_seconds(manager: Any, batch: Any) -> float | None:
    if manager is None:
        return None
    draft_ms, verify_ms = manager.cost_tables
    return float(draft_ms[batch.num_reqs] + verify_ms[batch.num_tokens]) / 1000


def _verified(step: Step, accepted: NDArray[np.integer]) -> NDArray[np.integer]:
    """[rows] drafts that were verified: what the sampler accepted and refused, where the budget does not tell."""
    if step.rejected is not None:
        return accepted + step.rejected[step.rows]
    return step.proposed if step.budget else np.zeros_like(step.proposed)
