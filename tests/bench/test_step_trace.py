"""A profile's sums, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from tests.bench import never_slower_report as report
from tests.bench.never_slower import AFTER, BEFORE, steps_to_trace, tokens_that_fit
from tests.bench.step_trace import Trace, by_kind, differences, on_device, on_host


def kernel(name: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(device_type=DeviceType.CUDA, name=name, time_range=SimpleNamespace(start=start, end=end))


def call(name: str, took: float) -> SimpleNamespace:
    return SimpleNamespace(device_type=DeviceType.CPU, name=name, self_cpu_time_total=took)


EVENTS = [
    kernel("gemm", 10, 20),
    kernel("copy", 12, 26),  # on another stream, and it ends later than the one that began first
    kernel("gemm", 30, 40),
    call("launch", 3.0),
    call("launch", 5.0),
]


def test_a_step_is_summed_up():
    found = on_device(reversed(EVENTS), 2)
    assert found["device_us"] == 15.0
    assert found["idle_us"] == 2.0, "from the end of the copy to the second gemm; overlapping kernels leave no gap"
    assert found["kernels"] == 1.5
    assert found["by_kernel"] == {"gemm": (10.0, 1.0), "copy": (7.0, 0.5)}
    assert found["by_gap"] == {"copy -> gemm": (2.0, 0.5)}
    assert on_host(EVENTS, 2) == {"host_us": 4.0, "by_host": {"launch": (4.0, 1.0)}}


def test_without_a_device_there_are_no_kernels():
    found = on_device([call("launch", 3.0)], 1)
    assert (found["device_us"], found["kernels"], found["by_gap"]) == (0.0, 0.0, {})


def test_what_one_spends_more_or_less_is_told_and_half_a_microsecond_is_not():
    of, to = {"a": (5.0, 1.0), "b": (1.0, 1.0)}, {"a": (4.0, 1.0), "c": (3.0, 2.0), "b": (1.05, 1.0)}
    assert differences(of, to) == {"a": (1.0, 0.0), "c": (-3.0, -2.0)}


def test_matrix_products_are_one_kind_also_beside_a_gap():
    spent = {"nvjet_a": (5.0, 1.0), "nvjet_b": (2.0, 2.0), "nvjet_a -> x": (3.0, 1.0), "nvjet_b -> x": (1.0, 1.0)}
    assert by_kind(spent | {"copy": (1.0, 1.0)}) == {
        "nvjet_*": (7.0, 3.0),
        "nvjet_* -> x": (4.0, 2.0),
        "copy": (1.0, 1.0),
    }


def test_what_is_too_little_to_be_kept_is_no_difference_and_yet_in_the_sum():
    few, more = on_host([call("op", 0.4)], 1), on_host([call("op", 0.8), call("added", 5.0)], 1)
    assert (few["by_host"], list(more["by_host"])) == ({}, ["added", "op"])
    assert (few["host_us"], more["host_us"]) == (0.4, 5.8)
    assert list(differences(more["by_host"], few["by_host"])) == ["added", "op"]
    more["by_host"]["op"] = (0.5, 1.0)
    assert list(differences(more["by_host"], few["by_host"])) == ["added"], "half a microsecond may be nothing"


def test_the_report_lays_two_arms_side_by_side():
    slower = [*EVENTS, kernel("nvjet_1", 50, 54), call("cudaEventSynchronize", 6.0)]
    rows = [
        {"run": "1", "part": "trace", "arm": arm, "requests": 16, **on_device(events, 2), **on_host(events, 2)}
        for arm, events in (("fixed", EVENTS), ("patched", slower), ("off", EVENTS))
    ]
    text = report.section([{"run": "1", "part": "machine", "command": "--only trace"}, *rows])
    assert "| requests | arm | steps | kernels | busy | idle | host's calls | host's waits |" in text
    assert "| 16 | fixed | 2 | 1.5 | 13 | 2 | 4 | 0 |" in text
    assert "| 16 | patched | 2 | 2.0 | 15 | 7 | 4 | 3 |" in text
    assert "| `nvjet_*` | +2.0 (+0.5) |" in text
    assert "| `gemm -> nvjet_*` | +5.0 (+0.5) |" in text
    alone = report.section([{"run": "1", "part": "machine", "command": "--only trace"}, rows[1]])
    assert "| 16 | patched |" in alone
    assert "Patched against fixed" not in alone


@pytest.mark.parametrize("requests", [1, 16, 128, 256])
@pytest.mark.parametrize(("a_step", "most"), [(8, 8), (1, 8), (6, 6)])
def test_steps_are_traced_around_the_same_token_after_prompts_and_before_the_end(requests, a_step, most):
    tokens, skipped, steps = steps_to_trace(requests, a_step, most)
    assert tokens <= tokens_that_fit(requests)
    assert skipped >= BEFORE
    assert steps >= 1
    assert skipped + steps <= tokens // a_step - AFTER
    assert (skipped + steps / 2) * a_step == pytest.approx((BEFORE + steps / 2) * most, abs=1)


def test_a_trace_sees_its_steps_and_no_others():
    trace = Trace("host", 2, 3)
    for step in range(7):
        torch.zeros(2).add_(1) if 2 <= step < 5 else torch.ones(2).mul_(2)
        trace.step_done()
    by_host = trace.end()["by_host"]
    assert by_host["aten::add_"][1] == 1.0
    assert "aten::mul_" not in by_host


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_trace_without_its_steps_says_so_and_watches_no_longer(done):
    trace = Trace("host", 1, 3)
    for _ in range(done):
        trace.step_done()
    with pytest.raises(RuntimeError, match=f"{done} steps, a trace wants 4"):
        trace.end()
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize(("skipped", "steps"), [(0, 3), (3, 0), (8, -2)])
def test_a_trace_of_nothing_is_refused(skipped, steps):
    with pytest.raises(ValueError, match="give the requests more tokens"):
        Trace("device", skipped, steps)
