"""block-rejection-bounds: block verification looks one draft ahead, also where there is none.

Upstream. `rejection_sample` gives every row of logits the token that was fed there (`draft_sampled`, [num_logits]), so
the draft that row i verifies is `draft_sampled[i + 1]`. Block verification first sums the residual mass of each row
(`_compute_local_residual_mass_kernel`), and that kernel knows a request's bonus row, which verifies no draft, only
by its position: the K-th.

Why that is wrong here. Under adaptive verification a trimmed request ends before position K, so its bonus row looks
like any other. In the middle of a batch the look-ahead hits the next request's first row: harmless, nothing reads
the mass. In the last request it reads past the tensor. What lies there is usually another allocation of PyTorch's
pool, now and then an unmapped page: then the GPU faults, and the engine hangs until its five-minute timeout. Fixed
verification and standard rejection never get there.

Instead. The tensor is given one more element, -1. The kernel takes a negative token for a placeholder and returns,
which is what a bonus row wants. Every other kernel masks its look-ahead by the request's own end, so none of them
sees the new element, and sampling stays the same number for number.

Upstream reference: #60945, in 0.32.0, where the kernel compares with the number of rows. Hardware: all. vLLM: 0.28.0
to 0.31.0. Delete this when 0.31.0 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from types import ModuleType
from typing import Any

from patches.install import Hook, replace_everywhere

_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
_BOUND_IN = ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "vllm.v1.watermarking.spec_decode")

_PLACEHOLDER = -1
"""The draft token that upstream's kernels never accept and never look up."""


def _bound_the_look_ahead(sampler_module: ModuleType) -> None:
    from torch.nn.functional import pad

    rejection_sample = sampler_module.rejection_sample

    @wraps(rejection_sample)
    def bounded_rejection_sample(
        target_logits: Any,
        draft_logits: Any,
        draft_sampled: Any,
        *args: Any,
        use_block_verification: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Upstream's, with a placeholder behind the last row when the mass kernel will run."""
        if use_block_verification and draft_logits is not None:
            draft_sampled = pad(draft_sampled, (0, 1), value=_PLACEHOLDER)
        return rejection_sample(
            target_logits,
            draft_logits,
            draft_sampled,
            *args,
            use_block_verification=use_block_verification,
            **kwargs,
        )

    replace_everywhere("rejection_sample", bounded_rejection_sample, sampler_module, _BOUND_IN)


HOOKS: Mapping[str, Hook] = {_SAMPLER: _bound_the_look_ahead}
