"""What PyTorch's profiler saw of some steps, as plain numbers a step: kernels, the gaps between them, host calls."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

LEAST = 0.5
"""Microseconds a step that a kernel, gap or host call is kept from. What is not there takes less."""

Spent = dict[str, tuple[float, float]]
"""Name -> (microseconds, times), both a step."""


def on_device(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Sum up the kernels of a profile.

    Args:
        events: `torch.profiler.profile.events()`.
        steps: Engine steps while the profiler ran.

    Returns:
        `steps`; a step's `device_us` from its first kernel to its last, of it `idle_us`, and its number of `kernels`;
        `by_kernel` and `by_gap`: `Spent`, the dearest first, none below `LEAST`. A gap is named by the kernels before
        and after it.
    """
    from torch.autograd import DeviceType

    device = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if event.device_type == DeviceType.CUDA
    )
    kernels, gaps = _kernels_and_gaps(device)
    span = max(end for _, end, _ in device) - device[0][0] if device else 0.0
    return {
        "steps": steps,
        "device_us": round(span / steps, 1),
        "idle_us": round(sum(map(sum, gaps.values())) / steps, 1),
        "kernels": round(len(device) / steps, 2),
        "by_kernel": _dearest(kernels, steps),
        "by_gap": _dearest(gaps, steps),
    }


def on_host(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Sum up the host's calls of a profile.

    Args:
        events: `torch.profiler.profile.events()`.
        steps: Engine steps while the profiler ran.

    Returns:
        A step's `host_us`, and `by_host`: `Spent`, the dearest first, none below `LEAST`: each call's own
        time, without that of the calls it makes.
    """
    from torch.autograd import DeviceType

    host: dict[str, list[float]] = {}
    for event in events:
        if event.device_type == DeviceType.CPU:
            host.setdefault(event.name, []).append(event.self_cpu_time_total)
    return {"host_us": round(sum(map(sum, host.values())) / steps, 1), "by_host": _dearest(host, steps)}


class Trace:
    """PyTorch's profiler over some steps of an engine.

    Args:
        watched: Kernels, or the host's calls; a machine without a GPU has calls only. A device is idle when the trace
            of it begins and when it ends.
        skipped: Steps before the first that is watched, at least one.
        steps: How many are watched.

    Raises:
        ValueError: a trace of nothing.
    """

    def __init__(self, watched: Literal["device", "host"], skipped: int, steps: int) -> None:
        import torch

        if skipped < 1 or steps < 1:
            raise ValueError(f"a trace of {steps} steps after {skipped}: give the requests more tokens")
        activity = torch.profiler.ProfilerActivity
        self._on_gpu = watched == "device" and torch.cuda.is_available()
        self._profiler = torch.profiler.profile(activities=[activity.CUDA if self._on_gpu else activity.CPU])
        self._summary = {"device": on_device, "host": on_host}[watched]
        self._done, self._first, self._last = 0, skipped, skipped + steps

    def step_done(self) -> None:
        """A step has been enqueued."""
        self._done += 1
        if self._done == self._first:
            self._wait()
            self._profiler.start()
        elif self._done == self._last:
            self._wait()
            self._profiler.stop()

    def end(self) -> dict[str, Any]:
        """`on_device` or `on_host` of the steps.

        Raises:
            RuntimeError: there were too few.
        """
        if self._done < self._last:
            if self._done >= self._first:
                self._profiler.stop()  # PyTorch crashes at its exit otherwise
            raise RuntimeError(f"{self._done} steps, a trace wants {self._last}: give the requests more tokens")
        return self._summary(self._profiler.events(), self._last - self._first)

    def _wait(self) -> None:
        import torch

        # A wait is a call: it would be in the host's sum.
        if self._on_gpu:
            torch.cuda.synchronize()


def _kernels_and_gaps(device: list[tuple[float, float, str]]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """How long each ran, and how long nothing ran; kernels of several streams may overlap."""
    kernels: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    busy_until, before = (device[0][0], "") if device else (0.0, "")
    for start, end, name in device:
        kernels.setdefault(name, []).append(end - start)
        if start > busy_until:
            gaps.setdefault(f"{before} -> {name}", []).append(start - busy_until)
        if end > busy_until:
            busy_until, before = end, name
    return kernels, gaps


def _dearest(times: dict[str, list[float]], steps: int) -> Spent:
    spent = {name: (round(sum(each) / steps, 2), round(len(each) / steps, 2)) for name, each in times.items()}
    kept = {name: each for name, each in spent.items() if each[0] >= LEAST}
    return dict(sorted(kept.items(), key=lambda item: -item[1][0]))


def by_kind(spent: Spent) -> Spent:
    """With cuBLAS's matrix products as one kind: which of them a shape gets differs between equal engines."""
    found: dict[str, tuple[float, float]] = {}
    for name, (us, times) in spent.items():
        kind = re.sub(r"nvjet_\w+", "nvjet_*", name)
        before = found.get(kind, (0.0, 0.0))
        found[kind] = (before[0] + us, before[1] + times)
    return found


def differences(of: Spent, to: Spent) -> Spent:
    """Name -> (microseconds, times) a step that `of` spends more; none that `LEAST` hides."""
    both = {name: (of.get(name, (0.0, 0.0)), to.get(name, (0.0, 0.0))) for name in [*of, *to]}
    more = {name: (ours[0] - theirs[0], ours[1] - theirs[1]) for name, (ours, theirs) in both.items()}
    return {name: each for name, each in more.items() if abs(each[0]) > LEAST}
