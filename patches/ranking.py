"""fused-ranking: which drafts are admitted, and every boundary that follows from it, in one kernel.

Upstream's `reallocate_drafts` uploads two arrays, ranks with a compiled chain around `torch.topk`, and adds up
boundaries with seven more operations: a dozen launches for a few thousand numbers. `torch.topk` also promises nothing
about ties, so where several ranks must agree tp-consensus puts a slower sort in its place.

One program does it all. It multiplies a request's confidences up to survival probabilities, position by position, so
that rounding never lets survival rise along a request. Probabilities are not negative, so their bit patterns order as
integers; a bisection over these finds the smallest admitted survival, counting the drafts at or above the middle each
time, and it ends early where a count hits the budget. Drafts above it are admitted. Of those equal to it the earlier
requests' come first, and then the earlier positions: the order of `patches.consensus.admit_best_drafts`, the same on
every rank. The counts are added up to both boundaries at once.

A confidence outside 0..1 counts as the nearer bound and NaN as 0, so that broken estimates cannot admit a draft
without those before it.

Upstream reference: `AdaptiveVerificationManager.reallocate_drafts` and `_assign_draft_token_budget`, all releases.
Hardware: all. Servers whose requests and drafts do not fit into one program (1,024 x 16) keep upstream's chain, and
so do those where upstream wants the admitted counts on the host (0.33.0, batch-sharded sampling). Delete this when
upstream ranks in one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from patches.install import Hook
from patches.kernel_launch import Launcher

PATCH_ID = "fused-ranking"

_MAX_DRAFTS = 1024 * 16
"""Requests x drafts, each rounded up, that one program holds."""

_DRAFTS_PER_WARP = 256
_MAX_WARPS = 16

_ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0, the largest survival."""


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_requests", "max_requests", "budget", "bonus_tokens"],
    do_not_specialize_on_alignment=[
        "confidences_ptr",
        "batch_ptr",
        "admitted_ptr",
        "logit_ends_ptr",
        "token_ends_ptr",
    ],
)
def _allot_kernel(  # type: ignore[no-untyped-def]
    confidences_ptr,
    batch_ptr,
    admitted_ptr,
    logit_ends_ptr,
    token_ends_ptr,
    num_requests,
    max_requests,
    budget,
    bonus_tokens,
    STEPS: tl.constexpr,  # noqa: N803
    REQUESTS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    requests = tl.arange(0, REQUESTS)
    columns = tl.arange(0, COLUMNS)
    live = requests < num_requests
    slots = tl.load(batch_ptr + requests, mask=live, other=0).to(tl.int64)
    drafts = tl.load(batch_ptr + num_requests + requests, mask=live, other=0)
    others = tl.load(batch_ptr + 2 * num_requests + requests, mask=live, other=0)

    survival = tl.full([REQUESTS], 1.0, tl.float32)
    keys = tl.full([REQUESTS, COLUMNS], -1, tl.int32)
    for step in tl.static_range(STEPS):
        confidence = tl.load(confidences_ptr + slots * STEPS + step, mask=live, other=0.0)
        confidence = tl.where(confidence > 0.0, confidence, 0.0)
        survival = survival * tl.where(confidence < 1.0, confidence, 1.0)
        key = survival.to(tl.int32, bitcast=True)
        here = (columns == step)[None, :] & (drafts > step)[:, None]
        keys = tl.where(here, key[:, None], keys)

    # At least `budget` drafts have a key of `low` or more, fewer have `high` or more.
    low = 0
    high = _ONE + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        count = tl.sum((keys >= middle).to(tl.int32))
        low = tl.where(count >= budget, middle, low)
        high = tl.where(count < budget, middle, tl.where(count == budget, middle + 1, high))

    above = tl.sum((keys > low).to(tl.int32), axis=1)
    tied = tl.sum((keys == low).to(tl.int32), axis=1)
    room = budget - tl.sum(above, axis=0)
    tied_earlier = tl.cumsum(tied, axis=0) - tied
    admitted = above + tl.minimum(tl.maximum(room - tied_earlier, 0), tied)
    tl.store(admitted_ptr + requests, admitted, mask=live)

    logit_ends = tl.cumsum(admitted + bonus_tokens, axis=0)
    tl.store(logit_ends_ptr, 0)
    tl.store(logit_ends_ptr + 1 + requests, logit_ends, mask=live)
    # Requests behind the last one are empty, so their ends are the batch's.
    token_ends = tl.cumsum(admitted + others, axis=0)
    tl.store(token_ends_ptr, 0)
    tl.store(token_ends_ptr + 1 + requests, token_ends, mask=requests < max_requests)
    total = tl.sum(admitted + others, axis=0)
    for start in tl.range(REQUESTS, max_requests, REQUESTS):
        behind = start + requests
        tl.store(token_ends_ptr + 1 + behind, tl.zeros([REQUESTS], tl.int32) + total, mask=behind < max_requests)


class Ranking:
    """Allots budgets for one manager."""

    def __init__(self, confidences: torch.Tensor, logit_ends: torch.Tensor, token_ends: torch.Tensor) -> None:
        """Compile for every size of batch, so that no step does.

        Args:
            confidences: [max requests, steps] float32, contiguous, by request slot; read in each step.
            logit_ends: [max requests + 1] int32, written in each step.
            token_ends: [max requests + 1] int32, written in each step.
        """
        self._confidences, self._logit_ends, self._token_ends = confidences, logit_ends, token_ends
        self._max_requests, self._steps = confidences.shape
        self.admitted = torch.zeros(self._max_requests, dtype=torch.int32, device=confidences.device)
        """[max requests] drafts admitted in the last step that ranked, in the batch's order."""
        self._launcher = Launcher(_allot_kernel)
        requests = 1
        while requests <= self._max_requests:
            nothing = torch.zeros(3 * requests, dtype=torch.int32, device=confidences.device)
            self.allot(nothing, budget=0, bonus_tokens=0)
            requests = _rounded(requests) + 1

    @staticmethod
    def fits(max_requests: int, steps: int) -> bool:
        """Whether one program holds a full batch."""
        return bool(_rounded(max_requests) * triton.next_power_of_2(steps) <= _MAX_DRAFTS)

    def allot(self, batch: torch.Tensor, *, budget: int, bonus_tokens: int) -> None:
        """Admit the `budget` drafts of highest survival, and write the boundaries of the batch.

        Args:
            batch: [3 x requests] int32, readable on the device until the launch is done: the slots, the drafts that
                may be admitted, and the tokens that are not drafts, of every request.
            budget: Drafts to admit, at most the sum of those that may be.
            bonus_tokens: Logits of each request besides its drafts'.
        """
        requests = batch.shape[0] // 3
        rows, columns = _rounded(requests), triton.next_power_of_2(self._steps)
        self._launcher.launch(
            1,
            (
                self._confidences,
                batch,
                self.admitted,
                self._logit_ends,
                self._token_ends,
                requests,
                self._max_requests,
                budget,
                bonus_tokens,
            ),
            (self._steps, rows, columns),
            num_warps=min(max(rows * columns // _DRAFTS_PER_WARP, 1), _MAX_WARPS),
        )


def _rounded(requests: int) -> int:
    """Powers of four from 16 on: few variants to compile, and a small batch does not pay for a large one."""
    rows = 16
    while rows < requests:
        rows *= 4
    return rows


HOOKS: Mapping[str, Hook] = {}
"""`patches.manager` ranks with it."""
