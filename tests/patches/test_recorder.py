"""One worker's telemetry, step by step: what it takes from the batch, the budget and the output, and how it fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  (makes the GPU runner's modules importable on a CPU)

from patches.calibration.stage import Calibration
from patches.modes import Mode
from patches.telemetry.counters import CounterWriter, Snapshot, counter_file, read, read_all
from patches.telemetry.recorder import StepRecorder
from patches.telemetry.timing import EVERY, MARKS

DRAFTS = 3
CPU = torch.device("cpu")
CONFIDENCES = torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.9, 0.9], [1.0, 1.0, 1.0]])
"""Of three requests: two that decode, and a new one whose drafts are padding."""


def recorder(directory: Path) -> StepRecorder:
    return StepRecorder(CounterWriter(directory, 0, DRAFTS, predicts=True, calibrates=True), CPU)


def runner(budget: int | None, calibration: Calibration | None = None, mode: Mode = Mode.ADAPTIVE) -> Any:
    """A runner whose manager chose `budget`, or that has no manager."""
    manager = SimpleNamespace(
        plan=SimpleNamespace(budget=budget, mode=mode),
        calibration=calibration,
        cost_tables=(np.full(8, 2.0), np.full(64, 10.0)),
        live_confidences=lambda slots: CONFIDENCES.index_select(0, slots),
    )
    return SimpleNamespace(
        adaptive_verification=None if budget is None else manager,
        output_copy_stream=torch.cuda.Stream(),
        main_stream=torch.cuda.Stream(),
    )


def batch(drafts: list[int] | None = None) -> Any:
    rows = [DRAFTS] * 3 if drafts is None else drafts
    return SimpleNamespace(
        num_reqs=3,
        num_tokens=7,
        idx_mapping=torch.arange(3),
        num_draft_tokens_per_req=np.array(rows, dtype=np.int32),
        num_scheduled_tokens=np.array(rows, dtype=np.int32) + 1,
        num_computed_tokens_np=np.array([30, 30, 9], dtype=np.int32),
        prefill_len_np=np.array([10, 10, 10], dtype=np.int32),
    )


def output(accepted: list[int], rejected: list[int]) -> Any:
    return SimpleNamespace(
        num_sampled_tokens_np=np.array(accepted, dtype=np.int32) + 1,
        sampler_output=SimpleNamespace(num_rejected=torch.tensor(rejected, dtype=torch.int32)),
        copy_event=torch.cuda.Event(),
    )


def one_step(telemetry: StepRecorder, running: Any, ended: Any) -> None:
    telemetry.prepared(running, batch())
    for name in MARKS[:-1]:
        telemetry.timer.mark(name)
    step = telemetry.take()
    assert step is not None
    telemetry.timer.mark(MARKS[-1])
    telemetry.sampled(step, running, ended)
    telemetry.finished(step, ended)


def counted(directory: Path) -> Snapshot:
    return read(counter_file(directory, 0))


def test_a_trimmed_step_takes_what_was_verified_from_the_sampler(tmp_path: Path) -> None:
    one_step(recorder(tmp_path), runner(budget=4), output(accepted=[1, 2, 0], rejected=[0, 1, 0]))
    snapshot = counted(tmp_path)
    assert snapshot.steps == {"full": 0, "trimmed": 1, "none": 0, "fixed": 0}
    assert snapshot.proposed == (2, 2, 2), "padding counts nowhere"
    assert snapshot.verified == (2, 1, 1)
    assert snapshot.accepted == (2, 1, 0)
    assert snapshot.expected == pytest.approx((1.4, 0.81, 0.729))
    assert snapshot.verified_lengths == (0, 0, 1, 0, 1)
    assert snapshot.acceptance_lengths == (0, 0, 1, 1, 0)


def test_a_fixed_step_that_the_sampler_cannot_take_whole_is_counted_as_what_it_took(tmp_path: Path) -> None:
    one_step(recorder(tmp_path), runner(4, mode=Mode.FIXED), output(accepted=[1, 2, 0], rejected=[0, 1, 0]))
    snapshot = counted(tmp_path)
    assert snapshot.steps == {"full": 0, "trimmed": 0, "none": 0, "fixed": 1}
    assert snapshot.verified == (2, 1, 1)


@pytest.mark.parametrize(
    ("budget", "plan", "verified"), [(6, "full", (2, 2, 2)), (0, "none", (0, 0, 0)), (None, "fixed", (2, 2, 2))]
)
def test_where_the_plan_tells_nothing_is_copied(
    tmp_path: Path, budget: int | None, plan: str, verified: tuple[int, ...]
) -> None:
    accepted = [0, 0, 0] if budget == 0 else [3, 1, 0]
    ended = output(accepted, [])
    ended.sampler_output = None
    one_step(recorder(tmp_path), runner(budget), ended)
    snapshot = counted(tmp_path)
    assert snapshot.steps[plan] == 1
    assert snapshot.verified == verified
    if plan == "fixed":
        assert snapshot.bin_predictions == (0,) * 10


def test_a_step_without_real_drafts_is_no_verification(tmp_path: Path) -> None:
    telemetry = recorder(tmp_path)
    telemetry.prepared(runner(budget=0), batch([0, 0, 3]))
    assert telemetry.take() is None
    nothing = batch()
    nothing.num_draft_tokens_per_req = None
    telemetry.prepared(runner(budget=0), nothing)
    assert telemetry.take() is None
    assert sum(counted(tmp_path).steps.values()) == 0


def test_steps_in_flight_do_not_mix(tmp_path: Path) -> None:
    telemetry, running = recorder(tmp_path), runner(budget=6)
    flying = []
    for accepted in ([3, 0, 0], [1, 1, 0]):
        telemetry.prepared(running, batch())
        step = telemetry.take()
        assert step is not None
        ended = output(accepted, [0, 0, 0])
        telemetry.sampled(step, running, ended)
        flying.append((step, ended))
    telemetry.finished(*flying[0])
    assert counted(tmp_path).accepted == (1, 1, 1)
    telemetry.finished(*flying[1])
    assert counted(tmp_path).accepted == (3, 1, 1)


def test_one_step_of_sixteen_is_timed_against_the_table(tmp_path: Path) -> None:
    telemetry = recorder(tmp_path)
    for _ in range(2 * EVERY + 1):
        one_step(telemetry, runner(budget=6), output([1, 1, 0], [2, 2, 0]))
    snapshot = counted(tmp_path)
    assert [sum(seconds.counts) for seconds in snapshot.step_seconds.values()] == [2, 2], "the third is told later"
    assert snapshot.predicted_seconds == pytest.approx(2 * 0.012)


def test_the_fit_learns_from_rows_with_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Confidences of 0.5 and 0.9 that always come true: the second one's temperature falls."""
    calibration = Calibration(DRAFTS, CPU, applies=False)
    telemetry = recorder(tmp_path)
    clock = iter(range(1000))
    monkeypatch.setattr("patches.telemetry.recorder.time.monotonic", lambda: next(clock))
    for _ in range(50):
        one_step(telemetry, runner(budget=6, calibration=calibration), output([3, 3, 0], [0, 0, 0]))
    temperatures = counted(tmp_path).temperatures
    assert temperatures == pytest.approx(calibration.temperatures)
    assert temperatures is not None
    assert max(temperatures) < 0.8


@pytest.mark.parametrize("when", ["prepared", "sampled", "finished"])
def test_a_fault_ends_telemetry_and_nothing_else(tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture) -> None:
    telemetry, running = recorder(tmp_path), runner(budget=4)
    one_step(telemetry, running, output([1, 2, 0], [0, 1, 0]))
    broken: Any = object()
    telemetry.prepared(broken if when == "prepared" else running, batch())
    step = telemetry.take()
    if step is not None:
        ended = broken if when == "sampled" else output([1, 2, 0], [0, 1, 0])
        telemetry.sampled(step, running, ended)
        telemetry.finished(step, broken if when == "finished" else ended)
    assert list(read_all(tmp_path)) == [], "counters that stand still would lie"
    assert [r.message for r in caplog.records].count("dspark telemetry is off after a fault") == 1
    telemetry.prepared(running, batch())
    assert telemetry.take() is None
