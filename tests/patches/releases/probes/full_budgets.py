"""A release's own rejection sampler on a batch of several chunks, under adaptive verification.

usage: full_budgets.py VERSION stock|patched SEED COUNT

Prints how many random batches were sampled, of them how many as in one chunk and as fixed verification samples them,
and what a batch of several chunks of which a draft was trimmed ended with.
"""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import release
import torch

version, variant, *numbers = sys.argv[1:]
release.interpret()
if variant == "patched":
    release.install(version, "cuda-hopper", "chunked-full-budgets")

from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS  # noqa: E402
from vllm.v1.worker.gpu.spec_decode import rejection_sampler  # noqa: E402

DRAFTS, VOCABULARY, REQUESTS = 3, 16, 6
CHUNK_ROWS = 9


def sampler(*, adaptive: bool) -> Any:
    states = SimpleNamespace(
        temperature=SimpleNamespace(gpu=torch.ones(REQUESTS)),
        seeds=SimpleNamespace(gpu=torch.arange(REQUESTS, dtype=torch.int64)),
    )
    plain = SimpleNamespace(
        sampling_states=states,
        use_fp64_gumbel=False,
        logprobs_mode="raw_logprobs",
        return_sampling_mask=False,
        apply_sampling_params=lambda logits, *_: logits,
    )
    speculation = SimpleNamespace(
        num_speculative_tokens=DRAFTS,
        enable_adaptive_verification=adaptive,
        rejection_sample_method="standard",
        fly_entropy_threshold=None,
        fly_entropy_top_k=None,
    )
    return rejection_sampler.RejectionSampler(plain, speculation, torch.device("cpu"))


def sampled(made: Any, rng: np.random.Generator, counts: Any, *, chunk_rows: int, trimmed: int = 0) -> list[list[int]]:
    """The tokens of each request, of a batch with `counts` rows each on the host and `trimmed` fewer on the device."""
    rejection_sampler.MAX_CHUNK_BYTES = chunk_rows * VOCABULARY * 4
    ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = int(ends[-1]) - trimmed
    slots = np.repeat(np.arange(REQUESTS), counts)[:rows]
    places = np.concatenate([np.arange(count) for count in counts])[:rows]
    logits = torch.from_numpy(rng.normal(0, 2, (rows, VOCABULARY)).astype(np.float32))
    draft_logits = torch.from_numpy(rng.normal(0, 2, (REQUESTS, DRAFTS, VOCABULARY)).astype(np.float32))
    batch = SimpleNamespace(
        num_reqs=REQUESTS,
        cu_num_logits_np=ends,
        cu_num_logits=torch.from_numpy(np.minimum(ends, rows)),
        idx_mapping=torch.arange(REQUESTS),
        idx_mapping_np=np.arange(REQUESTS),
        expanded_idx_mapping=torch.from_numpy(slots),
        expanded_local_pos=torch.from_numpy(places.astype(np.int32)),
        seq_lens_cpu_upper_bound=torch.full((REQUESTS,), 50, dtype=torch.int32),
    )
    drafts = torch.from_numpy(rng.integers(0, VOCABULARY, rows).astype(np.int32))
    limit = rejection_sampler.get_max_chunk_logits(VOCABULARY)
    positions = torch.from_numpy(20 + places.astype(np.int64))
    tokens, taken, *_ = made._verify_in_chunks(logits, batch, draft_logits, drafts, positions, limit, NO_LOGPROBS)
    return [row[:count].tolist() for row, count in zip(tokens, taken.tolist(), strict=True)]


def main(seed: int, count: int) -> dict[str, Any]:
    adaptive, fixed = sampler(adaptive=True), sampler(adaptive=False)
    found: dict[str, Any] = {"batches": count, "as_one_chunk": 0, "as_fixed": 0, "refused": 0, "lengths": 0}
    rng = np.random.default_rng(seed)
    for step in range(count):
        counts = rng.integers(1, DRAFTS + 2, REQUESTS)
        counts[:2] = DRAFTS + 1  # with four more at least: more than a chunk
        whole = sampled(fixed, np.random.default_rng([seed, step]), counts, chunk_rows=1000)
        in_chunks = sampled(fixed, np.random.default_rng([seed, step]), counts, chunk_rows=CHUNK_ROWS)
        try:
            got = sampled(adaptive, np.random.default_rng([seed, step]), counts, chunk_rows=CHUNK_ROWS)
        except AssertionError:
            found["refused"] += 1
            continue
        found["as_one_chunk"] += got == whole
        found["as_fixed"] += got == in_chunks
        found["lengths"] += len({len(tokens) for tokens in got})
        assert getattr(adaptive, "enable_adaptive_verification", True), "for the next batch"
    try:
        sampled(adaptive, rng, np.full(REQUESTS, DRAFTS + 1), chunk_rows=CHUNK_ROWS, trimmed=1)
        found["trimmed"] = "sampled"
    except AssertionError:
        found["trimmed"] = "refused"
    return found


logging.disable(logging.INFO)
print(json.dumps(main(*map(int, numbers))))
