"""Which scheduled drafts are drafts: the scheduler's padding never takes part in anything.

The scheduler pads a request that enters decoding with K drafts of value -1, so that the batch stays uniform
(`Scheduler.schedule`, `pad_spec_decode`). They cannot be accepted. The rejection sampler recognises them by their
position (`gather_draft_sampled`): a draft slot of a step that starts within the prefill is padding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def eligible_drafts(
    scheduled_drafts: NDArray[np.integer],
    scheduled_tokens: NDArray[np.integer],
    computed_tokens: NDArray[np.integer],
    prefill_tokens: NDArray[np.integer],
) -> NDArray[np.int32]:
    """How many drafts of each request were really drafted.

    Args:
        scheduled_drafts: [requests] drafts scheduled, padding included.
        scheduled_tokens: [requests] tokens scheduled, drafts included.
        computed_tokens: [requests] tokens computed before this step. With asynchronous scheduling it may count
            drafts that are still to be rejected; that never moves it below the prefill.
        prefill_tokens: [requests] length of the prefill.

    Returns:
        [requests] the scheduled drafts, or 0 where the first row of the step lies within the prefill.
    """
    first_row = computed_tokens + scheduled_tokens - scheduled_drafts - 1
    eligible: NDArray[np.int32] = np.multiply(scheduled_drafts, first_row >= prefill_tokens, dtype=np.int32)
    return eligible
