"""`python -m tests.bench.telemetry_cost`: what verification-telemetry and calibration add to a step. Needs vLLM.

Runs the real recorder and the real calibration around nothing: no model, a batch that never changes. Per batch size and
calibration, microseconds a step

- on the thread that plans (`host`), until everything of it is enqueued;
- until the device has done it (`done`), the queue never empty;
- on the thread that hands outputs over (`counted`), which runs beside the device's work.

On a GPU a step of an 8 B target takes milliseconds (`RESULTS.md`). Without a GPU the same runs on the CPU, in CPU time:
`done` then says nothing of its own.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import vllm.v1.worker.cpu.shm  # noqa: F401  (streams and events that do nothing)

from patches.calibration.mode import CalibrationMode  # noqa: E402
from patches.calibration.stage import Calibration  # noqa: E402
from patches.telemetry.counters import CounterWriter  # noqa: E402
from patches.telemetry.recorder import StepRecorder  # noqa: E402

DRAFTS, SLOTS, STEPS, ROUNDS = 7, 256, 1_000, 5
clock = time.perf_counter if CUDA else time.process_time
DEVICE = torch.device("cuda" if CUDA else "cpu")


class Bench:
    """One batch size and calibration."""

    def __init__(self, directory: Path, requests: int, mode: CalibrationMode) -> None:
        self.calibration = None
        if mode is not CalibrationMode.OFF:
            self.calibration = Calibration(DRAFTS, DEVICE, applies=mode is CalibrationMode.ON)
        calibrates = self.calibration is not None
        writer = CounterWriter(directory, 0, DRAFTS, predicts=True, calibrates=calibrates)
        self.recorder = StepRecorder(writer, DEVICE)
        random = np.random.default_rng(0)
        confidences = torch.rand(SLOTS, DRAFTS, device=DEVICE)
        self.head = torch.rand(SLOTS, DRAFTS, device=DEVICE)[:requests]
        tables = (np.full(SLOTS + 1, 1.0), np.full(SLOTS * (DRAFTS + 1) + 1, 5.0))
        self.runner: Any = SimpleNamespace(
            output_copy_stream=torch.cuda.Stream(),
            main_stream=torch.cuda.current_stream() if CUDA else None,
            adaptive_verification=SimpleNamespace(
                plan=SimpleNamespace(budget=3 * requests),
                calibration=self.calibration,
                cost_tables=tables,
                live_confidences=lambda slots: confidences.index_select(0, slots),
            ),
        )
        self.batch = SimpleNamespace(
            num_reqs=requests,
            num_tokens=4 * requests,
            num_scheduled_tokens=np.full(requests, DRAFTS + 1, dtype=np.int32),
            num_draft_tokens_per_req=np.full(requests, DRAFTS, dtype=np.int32),
            num_computed_tokens_np=np.full(requests, 100, dtype=np.int32),
            prefill_len_np=np.full(requests, 50, dtype=np.int32),
            idx_mapping=torch.arange(requests, device=DEVICE),
        )
        accepted = random.integers(0, 4, requests).astype(np.int32)
        self.output = SimpleNamespace(
            copy_event=torch.cuda.Event(blocking=True),
            num_sampled_tokens_np=accepted + 1,
            sampler_output=SimpleNamespace(num_rejected=torch.from_numpy(3 - accepted).to(DEVICE)),
        )

    def step(self) -> Any:
        """What the planning thread does."""
        recorder = self.recorder
        recorder.prepared(self.runner, self.batch)
        recorder.timer.mark("verify start")
        recorder.timer.mark("verify end")
        step = recorder.take()
        recorder.timer.mark("draft start")
        if self.calibration is not None:
            self.calibration.calibrated(self.head)
        recorder.timer.mark("draft end")
        recorder.sampled(step, self.runner, self.output)  # type: ignore[arg-type]
        return step

    def run(self) -> tuple[float, float, float]:
        """Microseconds a step: host, done, counted."""
        synchronise()
        start = clock()
        steps = [self.step() for _ in range(STEPS)]
        host = clock() - start
        synchronise()
        done = clock() - start
        start = clock()
        for step in steps:
            self.recorder.finished(step, self.output)
        counted = clock() - start
        assert self.recorder._writer is not None, "the recorder gave up"
        return tuple(seconds / STEPS * 1e6 for seconds in (host, done, counted))  # type: ignore[return-value]


def synchronise() -> None:
    """Wait for the device, where there is one."""
    if CUDA:
        torch.cuda.synchronize()


def main() -> None:
    """Measure and print, medians of `ROUNDS` rounds."""
    if not CUDA:
        torch.set_num_threads(1)
    print(f"{torch.cuda.get_device_name() if CUDA else 'CPU'}, PyTorch {torch.__version__}, us a step")
    print("requests calibration     host     done  counted")
    for requests in (1, 16, 256):
        for mode in CalibrationMode:
            with tempfile.TemporaryDirectory() as directory:
                bench = Bench(Path(directory), requests, mode)
                bench.run()
                if mode is CalibrationMode.ON:  # its kernels run only once there are temperatures
                    assert bench.calibration is not None
                    bench.calibration.temperatures = np.full(DRAFTS, 1.5)
                rounds = [bench.run() for _ in range(ROUNDS)]
            columns = " ".join(f"{statistics.median(column):8.1f}" for column in zip(*rounds, strict=True))
            print(f"{requests:8} {mode.value:11} {columns}", flush=True)


if __name__ == "__main__":
    main()
