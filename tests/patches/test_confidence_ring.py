"""The ring against a model of it, on a device whose copies land late.

A copy takes what the device holds when it is started. It reaches the host at a random moment after that, at the
latest when its event is waited for: what a GPU does, made as unkind as it can be.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patches.confidence_ring import ConfidenceRing

SLOTS, STEPS = 3, 2


class Device:
    """Copies on their way to the host."""

    def __init__(self) -> None:
        self.started: list[tuple[Buffer, np.ndarray]] = []
        self.flying: list[tuple[Event, Buffer, np.ndarray]] = []

    def land(self, event: Event | None = None, count: int | None = None) -> None:
        """Everything up to an event, or the first `count` copies. A stream keeps its order."""
        if event is not None:
            count = max((i + 1 for i, (e, _, _) in enumerate(self.flying) if e is event), default=0)
        for _, buffer, values in self.flying[:count]:
            buffer.np[:] = values
        del self.flying[:count]


device = Device()


class Buffer:
    def __init__(self, slots: int, steps: int, **_kinds: object) -> None:
        self.np = np.full((slots, steps), np.nan, dtype=np.float32)
        self.gpu = torch.full((slots, steps), torch.nan)

    def copy_to_cpu(self) -> None:
        device.started.append((self, self.gpu.numpy().copy()))


class Event:
    def __init__(self, blocking: bool = False) -> None:
        assert blocking

    def record(self) -> None:
        device.flying += [(self, *copy) for copy in device.started]
        device.started.clear()

    def query(self) -> bool:
        return all(event is not self for event, _, _ in device.flying)

    def synchronize(self) -> None:
        device.land(self)


class Stream:
    def __init__(self, _device: object = None) -> None: ...
    def wait_stream(self, _other: object) -> None: ...


@pytest.fixture(autouse=True, scope="module")
def _late_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.utils.CpuGpuBuffer", Buffer)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", lambda _device=None: Stream())
        patch.setattr(torch.cuda, "set_stream", lambda _stream: None)
        yield


actions = st.lists(
    st.one_of(
        st.just(("record", 0)),
        st.tuples(st.just("reset"), st.integers(0, SLOTS - 1)),
        st.tuples(st.just("land"), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(actions)
def test_it_shows_the_record_before_the_last_one_with_reused_slots_fresh(schedule):
    global device
    device = Device()
    ring = ConfidenceRing(SLOTS, STEPS, torch.device("cpu"))
    table = torch.ones(SLOTS, STEPS)
    records: list[np.ndarray] = []
    waits = 0
    for number, (action, value) in enumerate(schedule):
        if action == "record":
            table.copy_(torch.arange(SLOTS * STEPS).view(SLOTS, STEPS) / 100 + number)
            records.append(table.numpy().copy())
            # The copy of the record before last may still be on its way, then this step has to wait for it.
            waits += len(device.flying) > 1
            ring.record(table)
        elif action == "reset":
            table[value] = 1.0
            for record in records:
                record[value] = 1.0
            ring.reset(value)
        else:
            device.land(count=value)
        expected = records[-3] if len(records) > 2 else np.ones((SLOTS, STEPS))
        assert np.array_equal(ring.values, expected)
    assert ring.waits == waits


def test_a_wait_is_counted_and_changes_nothing():
    global device
    device = Device()
    ring = ConfidenceRing(SLOTS, STEPS, torch.device("cpu"))
    for step in range(5):
        ring.record(torch.full((SLOTS, STEPS), step / 10))
    # Nothing landed by itself: from the third record on the copy of two records ago was waited for.
    assert ring.waits == 3
    assert np.array_equal(ring.values, np.full((SLOTS, STEPS), np.float32(0.2)))
