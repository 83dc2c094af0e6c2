"""How long verification and drafting take on the device, told without waiting for it.

The marks are where upstream profiles its cost tables (`GPUModelRunner._dummy_run` through `StepTimingCollector`): the
target's forward pass, and the drafter. A mark is a CUDA event; the time between two is asked for only when a later
step's tokens are on the host, so that both lie in the past. On a CPU work is done when its call returns, and a mark is
the clock's.

One step of sixteen is timed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

EVERY = 16
"""One step of so many is timed."""


@dataclass
class StepTimes:
    """The marks of one step, and what the cost tables say of it.

    Attributes:
        predicted_seconds: Both phases together; None without cost tables.
        marks: Start and end of each phase, in the order they were passed.
    """

    predicted_seconds: float | None
    marks: dict[str, Any] = field(default_factory=dict)

    def seconds(self) -> dict[str, float] | None:
        """Phase -> seconds, or None where a phase did not run. Every mark has to lie in the past."""
        if len(self.marks) != len(MARKS):
            return None
        start, end, draft_start, draft_end = (self.marks[name] for name in MARKS)
        return {"verify": start.seconds_until(end), "draft": draft_start.seconds_until(draft_end)}


MARKS = ("verify start", "verify end", "draft start", "draft end")


class StepTimer:
    """Marks the steps that are timed. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._mark = _ClockMark if device.type == "cpu" else _EventMark
        self._steps = 0
        self._step: StepTimes | None = None

    def begin(self, predicted_seconds: float | None) -> None:
        """A verification step was prepared: perhaps it is one to time."""
        self._step = StepTimes(predicted_seconds) if self._steps % EVERY == 0 else None
        self._steps += 1

    def mark(self, name: str) -> None:
        """The device is to pass one of `MARKS` now."""
        if self._step is not None:
            self._step.marks[name] = self._mark()

    def take(self) -> StepTimes | None:
        """The step's marks, where it was timed."""
        step, self._step = self._step, None
        return step


class _EventMark:
    """A point in the device's stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_until(self, later: _EventMark) -> float:
        """Seconds between two marks that the device has passed."""
        return float(self._event.elapsed_time(later._event)) / 1000


class _ClockMark:
    """A point in time."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_until(self, later: _ClockMark) -> float:
        """Seconds between two marks."""
        return later._at - self._at
