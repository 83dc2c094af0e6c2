"""Our rule for placeholder drafts against upstream's own kernel, run in Triton's interpreter."""

import numpy as np
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  (makes the GPU runner's modules importable on a CPU)
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import gather_draft_sampled

from patches.admission import eligible_drafts
from patches.cpu.interpreter import HOOKS

HOOKS["triton.runtime.interpreter"](interpreter)

REQUEST = st.tuples(
    st.integers(0, 6),  # drafts
    st.integers(1, 5),  # other tokens of the step
    st.integers(0, 12),  # computed before it
    st.integers(1, 12),  # length of the prefill
)


@settings(max_examples=1_000)
@given(st.lists(REQUEST, min_size=1, max_size=12))
def test_eligible_drafts_are_those_that_the_rejection_sampler_does_not_void(batch):
    drafts, others, computed, prefill = np.ascontiguousarray(np.array(batch, dtype=np.int32).T)
    scheduled = drafts + others
    first_tokens = np.cumsum(scheduled) - scheduled
    # Rows of logits: a request's last `drafts + 1` tokens, the first of them its bonus row.
    local = np.concatenate([np.arange(n + 1) for n in drafts])
    request = np.repeat(np.arange(len(batch)), drafts + 1)
    within_step = scheduled[request] - drafts[request] - 1 + local
    positions = np.concatenate([np.arange(c, c + s) for c, s in zip(computed, scheduled, strict=True)])

    sampled, _ = gather_draft_sampled(
        torch.full((len(positions),), 7, dtype=torch.int32),
        torch.from_numpy(positions.astype(np.int64)),
        torch.from_numpy(first_tokens[request] + within_step),
        torch.from_numpy(request.astype(np.int32)),
        torch.from_numpy(local.astype(np.int32)),
        torch.from_numpy(prefill),
    )
    kept = np.bincount(request[(local > 0) & (sampled.numpy() >= 0)], minlength=len(batch))
    assert eligible_drafts(drafts, scheduled, computed, prefill).tolist() == kept.tolist()
