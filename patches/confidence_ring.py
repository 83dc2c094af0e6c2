"""unblocked-confidences: a step's budget no longer waits for the confidences of the step before.

Upstream chooses a budget on the host from confidences that the device copied there. `record_confidences` of step N
waits for the copy that step N-1 started, then makes it readable, so the budget of step N+1 reads record N-1. With
asynchronous scheduling the host is a step ahead of the device, and the copy it waits for lies behind work that has
only just been queued: host and device stop running side by side. At low load, where a step is short, this costs more
than trimming saves.

Here three copies form a ring. Step N writes one, the copy of N-1 may still be in flight, and what becomes readable is
record N-2, whose event lies a whole step of the device back. The event is still waited for, never asked: a `query`
with a fallback would let tensor-parallel ranks plan from different records. What it says before the wait is counted,
and nothing else.

A reused slot must not inherit its last owner's confidence. `add_request` resets the slot on the device, and so in
every record made from then on; the records made earlier hold the old value. So the reset is kept for each copy and
applied once that copy has landed, right away for the one that is readable.

One record older means a confidence that is one step staler; tests/bench/RESULTS.md says what that costs in
acceptance length and saves in time.

Upstream reference: `AdaptiveVerificationManager.record_confidences`, all releases. Hardware: all; on a CPU copies are
done when they return, so it only reads one record older there, and the tests run what a GPU runs. Delete this when
upstream's budgets no longer wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from patches.install import Hook

PATCH_ID = "unblocked-confidences"

_COPIES = 3

_FRESH = 1.0
"""The confidence of a request that has drafted nothing yet, as in upstream's `add_request`."""


class ConfidenceRing:
    """Host copies of the device's confidences by request slot; the readable one is two records old."""

    def __init__(self, slots: int, steps: int, device: torch.device) -> None:
        from vllm.v1.utils import CpuGpuBuffer

        self._copies = [CpuGpuBuffer(slots, steps, dtype=torch.float32, device=device) for _ in range(_COPIES)]
        for copy in self._copies:
            copy.np.fill(_FRESH)
        self._landed = [torch.cuda.Event(blocking=True) for _ in range(_COPIES)]
        self._resets: list[list[int]] = [[] for _ in range(_COPIES)]
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._readable = 0
        self.waits = 0
        """Records whose copy had not landed when it was needed."""

    @property
    def values(self) -> NDArray[np.float32]:
        """[slots, steps] the readable record: what the device held two records ago, fresh where a slot was reused."""
        values: NDArray[np.float32] = self._copies[self._readable].np
        return values

    def reset(self, slot: int) -> None:
        """Forget a slot's confidences in every copy. The caller resets the device's."""
        for copy, resets in enumerate(self._resets):
            if copy == self._readable:
                self._copies[copy].np[slot] = _FRESH
            else:
                resets.append(slot)

    def record(self, confidences: torch.Tensor) -> None:
        """Start copying the device's confidences, and make the record before the last one readable.

        Args:
            confidences: [slots, steps] float32 on the device, this step's included.
        """
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed
        from vllm.v1.worker.gpu.async_utils import stream

        oldest = self._readable
        ready = (oldest + 1) % _COPIES
        landed = self._landed[ready]
        # vLLM's stand-in for an event on a CPU has no `query`: copies there are done when they return.
        self.waits += not getattr(landed, "query", lambda: True)()
        with gpu_sync_allowed():
            landed.synchronize()
        if self._resets[ready]:
            self._copies[ready].np[self._resets[ready]] = _FRESH
            self._resets[ready].clear()
        self._readable = ready

        copy = self._copies[oldest]
        copy.gpu.copy_(confidences)
        current_stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current_stream)
        with stream(self._stream, current_stream):
            copy.copy_to_cpu()
            self._landed[oldest].record()


HOOKS: Mapping[str, Hook] = {}
"""`patches.manager` takes it in place of upstream's two copies."""
