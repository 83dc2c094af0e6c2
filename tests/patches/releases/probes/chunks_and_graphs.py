"""A release's own rejection sampler, configuration and graph manager under adaptive verification, ours and upstream's.

usage: chunks_and_graphs.py VERSION SEED COUNT

Prints, for `upstream` and `patched` each, the `chunks` of the sampler (how many random batches of several chunks were
sampled, of them how many as in one chunk and as fixed verification samples them, and what a batch of which a draft was
trimmed ended with), and the sizes of captured `graphs`: fixed, adaptive, and adaptive where a user gave sizes.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import release
import torch

version, *numbers = sys.argv[1:]
release.interpret()
for patch in ("chunked-full-budgets", "coarser-capture-grid"):
    release.install(version, "cuda-hopper", patch)

from vllm.config import compilation  # noqa: E402
from vllm.config import vllm as configuration  # noqa: E402
from vllm.v1.worker.gpu import cudagraph_utils  # noqa: E402
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS  # noqa: E402
from vllm.v1.worker.gpu.spec_decode import rejection_sampler  # noqa: E402

DRAFTS, VOCABULARY, REQUESTS = 3, 16, 6
CHUNK_ROWS = 9
MODE = compilation.CUDAGraphMode.FULL_DECODE_ONLY
SERVED, SERVED_DRAFTS, LARGEST = 256, 7, 2048
"""Requests, drafts and largest graph of the server whose graphs are counted."""
GIVEN = [8, 1000, 1016]

Method = Callable[..., Any]


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


def sampled(
    verify: Method, made: Any, rng: np.random.Generator, counts: Any, *, chunk_rows: int, trimmed: int = 0
) -> list[list[int]]:
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
    tokens, taken, *_ = verify(made, logits, batch, draft_logits, drafts, positions, limit, NO_LOGPROBS)
    return [row[:count].tolist() for row, count in zip(tokens, taken.tolist(), strict=True)]


def chunks(verify: Method, seed: int, count: int) -> dict[str, Any]:
    """What becomes of random batches that need several chunks."""
    adaptive, fixed = sampler(adaptive=True), sampler(adaptive=False)
    found: dict[str, Any] = {"batches": count, "as_one_chunk": 0, "as_fixed": 0, "refused": 0, "lengths": 0}
    rng = np.random.default_rng(seed)
    for step in range(count):
        counts = rng.integers(1, DRAFTS + 2, REQUESTS)
        counts[:2] = DRAFTS + 1  # with four more at least: more than a chunk
        whole = sampled(verify, fixed, np.random.default_rng([seed, step]), counts, chunk_rows=1000)
        in_chunks = sampled(verify, fixed, np.random.default_rng([seed, step]), counts, chunk_rows=CHUNK_ROWS)
        try:
            got = sampled(verify, adaptive, np.random.default_rng([seed, step]), counts, chunk_rows=CHUNK_ROWS)
        except AssertionError:
            found["refused"] += 1
            continue
        found["as_one_chunk"] += got == whole
        found["as_fixed"] += got == in_chunks
        found["lengths"] += len({len(tokens) for tokens in got})
        assert getattr(adaptive, "enable_adaptive_verification", True), "for the next batch"
    try:
        sampled(verify, adaptive, rng, np.full(REQUESTS, DRAFTS + 1), chunk_rows=CHUNK_ROWS, trimmed=1)
        found["trimmed"] = "sampled"
    except AssertionError:
        found["trimmed"] = "refused"
    return found


def captured(set_sizes: Method, mode: str, given: list[int] | None = None) -> list[int]:
    """Sizes of the decode graphs, ascending."""
    speculation = SimpleNamespace(
        enable_adaptive_verification=mode == "adaptive",
        uses_dynamic_speculative_decoding=lambda: False,
        num_speculative_tokens=SERVED_DRAFTS,
        num_speculative_tokens_per_batch_size=None,
    )
    sizes = {"cudagraph_capture_sizes": given} if given else {"max_cudagraph_capture_size": LARGEST}
    compilation_config = compilation.CompilationConfig(cudagraph_mode=MODE, **sizes)
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation_config,
        scheduler_config=SimpleNamespace(max_num_seqs=SERVED, max_num_batched_tokens=8192),
        speculative_config=speculation,
        performance_mode="balanced",
        num_speculative_tokens=SERVED_DRAFTS,
        uniform_decode_query_len=SERVED_DRAFTS + 1,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
    )
    set_sizes(config)
    manager: Any = object.__new__(cudagraph_utils.CudaGraphManager)
    vars(manager).update(
        vllm_config=config,
        compilation_config=compilation_config,
        cudagraph_mode=MODE,
        max_num_reqs=SERVED,
        decode_query_len=SERVED_DRAFTS + 1,
        varlen_decode=mode == "adaptive",
        lora_capture_cases=[0],
        ubatch_runner=None,
        device=torch.device("cpu"),
        _candidates={},
        _capture_descs={},
    )
    manager._init_candidates()
    (graphs,) = manager._capture_descs.values()
    return sorted(graph.num_tokens for graph in graphs)


logging.disable(logging.WARNING)
verify_in_chunks = rejection_sampler.RejectionSampler._verify_in_chunks
set_cudagraph_sizes = configuration.VllmConfig._set_cudagraph_sizes
answers = {}
for variant, verify, set_sizes in (
    ("upstream", verify_in_chunks.__wrapped__, set_cudagraph_sizes.__wrapped__),
    ("patched", verify_in_chunks, set_cudagraph_sizes),
):
    answers[variant] = {
        "chunks": chunks(verify, *map(int, numbers)),
        "graphs": {
            "fixed": captured(set_sizes, "fixed"),
            "adaptive": captured(set_sizes, "adaptive"),
            "given": captured(set_sizes, "adaptive", GIVEN),
        },
    }
print(json.dumps(answers))
