"""A release's own sparse indexer, told that it runs on SM90 or gfx950, with its rows built by one kernel or not.

usage: ragged_metadata.py VERSION HARDWARE PATCHES adaptive|fixed SEED COUNT
       ragged_metadata.py VERSION HARDWARE PATCHES replay SEED COUNT           (on a GPU)
       ragged_metadata.py VERSION HARDWARE PATCHES time REQUESTS TOKENS PAGES  (on a GPU)
       ragged_metadata.py VERSION HARDWARE PATCHES TASK ... , TASK ...         (one after another, a line each)

HARDWARE is `cuda-hopper` or `rocm-gfx950`; PATCHES are ids separated by commas, or `none`. On a GPU the platform
answers for itself, and kernels are compiled. DeepGEMM's schedule is never computed: no patch writes it. `time` prints
upstream's code and the patch's in turn, in one process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import release
import torch

version, hardware, ids, *words = sys.argv[1:]
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    release.interpret()
PATCHES = [] if ids == "none" else ids.split(",")
for patch in PATCHES:
    release.install(version, hardware, patch)

from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.mla import indexer  # noqa: E402
from vllm.v1.kv_cache_interface import MLAAttentionSpec  # noqa: E402

from tests.bench.alternating import microseconds  # noqa: E402
from tests.patches.flattened_reference import Batch, differences, random_batch  # noqa: E402

MULTIPROCESSORS = 4
SCHEDULE = torch.zeros(MULTIPROCESSORS + 1, 2, dtype=torch.int32, device=DEVICE)
MAX_KEYS, MAX_ROWS = 4096, 48
SHAPES = ((3, 5), (7, 1), (5, 17))
"""(drafts, pages of a block table)"""

if DEVICE.type == "cpu":
    rocm = hardware == "rocm-gfx950"
    indexer.current_platform = release.platform(cuda_family=None if rocm else 90, rocm=rocm)
    indexer.native_next_n_supported = lambda next_n: next_n in (1, 2, 4)
indexer.has_deep_gemm = lambda: hardware == "cuda-hopper"
indexer.num_compute_units = lambda _device: MULTIPROCESSORS
indexer.get_paged_mqa_logits_metadata = lambda *_args, **_kwargs: SCHEDULE


def make_builder(drafts: int, *, adaptive: bool, pages: int, max_rows: int = 64) -> Any:
    config = SimpleNamespace(
        speculative_config=release.speculation(drafts, adaptive=adaptive),
        num_speculative_tokens=drafts,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_rows, max_num_seqs=128),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        model_config=SimpleNamespace(
            architectures=["DeepseekV4ForCausalLM"],
            max_model_len=MAX_KEYS,
            hf_config=SimpleNamespace(model_type="deepseek_v4"),
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        attention_config=SimpleNamespace(
            resolve_indexer_kv_dtype=lambda default: default, sparse_mla_prefill_workspace_factor=5
        ),
    )
    spec = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    builder = indexer.DeepseekV32IndexerMetadataBuilder(spec, ["layer"], config, DEVICE, block_table_width=pages)
    builder.use_flattening = True
    return builder


def on_device(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array).to(DEVICE)


def common_metadata(batch: Batch) -> CommonAttentionMetadata:
    """The step as the model runner describes it: boundaries of the device beside the host's guess."""
    return CommonAttentionMetadata(
        query_start_loc=on_device(batch.boundaries),
        query_start_loc_cpu=torch.from_numpy(batch.host_boundaries),
        seq_lens=on_device(batch.seq_lens),
        num_reqs=len(batch.seq_lens),
        num_actual_tokens=batch.num_rows,
        max_query_len=int(batch.host_query_lens.max()),
        max_seq_len=int(batch.seq_lens.max()),
        block_table_tensor=on_device(batch.block_table),
        slot_mapping=torch.zeros(batch.num_rows, dtype=torch.int64, device=DEVICE),
        seq_lens_cpu_upper_bound=torch.from_numpy(batch.seq_lens),
    )


def compare(batch: Batch, decode: Any) -> list[str]:
    return differences(
        batch,
        decode.seq_lens.squeeze(-1).cpu().numpy(),
        decode.block_table.cpu().numpy(),
        decode.decode_lens.cpu().numpy(),
        tokens_per_page=MAX_KEYS // batch.block_table.shape[1],
    )


def random_steps(mode: str, seed: int, count: int) -> dict[str, Any]:
    """Random batches through the builder's own `build`, each compared with the reference."""
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    moved = 0
    outputs = hashlib.sha256()
    builders = [
        (make_builder(drafts, adaptive=mode == "adaptive", pages=pages), drafts, pages) for drafts, pages in SHAPES
    ]
    for _ in range(count):
        builder, drafts, pages = builders[int(rng.integers(len(builders)))]
        batch = random_batch(
            rng, drafts=drafts, max_requests=6, max_rows=MAX_ROWS, pages=pages, trimmed=mode == "adaptive"
        )
        decode = builder.build(0, common_metadata(batch)).decode
        outputs.update(decode.seq_lens.contiguous().cpu().numpy().tobytes())
        outputs.update(decode.block_table.contiguous().cpu().numpy().tobytes())
        if mode == "adaptive":
            wrong += compare(batch, decode)[:1]
            moved += decode.seq_lens.data_ptr() != builder.decode_seq_lens_buffer.data_ptr()
            moved += decode.block_table.data_ptr() != builder.expanded_block_table_buffer.data_ptr()
            moved += decode.decode_lens.data_ptr() != builder.decode_lens_buffer.data_ptr()
    return {"wrong": len(wrong), "first": wrong[:1], "moved": moved, "digest": outputs.hexdigest()}


def replayed_steps(seed: int, count: int) -> dict[str, Any]:
    """`build` captured once a shape, then replayed with other boundaries, lengths and block tables in place."""
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    for drafts, pages in SHAPES:
        builder = make_builder(drafts, adaptive=True, pages=pages)

        def draw(drafts: int = drafts, pages: int = pages) -> Batch:
            return random_batch(
                rng, drafts=drafts, max_requests=6, max_rows=MAX_ROWS, pages=pages, captured=(6, MAX_ROWS)
            )

        metadata = common_metadata(draw())
        builder.build(0, metadata)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode = builder.build(0, metadata).decode
        for _ in range(count):
            batch = draw()
            metadata.query_start_loc.copy_(on_device(batch.boundaries))
            metadata.seq_lens.copy_(on_device(batch.seq_lens))
            metadata.block_table_tensor.copy_(on_device(batch.block_table))
            graph.replay()
            torch.cuda.synchronize()
            wrong += compare(batch, decode)[:1]
    return {"wrong": len(wrong), "first": wrong[:1]}


def timings(requests: int, tokens: int, pages: int) -> dict[str, dict[str, float]]:
    """Preparing decode rows, even and ragged, by upstream's code and by the patch's."""
    ours = indexer.DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors
    upstream = getattr(ours, "__wrapped__", ours)
    calls: dict[str, Callable[[], object]] = {}
    for shape in ("uniform", "ragged"):
        query_lens = np.full(requests, tokens, dtype=np.int32)
        if shape == "ragged":
            query_lens[::2] -= 1
        starts = on_device(np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32))
        step = {
            "seq_lens": on_device(query_lens + 1000),
            "block_table": torch.ones(requests, pages, dtype=torch.int32, device=DEVICE),
            "decode_lens": on_device(query_lens),
            "decode_lens_cpu": torch.from_numpy(query_lens),
            "query_start_loc": starts[:requests],
            "num_decodes": requests,
            "num_decode_tokens": int(query_lens.sum()),
            "use_native": False,
            "next_n": tokens,
            "max_decode_len": tokens,
        }
        adaptive = make_builder(tokens - 1, adaptive=True, pages=pages, max_rows=8192)
        # Upstream takes its even path only where verification is fixed.
        other = make_builder(tokens - 1, adaptive=shape == "ragged", pages=pages, max_rows=8192)
        calls[f"{shape}, upstream"] = lambda other=other, step=step: upstream(other, **step)
        calls[f"{shape}, one kernel"] = lambda adaptive=adaptive, step=step: adaptive._prepare_decode_tensors(**step)
    on_gpu = DEVICE.type == "cuda"
    return microseconds(calls, 400 if on_gpu else 3, torch.cuda.synchronize if on_gpu else lambda: None)


logging.disable(logging.INFO)
for task, *numbers in (part.split() for part in " ".join(words).split(",")):
    result: Any
    if task == "replay":
        result = replayed_steps(*map(int, numbers))
    elif task == "time":
        result = timings(*map(int, numbers))
    else:
        result = random_steps(task, int(numbers[0]), int(numbers[1]))
    print(json.dumps(result), flush=True)
