"""verification-telemetry: counts each verification step where it is decided.

Upstream's `Scheduler.make_spec_decoding_stats` counts the drafts it scheduled, padding included, and knows neither
the budget nor what the budget left out. The worker knows all of it:

- `GPUModelRunner.prepare_inputs` fixes the step's batch: what was really drafted, and how much the budget admitted;
- `AsyncOutput.get_output` brings the number of sampled tokens to the host, which it does anyway.

The step's record travels from one to the other on the output object, so that steps in flight do not mix. Nothing
here waits for the device, and a failure switches telemetry off, never the engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import wrapt
from numpy.typing import NDArray

from patches.admission import eligible_drafts
from patches.install import Hook
from patches.telemetry import trace
from patches.telemetry.counters import DIRECTORY_VARIABLE, CounterWriter

logger = logging.getLogger("vllm.dspark")

Wrapped = Callable[..., Any]

_STEP = "_dspark_step"
_WRITER = "_dspark_counters"


@dataclass(frozen=True)
class Step:
    """A verification step whose outcome is not known yet."""

    writer: CounterWriter
    plan: str
    proposed: int
    verified: int
    rows: NDArray[np.intp]
    """Rows of the batch that had drafts."""


def step_plan(*, adaptive: bool, proposed: int, verified: int) -> str:
    """The `plan` label of a step."""
    if not adaptive:
        return "fixed"
    if verified == proposed:
        return "full"
    return "trimmed" if verified else "none"


def _open_writer(runner: Any) -> CounterWriter | None:
    """The engine's counters, on tensor-parallel rank 0 of a server that speculates, or None."""
    from vllm.distributed.parallel_state import get_tp_group

    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None or runner.speculator is None or get_tp_group().rank_in_group != 0:
        return None
    engine = runner.vllm_config.parallel_config.data_parallel_index
    if engine == 0:
        trace.start()
    try:
        return CounterWriter(Path(directory), engine, runner.num_speculative_steps)
    except (OSError, ValueError) as error:
        logger.error("dspark telemetry is off: no counters in %s: %s", directory, error)
        return None


def _describe_step(writer: CounterWriter, runner: Any, scheduler_output: Any, batch: Any) -> Step | None:
    """The step's record, or None where no drafts are verified."""
    scheduled_drafts = batch.num_draft_tokens_per_req
    if scheduled_drafts is None:
        return None
    scheduled_tokens = np.fromiter(
        (scheduler_output.num_scheduled_tokens[request_id] for request_id in batch.req_ids), dtype=np.int32
    )
    eligible = eligible_drafts(scheduled_drafts, scheduled_tokens, batch.num_computed_tokens_np, batch.prefill_len_np)
    proposed = int(eligible.sum())
    if proposed == 0:
        return None
    manager = runner.adaptive_verification
    verified = proposed if manager is None else manager.plan.budget
    plan = step_plan(adaptive=manager is not None, proposed=proposed, verified=verified)
    return Step(writer, plan, proposed, verified, np.flatnonzero(eligible))


def _count(step: Step, output: Any) -> None:
    acceptance_lengths = output.num_sampled_tokens_np[step.rows]
    step.writer.add_step(
        plan=step.plan,
        proposed=step.proposed,
        verified=step.verified,
        acceptance_lengths=acceptance_lengths,
    )
    if trace.enabled():
        request_ids = output.model_runner_output.req_ids
        trace.record_verification(
            [request_ids[row] for row in step.rows],
            plan=step.plan,
            proposed=step.proposed,
            verified=step.verified,
            accepted=(acceptance_lengths - 1).tolist(),
        )


def _follow_steps(runner_module: ModuleType) -> None:
    def initialise(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> None:
        """Open the counters when the runner is built, so that the series exist before the first request."""
        wrapped(*args, **kwargs)
        setattr(runner, _WRITER, _open_writer(runner))
        setattr(runner, _STEP, None)

    def prepare(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
        """Describe the step that was just prepared."""
        batch = wrapped(*args, **kwargs)
        writer = getattr(runner, _WRITER)
        if writer is not None:
            try:
                setattr(runner, _STEP, _describe_step(writer, runner, args[0], batch))
            except Exception:
                logger.exception("dspark telemetry is off after a fault")
                setattr(runner, _WRITER, None)
        return batch

    def sample(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
        """Hand the step's record to the output that will know how it ended."""
        step, runner.__dict__[_STEP] = getattr(runner, _STEP), None
        output = wrapped(*args, **kwargs)
        if step is not None and output is not None:
            setattr(output, _STEP, step)
        return output

    wrapt.wrap_function_wrapper(runner_module, "GPUModelRunner.__init__", initialise)
    wrapt.wrap_function_wrapper(runner_module, "GPUModelRunner.prepare_inputs", prepare)
    wrapt.wrap_function_wrapper(runner_module, "GPUModelRunner.sample_tokens", sample)


def _count_outputs(outputs_module: ModuleType) -> None:
    def get_output(wrapped: Callable[[], Any], output: Any, args: Any, kwargs: Any) -> Any:
        """Count the step once its tokens are on the host."""
        result = wrapped(*args, **kwargs)
        step: Step | None = output.__dict__.pop(_STEP, None)
        if step is not None:
            try:
                _count(step, output)
            except Exception:
                logger.exception("dspark telemetry lost a step; its counters stay behind by it")
        return result

    wrapt.wrap_function_wrapper(outputs_module, "AsyncOutput.get_output", get_output)


HOOKS: Mapping[str, Hook] = {
    "vllm.v1.worker.gpu.model_runner": _follow_steps,
    "vllm.v1.worker.gpu.async_utils": _count_outputs,
}
