"""A profile's sums, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from tests.bench import never_slower_report as report
from tests.bench.step_trace import Watch, differences, kinds_of_kernels, on_device, on_host


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


def test_what_one_spends_more_or_less_is_ordered_by_its_size():
    of, to = {"a": (5.0, 1.0), "b": (1.0, 1.0)}, {"a": (4.0, 1.0), "c": (3.0, 2.0), "b": (1.05, 1.0)}
    assert differences(of, to, 9) == [("c", -3.0), ("a", 1.0)]
    assert differences(of, to, 1) == [("c", -3.0)]


def test_matrix_products_are_one_kind_and_gaps_between_them_are_not():
    found = kinds_of_kernels(
        {"nvjet_a": (5.0, 1.0), "nvjet_b": (2.0, 2.0), "copy": (1.0, 1.0), "nvjet_a -> x": (3.0, 1.0)}
    )
    assert found == {"nvjet_*": (7.0, 3.0), "copy": (1.0, 1.0), "nvjet_a -> x": (3.0, 1.0)}


def test_what_is_too_little_to_be_kept_is_no_difference_and_yet_in_the_sum():
    few, more = on_host([call("op", 0.4)], 1), on_host([call("op", 0.8), call("added", 5.0)], 1)
    assert (few["by_host"], list(more["by_host"])) == ({}, ["added", "op"])
    assert (few["host_us"], more["host_us"]) == (0.4, 5.8)
    assert [name for name, _ in differences(more["by_host"], few["by_host"], 9)] == ["added", "op"]
    more["by_host"]["op"] = (0.5, 1.0)
    assert differences(more["by_host"], few["by_host"], 9) == [("added", 5.0)], "half a microsecond may be nothing"


def test_the_report_lays_two_arms_side_by_side():
    slower = [*EVENTS, kernel("ranking", 50, 54)]
    rows = [
        {"run": "1", "part": "trace", "arm": arm, "requests": 16, **on_device(events, 2), **on_host(events, 2)}
        for arm, events in (("fixed", EVENTS), ("patched", slower))
    ]
    text = report.section([{"run": "1", "part": "machine", "command": "--only trace"}, *rows])
    assert "| 16 | fixed | 15.0 | 2.0 | 1.5 | 4.0 |" in text
    assert "| 16 | patched | 22.0 | 7.0 | 2.0 | 4.0 |" in text
    assert "| 16 | gap | gemm -> ranking | +5.0 |" in text
    assert "| 16 | kernel | ranking | +2.0 |" in text


def test_a_watch_sees_its_steps_and_no_others():
    watch = Watch("host", 2, 3)
    for step in range(7):
        torch.zeros(2).add_(1) if 2 <= step < 5 else torch.ones(2).mul_(2)
        watch.step_done()
    by_host = watch.seen()["by_host"]
    assert by_host["aten::add_"][1] == 1.0
    assert "aten::mul_" not in by_host


def test_a_watch_without_its_steps_says_so():
    watch = Watch("host", 1, 3)
    for _ in range(3):
        watch.step_done()
    with pytest.raises(RuntimeError, match="3 steps, a trace wants 4"):
        watch.seen()
