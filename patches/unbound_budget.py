"""unbound-budget-shortcut: where the host knows how the drafts are split, the device need not work it out.

Upstream's `reallocate_drafts` ranks on the device only where the budget binds. But it uploads the drafts and the
other tokens of each request and has a chain of small kernels add them up to boundaries in every step, also where the
budget takes every draft, or none. At low load that is nearly every step, and the launches are host time that the
device then waits for.

In those steps every request keeps all its drafts, or none, and the host knows the boundaries. What the sampler needs,
where each request's logits end, is one small upload. Where each request's tokens end is on the device already:
`GPUModelRunner.prepare_inputs` uploads the host's boundaries before it asks, and `compact_batch` leaves them exact
when the budget is all that was scheduled, or 0. They are not when placeholder drafts were scheduled and left out
(`patches.admission`); then they are uploaded here too.

The decision is taken from the budget and the scheduler's counts, which are the same on every tensor-parallel rank. It
changes where boundaries are computed, not which: what kernels a step then takes is still decided from what they read
on the device.

Upstream reference: `AdaptiveVerificationManager.reallocate_drafts`, all releases. Hardware: all. Delete this when
upstream leaves the chain out where the budget does not bind.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from patches.full_budgets import write_ends
from patches.install import Hook

PATCH_ID = "unbound-budget-shortcut"


def split_is_known(*, budget: int, eligible: int) -> bool:
    """Whether the host knows how many drafts each request keeps: all of them, or none.

    Args:
        budget: Drafts to verify.
        eligible: Drafts that were really drafted, of all requests.
    """
    return budget in (0, eligible)


def host_boundaries_are_exact(*, budget: int, scheduled: int) -> bool:
    """Whether `compact_batch` returned each request's real token count, not an even split.

    Args:
        budget: Drafts to verify.
        scheduled: Drafts that were scheduled, placeholders included.
    """
    return budget in (0, scheduled)


def running_sums(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """[n + 1] 0 and the running sums of `counts` ([n]): where each request's rows end."""
    ends = np.empty(counts.size + 1, dtype=np.int32)
    write_ends(counts, ends)
    return ends


def padded_boundaries(counts: NDArray[np.int32], requests: int) -> NDArray[np.int32]:
    """[requests + 1] 0, the running sums of `counts` ([n]) and, behind them, their total.

    Kernels read boundaries of padding requests too: they are empty and end where the batch does.
    """
    ends = np.full(requests + 1, counts.sum(), dtype=np.int32)
    write_ends(counts, ends[: counts.size + 1])
    return ends


HOOKS: Mapping[str, Hook] = {}
"""`patches.manager` asks before it ranks."""
