"""chunked-full-budgets: a budget that takes every draft may be as large as fixed verification's.

Before the rejection sampler applies sampling parameters it copies a batch's logits to float32. To bound that copy
upstream samples in chunks of requests of at most 2**30 bytes, 1,766 rows of 151,936 logits. The chunks are cut where
the host says that requests end. Once a budget trims, only the device knows that, so adaptive verification has to fit
into one chunk, and upstream never chooses a budget that does not: of 256 requests x 8 rows an eighth is cut off however
much more it would yield. Fixed verification samples all 2,048 in two chunks.

A budget that takes every draft trims nothing. The host knows its boundaries, and the sampler can cut chunks as it does
for fixed verification, in the same memory. So two ranges are allowed here: what fits into a chunk, and everything.
What lies between stays closed, since there only the device knows where requests end.

The host's boundaries include placeholder drafts (`patches.admission`), which are not verified. Where these were
scheduled and the batch needs chunks, the exact ends are written over them. Not so with batch-sharded sampling (0.33.0):
it works out the ends of each rank's own requests from the scheduled ones and the admitted counts. The sampler chunks
only a batch whose boundaries end where its rows do: no request holds more rows than the host says, so equal sums mean
equal requests.

Whether a budget may exceed the chunk follows from the scheduler's counts and the size of the vocabulary, the same on
every rank.

Upstream reference: `RejectionSampler._verify_in_chunks` (`assert not self.enable_adaptive_verification`, 0.29.0 on)
and `AdaptiveVerificationManager.get_num_tokens`, all releases. Hardware: all. Delete this when upstream samples a
trimmed batch in chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patches.install import Hook

PATCH_ID = "chunked-full-budgets"


def write_ends(rows: NDArray[np.int32], out: NDArray[np.int32]) -> None:
    """Write 0 and the running sums of `rows` ([requests]) over `out` ([requests + 1])."""
    out[0] = 0
    np.cumsum(rows, out=out[1:])


def can_be_chunked(*, rows: int, ends: NDArray[np.int32], limit: int) -> bool:
    """Whether a batch needs several chunks and the host knows where to cut.

    Args:
        rows: Rows of logits.
        ends: [requests + 1] where the host says that each request's rows end; an upper bound.
        limit: Rows of a chunk.
    """
    return limit < rows == int(ends[-1])


def _chunk_what_was_not_trimmed(sampler_module: ModuleType) -> None:
    verify_in_chunks = sampler_module.RejectionSampler._verify_in_chunks

    @functools.wraps(verify_in_chunks)
    def verify(self: Any, logits: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Upstream's; a batch of several chunks, none of it trimmed, as in fixed verification."""
        asks = getattr(self, "enable_adaptive_verification", False)  # 0.28.0 never asks
        limit = sampler_module.get_max_chunk_logits(logits.shape[1])
        if not asks or not can_be_chunked(rows=logits.shape[0], ends=input_batch.cu_num_logits_np, limit=limit):
            return verify_in_chunks(self, logits, input_batch, *args, **kwargs)
        self.enable_adaptive_verification = False
        try:
            return verify_in_chunks(self, logits, input_batch, *args, **kwargs)
        finally:
            self.enable_adaptive_verification = True

    sampler_module.RejectionSampler._verify_in_chunks = verify


HOOKS: Mapping[str, Hook] = {"vllm.v1.worker.gpu.spec_decode.rejection_sampler": _chunk_what_was_not_trimmed}
"""The sampler's half; `patches.manager` allows the budget."""
