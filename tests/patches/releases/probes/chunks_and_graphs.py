"""A release's own rejection sampler, configuration and graph manager under adaptive verification, ours and upstream's.

usage: chunks_and_graphs.py VERSION SEED COUNT

Prints, for `upstream` and `patched` each, the `chunks` of the sampler (how many random batches of several chunks were
sampled, of them how many as in one chunk and as fixed verification samples them, and what a batch of which a draft was
trimmed ended with), and the sizes of captured `graphs`: fixed, adaptive, and adaptive where a user gave sizes. With it
`full`: requests in the graph that a full batch of 1, 2, 3 ... requests replays, and what else there is to know of them.
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
for patch in ("chunked-full-budgets", "coarser-capture-grid", "full-batch-graphs"):
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
WIDTH = SERVED_DRAFTS + 1
"""Requests, drafts and largest graph of the server whose graphs are counted."""
GIVEN = [8, 1000, 1016]

Method = Callable[..., Any]

CAPTURE: tuple[Any, ...] = (
    configuration.VllmConfig._set_cudagraph_sizes,
    cudagraph_utils.CudaGraphManager._init_candidates,
)
"""Methods that decide which graphs there are, ours, which know upstream's."""


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


def graphs(variant: str, mode: str, given: list[int] | None = None, *, engines: int = 1) -> Any:
    """A graph manager that says it has captured what it would."""
    set_sizes, add_graphs = (method if variant == "patched" else method.__wrapped__ for method in CAPTURE)
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
        uniform_decode_query_len=WIDTH,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=engines),
    )
    set_sizes(config)
    manager: Any = object.__new__(cudagraph_utils.CudaGraphManager)
    vars(manager).update(
        vllm_config=config,
        compilation_config=compilation_config,
        cudagraph_mode=MODE,
        max_num_reqs=SERVED,
        decode_query_len=WIDTH,
        varlen_decode=mode == "adaptive",
        lora_capture_cases=[0],
        ubatch_runner=None,
        device=torch.device("cpu"),
        _candidates={},
        _capture_descs={},
        _lora_dispatch_map={},
        _max_lora_case=0,
        _graphs_captured=True,
    )
    add_graphs(manager)
    (descriptions,) = manager._capture_descs.values()
    assert descriptions == sorted(descriptions, key=lambda each: -each.num_tokens), (
        "upstream captures the largest first"
    )
    manager.graphs = dict.fromkeys(descriptions)
    return manager


def captured(variant: str, mode: str, given: list[int] | None = None) -> list[int]:
    """Tokens of the decode graphs that a batch of any shape may replay, ascending; under fixed ones all are uniform."""
    every = graphs(variant, mode, given).graphs
    return sorted(graph.num_tokens for graph in every if mode == "fixed" or graph.uniform_token_count is None)


def largest_alone(variant: str, tokens: int) -> bool:
    """Whether every graph that a profile of the two largest graphs asks for is one of them, as upstream asserts.

    Args:
        variant: Whose graphs.
        tokens: Most tokens of a batch. A dummy batch has at most as many requests as that has full ones.
    """
    manager = graphs(variant, "adaptive", [*GIVEN[:1], tokens // WIDTH * WIDTH, tokens])
    manager.graphs = dict.fromkeys(list(manager.graphs)[:2])
    requests = tokens // WIDTH
    return all(
        manager.dispatch(requests, count, WIDTH if count == requests * WIDTH else None, 0, max_query_len=WIDTH)
        in manager.graphs
        for count in manager.captured_token_counts()
    )


def full_batches(variant: str) -> dict[str, Any]:
    """What full batches replay, and that nothing else does."""
    manager, fixed = graphs(variant, "adaptive"), graphs(variant, "fixed")

    def requests_in_graph(of: Any, requests: int, trimmed: int, longest: int | None = WIDTH) -> list[int]:
        tokens = WIDTH * requests - trimmed
        graph = of.dispatch(requests, tokens, None if trimmed else WIDTH, 0, max_query_len=longest)
        return [graph.num_tokens, graph.num_reqs]

    numbers = range(1, SERVED + 1)
    uniform = [graph for graph in manager.graphs if graph.uniform_token_count]
    return {
        "replayed": [requests_in_graph(manager, number, 0) for number in numbers],
        "trimmed": [requests_in_graph(manager, number, 1) for number in numbers],
        "prefilling": [requests_in_graph(manager, number, 0, None) for number in numbers],
        "fixed": [requests_in_graph(fixed, number, 0) for number in numbers],
        "graphs": len(uniform),
        "profiled": manager.captured_token_counts() if variant == "patched" else None,
        "largest_alone": [largest_alone(variant, tokens) for tokens in (496, 500)],
        "of_two_engines": sum(bool(g.uniform_token_count) for g in graphs(variant, "adaptive", engines=2).graphs),
    }


logging.disable(logging.WARNING)
verify_in_chunks = rejection_sampler.RejectionSampler._verify_in_chunks
answers = {}
for variant, verify in (("upstream", verify_in_chunks.__wrapped__), ("patched", verify_in_chunks)):
    answers[variant] = {
        "chunks": chunks(verify, *map(int, numbers)),
        "graphs": {
            "fixed": captured(variant, "fixed"),
            "adaptive": captured(variant, "adaptive"),
            "given": captured(variant, "adaptive", GIVEN),
        },
        "full": full_batches(variant),
    }
print(json.dumps(answers))
