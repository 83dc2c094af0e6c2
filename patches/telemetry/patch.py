"""verification-telemetry: counts each verification step where it is decided.

Upstream's `Scheduler.make_spec_decoding_stats` counts the drafts it scheduled, padding included, and knows neither
the budget nor what the budget left out. The worker knows all of it:

- `GPUModelRunner.prepare_inputs` fixes the step's batch: what was really drafted, and how much the budget admits;
- `AsyncOutput` copies the number of sampled tokens to the host anyway; confidences and refused drafts go with it;
- `AsyncOutput.get_output` has them there, and the step is counted (`patches.telemetry.recorder`).

The marks for timing lie around the target's forward pass (`StepTimingCollector.forward_start`, the end of
`execute_model`) and around the drafter (the end of `postprocess_sampled` and of `sample_tokens`).

Nothing here waits for the device, and a failure switches telemetry off, never the engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

from patches.calibration.mode import CalibrationMode, chosen_mode
from patches.install import Hook
from patches.telemetry import trace
from patches.telemetry.counters import DIRECTORY_VARIABLE, CounterWriter

if TYPE_CHECKING:  # it imports vLLM's worker modules, which may come only after ours
    from patches.telemetry.recorder import Step, StepRecorder

logger = logging.getLogger("vllm.dspark")

Wrapped = Callable[..., Any]

_RECORDER = "_dspark_recorder"
_STEP = "_dspark_step"


def _open_recorder(runner: Any) -> StepRecorder | None:
    """The engine's telemetry, on tensor-parallel rank 0 of a server that speculates, or None."""
    from vllm.distributed.parallel_state import get_tp_group

    from patches.telemetry.recorder import StepRecorder

    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None or runner.speculator is None or get_tp_group().rank_in_group != 0:
        return None
    engine = runner.vllm_config.parallel_config.data_parallel_index
    trace.start(engine)
    adaptive = getattr(runner.speculator, "enable_adaptive_verification", False)
    try:
        writer = CounterWriter(
            Path(directory),
            engine,
            runner.num_speculative_steps,
            predicts=adaptive,
            calibrates=adaptive and chosen_mode() is not CalibrationMode.OFF,
        )
    except (OSError, ValueError) as error:
        logger.error("dspark telemetry is off: no counters in %s: %s", directory, error)
        return None
    return StepRecorder(writer, runner.device)


def _follow_steps(runner_module: ModuleType) -> None:
    def initialise(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> None:
        """Open the counters when the runner is built, so that the series exist before the first request."""
        wrapped(*args, **kwargs)
        recorder = _open_recorder(runner)
        setattr(runner, _RECORDER, recorder)
        setattr(runner.step_timing, _RECORDER, recorder)

    def prepare(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
        """Describe the step that was just prepared."""
        batch = wrapped(*args, **kwargs)
        recorder: StepRecorder | None = getattr(runner, _RECORDER)
        if recorder is not None:
            recorder.prepared(runner, batch)
        return batch

    def marking(name: str) -> Wrapped:
        """Mark the end of the wrapped call."""

        def call(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            recorder: StepRecorder | None = getattr(runner, _RECORDER)
            if recorder is not None:
                recorder.timer.mark(name)
            return result

        return call

    def sample(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
        """Hand the step's record to the output that will know how it ended."""
        recorder: StepRecorder | None = getattr(runner, _RECORDER)
        step = recorder.take() if recorder is not None else None
        output = wrapped(*args, **kwargs)
        if recorder is not None and step is not None and output is not None:
            recorder.timer.mark("draft end")
            recorder.sampled(step, runner, output)
            setattr(output, _STEP, (recorder, step))
        return output

    wrapt.wrap_function_wrapper(runner_module, "GPUModelRunner.__init__", initialise)
    wrapt.wrap_function_wrapper(runner_module, "GPUModelRunner.prepare_inputs", prepare)
    wrapt.wrap_function_wrapper(runner_module, "GPUModelRunner.execute_model", marking("verify end"))
    wrapt.wrap_function_wrapper(runner_module, "GPUModelRunner.postprocess_sampled", marking("draft start"))
    wrapt.wrap_function_wrapper(runner_module, "GPUModelRunner.sample_tokens", sample)


def _count_outputs(outputs_module: ModuleType) -> None:
    def get_output(wrapped: Callable[[], Any], output: Any, args: Any, kwargs: Any) -> Any:
        """Count the step once its tokens are on the host."""
        result = wrapped(*args, **kwargs)
        record: tuple[StepRecorder, Step] | None = output.__dict__.pop(_STEP, None)
        if record is not None:
            recorder, step = record
            recorder.finished(step, output)
        return result

    def forward_start(wrapped: Callable[[], None], collector: Any, args: Any, kwargs: Any) -> None:
        """The target's forward pass begins."""
        wrapped(*args, **kwargs)
        recorder: StepRecorder | None = getattr(collector, _RECORDER, None)
        if recorder is not None:
            recorder.timer.mark("verify start")

    wrapt.wrap_function_wrapper(outputs_module, "AsyncOutput.get_output", get_output)
    wrapt.wrap_function_wrapper(outputs_module, "StepTimingCollector.forward_start", forward_start)


HOOKS: Mapping[str, Hook] = {
    "vllm.v1.worker.gpu.model_runner": _follow_steps,
    "vllm.v1.worker.gpu.async_utils": _count_outputs,
}
