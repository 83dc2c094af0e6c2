"""The real indexer of 0.28.0, told that it runs on SM90 or SM100 with DeepGEMM, with or without the patch.

usage: hopper_indexer.py VERSION stock|patched FAMILY facts
       hopper_indexer.py VERSION stock|patched FAMILY adaptive|fixed SEED COUNT
       hopper_indexer.py VERSION patched FAMILY replay SEED COUNT      (on a GPU)
       hopper_indexer.py VERSION stock|patched FAMILY time REQUESTS TOKENS    (on a GPU)

On a GPU the platform answers for itself, and kernels are compiled. DeepGEMM's schedule is never computed: it is not
part of what the patch writes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import release
import torch

version, variant, family, task, *numbers = sys.argv[1:]
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    release.interpret()
if variant == "patched":
    release.install(version, "cuda-hopper", "hopper-flattened-indexer")

from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.mla import indexer  # noqa: E402
from vllm.v1.kv_cache_interface import MLAAttentionSpec  # noqa: E402

from tests.patches.flattened_reference import Batch, differences, random_batch  # noqa: E402

MULTIPROCESSORS = 4
SCHEDULE = torch.zeros(MULTIPROCESSORS + 1, 2, dtype=torch.int32, device=DEVICE)
SHAPES = ((3, 4, 5), (7, 1, 1), (5, 4, 17))
"""(drafts, compression, pages of a block table)"""
MAX_ROWS = 48

if DEVICE.type == "cpu":
    indexer.current_platform = release.platform(cuda_family=int(family))
    indexer.native_next_n_supported = lambda next_n: next_n in (1, 2, 4)
indexer.has_deep_gemm = lambda: True
indexer.num_compute_units = lambda _device: MULTIPROCESSORS
indexer.get_paged_mqa_logits_metadata = lambda *_args, **_kwargs: SCHEDULE


def config(drafts: int | None, *, adaptive: bool, max_rows: int = 64) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=None if drafts is None else release.speculation(drafts, adaptive=adaptive),
        num_speculative_tokens=drafts or 0,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_rows, max_num_seqs=16),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        model_config=SimpleNamespace(max_model_len=4096),
        attention_config=SimpleNamespace(resolve_indexer_kv_dtype=lambda default: default),
    )


def make_builder(vllm_config: SimpleNamespace, *, pages: int, compress_ratio: int = 1) -> Any:
    spec = MLAAttentionSpec(
        block_size=256, num_kv_heads=1, head_size=132, dtype=torch.uint8, compress_ratio=compress_ratio
    )
    return indexer.DeepseekV32IndexerMetadataBuilder(spec, ["layer"], vllm_config, DEVICE, block_table_width=pages)


def startup_error(vllm_config: SimpleNamespace) -> str | None:
    """What the engine says when it creates its adaptive manager after loading the weights, or None.

    Its module imports FlashAttention's extension on a GPU, so this is asked on a CPU.
    """
    from vllm.v1.worker.gpu.attn_utils import AttentionCGSupportInfo
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    adaptive_verification.AdaptiveVerificationManager = lambda *_args, **_kwargs: "created"
    backend = indexer.DeepseekV4IndexerBackend
    support = AttentionCGSupportInfo().narrow(
        backend.get_builder_cls().get_cudagraph_support(vllm_config, None), backend.__name__
    )
    try:
        adaptive_verification.maybe_create_adaptive_verification_manager(
            enable_adaptive_verification=True,
            attn_groups=[[SimpleNamespace(backend=backend)]],
            attn_cg_support=support,
            req_states=None,
            query_start_loc=None,
            num_bonus_tokens=1,
            max_total_logits=64,
        )
    except ValueError as error:
        return str(error)
    return None


def facts() -> dict[str, Any]:
    lines: list[str] = []
    indexer.logger.info_once = lambda message, *values: lines.append(message % values)
    configs = {
        "adaptive": config(3, adaptive=True),
        "fixed": config(3, adaptive=False),
        "fixed_7": config(7, adaptive=False),
        "plain": config(None, adaptive=False),
    }
    for vllm_config in configs.values():
        make_builder(vllm_config, pages=4)
    support = indexer.DeepseekV32IndexerMetadataBuilder.get_cudagraph_support
    return {
        "mismatch": [
            backend.supports_device_cpu_query_lens_mismatch()
            for backend in (indexer.DeepseekV32IndexerBackend, indexer.DeepseekV4IndexerBackend)
        ],
        "graphs": {name: support(vllm_config, None).name for name, vllm_config in configs.items()},
        "log": dict(zip(configs, lines, strict=True)),
        "startup_error": startup_error(configs["adaptive"]) if DEVICE.type == "cpu" else None,
    }


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
    )


def compare(batch: Batch, decode: Any, compress_ratio: int) -> list[str]:
    return differences(
        batch,
        decode.seq_lens.squeeze(-1).cpu().numpy(),
        decode.block_table.cpu().numpy(),
        decode.decode_lens.cpu().numpy(),
        tokens_per_page=4096 // batch.block_table.shape[1],
        compress_ratio=compress_ratio,
    )


def make_builders(mode: str) -> Iterator[tuple[Any, int, int, int]]:
    for drafts, compress_ratio, pages in SHAPES:
        builder = make_builder(config(drafts, adaptive=mode != "fixed"), pages=pages, compress_ratio=compress_ratio)
        if mode != "fixed":
            builder.use_flattening = True
        yield builder, drafts, compress_ratio, pages


def random_steps(seed: int, count: int, mode: str) -> dict[str, Any]:
    """Random batches through the builder's own `build`, each compared with the reference."""
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    moved = 0
    outputs = hashlib.sha256()
    builders = list(make_builders(mode))
    for _ in range(count):
        builder, drafts, compress_ratio, pages = builders[int(rng.integers(len(builders)))]
        batch = random_batch(
            rng, drafts=drafts, max_requests=6, max_rows=MAX_ROWS, pages=pages, trimmed=mode == "adaptive"
        )
        decode = builder.build(0, common_metadata(batch)).decode
        outputs.update(decode.seq_lens.contiguous().cpu().numpy().tobytes())
        outputs.update(decode.block_table.contiguous().cpu().numpy().tobytes())
        if mode == "adaptive":
            wrong += compare(batch, decode, compress_ratio)[:1]
            moved += decode.seq_lens.data_ptr() != builder.decode_seq_lens_buffer.data_ptr()
            moved += decode.block_table.data_ptr() != builder.expanded_block_table_buffer.data_ptr()
            moved += decode.decode_lens.data_ptr() != builder.decode_lens_buffer.data_ptr()
    return {"wrong": len(wrong), "first": wrong[:1], "moved": moved, "digest": outputs.hexdigest()}


def replayed_steps(seed: int, count: int) -> dict[str, Any]:
    """`build` captured once a shape, then replayed with other boundaries, lengths and block tables in place."""
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    for builder, drafts, compress_ratio, pages in make_builders("adaptive"):
        captured = (6, MAX_ROWS)

        def draw(drafts: int = drafts, pages: int = pages, captured: tuple[int, int] = captured) -> Batch:
            return random_batch(rng, drafts=drafts, max_requests=6, max_rows=MAX_ROWS, pages=pages, captured=captured)

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
            wrong += compare(batch, decode, compress_ratio)[:1]
    return {"wrong": len(wrong), "first": wrong[:1]}


def microseconds(call: Callable[[], object], repeats: int = 300) -> dict[str, float]:
    """Median time of a call until the device is done, and until the host may go on."""
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    wall, enqueue = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        enqueue.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        wall.append(time.perf_counter() - started)
    return {"wall": round(1e6 * float(np.median(wall)), 1), "enqueue": round(1e6 * float(np.median(enqueue)), 1)}


def timings(requests: int, tokens: int) -> dict[str, dict[str, float]]:
    """What preparing decode rows costs, for requests of equal and of unequal length."""
    pages, max_rows = 64, 8192
    found = {}
    for shape in ("uniform", "ragged"):
        vllm_config = config(tokens - 1, adaptive=shape == "ragged", max_rows=max_rows)
        builder = make_builder(vllm_config, pages=pages)
        builder.use_flattening = True
        query_lens = np.full(requests, tokens, dtype=np.int32)
        if shape == "ragged":
            query_lens[::2] -= 1
        starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        step = {
            "seq_lens": on_device(query_lens + 1000),
            "block_table": torch.ones(requests, pages, dtype=torch.int32, device=DEVICE),
            "decode_lens": on_device(query_lens),
            "decode_lens_cpu": torch.from_numpy(query_lens),
            "query_start_loc": on_device(starts)[:requests],
            "num_decodes": requests,
            "num_decode_tokens": int(starts[-1]),
            "use_native": False,
            "next_n": tokens,
            "max_decode_len": tokens,
        }
        found[shape] = microseconds(lambda builder=builder, step=step: builder._prepare_decode_tensors(**step))
    return found


logging.disable(logging.INFO)
if task == "facts":
    result = facts()
elif task == "replay":
    result = replayed_steps(*map(int, numbers))
elif task == "time":
    result = timings(*map(int, numbers))
else:
    result = random_steps(int(numbers[0]), int(numbers[1]), task)
print(json.dumps(result))
