"""The sparse indexer's builder of a release, and what random and captured steps through it give.

Imported once the patches of a probe are installed: it imports the module that they change. On a GPU the platform
answers for itself, and kernels are compiled. DeepGEMM's schedule is never computed: no patch writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import release
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.patches.flattened_reference import Batch, differences, random_batch

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
MULTIPROCESSORS = 4
SCHEDULE = torch.zeros(MULTIPROCESSORS + 1, 2, dtype=torch.int32, device=DEVICE)
MAX_KEYS, MAX_REQUESTS, MAX_ROWS = 4096, 6, 48


@dataclass(frozen=True)
class Shape:
    """What one builder is made for: drafts, pages of a block table, tokens to a compressed key."""

    drafts: int
    pages: int
    compress_ratio: int = 1


def pretend(platform: SimpleNamespace, *, deep_gemm: bool) -> None:
    """Let a CPU answer as a platform does, with or without DeepGEMM; a GPU answers for itself."""
    if DEVICE.type == "cpu":
        indexer.current_platform = platform
        indexer.native_next_n_supported = lambda next_n: next_n in (1, 2, 4)
    indexer.has_deep_gemm = lambda: deep_gemm
    indexer.num_compute_units = lambda _device: MULTIPROCESSORS
    indexer.get_paged_mqa_logits_metadata = lambda *_args, **_kwargs: SCHEDULE


def config(
    drafts: int | None, *, adaptive: bool, max_rows: int = 64, architecture: str = "DeepseekV4ForCausalLM"
) -> SimpleNamespace:
    """What a builder asks of the engine's configuration; without speculation where `drafts` is None."""
    model_type = "deepseek_v41" if "V41" in architecture else "deepseek_v4"
    return SimpleNamespace(
        speculative_config=None if drafts is None else release.speculation(drafts, adaptive=adaptive),
        num_speculative_tokens=drafts or 0,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_rows, max_num_seqs=128),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        model_config=SimpleNamespace(
            architectures=[architecture], max_model_len=MAX_KEYS, hf_config=SimpleNamespace(model_type=model_type)
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        attention_config=SimpleNamespace(
            resolve_indexer_kv_dtype=lambda default: default, sparse_mla_prefill_workspace_factor=5
        ),
    )


def make_builder(vllm_config: SimpleNamespace, shape: Shape) -> Any:
    # Later releases' specs have no such field.
    compressed = {} if shape.compress_ratio == 1 else {"compress_ratio": shape.compress_ratio}
    spec = MLAAttentionSpec(block_size=256, num_kv_heads=1, head_size=132, dtype=torch.uint8, **compressed)
    return indexer.DeepseekV32IndexerMetadataBuilder(
        spec, ["layer"], vllm_config, DEVICE, block_table_width=shape.pages
    )


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


def compare(batch: Batch, decode: Any, compress_ratio: int) -> list[str]:
    """What of the decode metadata differs from the reference, in words."""
    return differences(
        batch,
        decode.seq_lens.squeeze(-1).cpu().numpy(),
        decode.block_table.cpu().numpy(),
        decode.decode_lens.cpu().numpy(),
        tokens_per_page=MAX_KEYS // batch.block_table.shape[1],
        compress_ratio=compress_ratio,
    )


def random_steps(builders: Iterable[tuple[Any, Shape]], seed: int, count: int, *, adaptive: bool) -> dict[str, Any]:
    """Random batches through the builder's own `build`, each compared with the reference where it is adaptive."""
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    moved = 0
    outputs = hashlib.sha256()
    builders = list(builders)
    for _ in range(count):
        builder, shape = builders[int(rng.integers(len(builders)))]
        batch = random_batch(
            rng,
            drafts=shape.drafts,
            max_requests=MAX_REQUESTS,
            max_rows=MAX_ROWS,
            pages=shape.pages,
            trimmed=adaptive,
        )
        decode = builder.build(0, common_metadata(batch)).decode
        outputs.update(decode.seq_lens.contiguous().cpu().numpy().tobytes())
        outputs.update(decode.block_table.contiguous().cpu().numpy().tobytes())
        if adaptive:
            wrong += compare(batch, decode, shape.compress_ratio)[:1]
            moved += decode.seq_lens.data_ptr() != builder.decode_seq_lens_buffer.data_ptr()
            moved += decode.block_table.data_ptr() != builder.expanded_block_table_buffer.data_ptr()
            moved += decode.decode_lens.data_ptr() != builder.decode_lens_buffer.data_ptr()
    return {"wrong": len(wrong), "first": wrong[:1], "moved": moved, "digest": outputs.hexdigest()}


def replayed_steps(builders: Iterable[tuple[Any, Shape]], seed: int, count: int) -> dict[str, Any]:
    """`build` captured once a builder, then replayed with other boundaries, lengths and block tables in place."""
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    for builder, shape in builders:

        def draw(shape: Shape = shape) -> Batch:
            return random_batch(
                rng,
                drafts=shape.drafts,
                max_requests=MAX_REQUESTS,
                max_rows=MAX_ROWS,
                pages=shape.pages,
                captured=(MAX_REQUESTS, MAX_ROWS),
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
            wrong += compare(batch, decode, shape.compress_ratio)[:1]
    return {"wrong": len(wrong), "first": wrong[:1]}


def decode_step(requests: int, tokens: int, pages: int, *, ragged: bool) -> dict[str, Any]:
    """Arguments of `_prepare_decode_tensors` for requests of equal length, or with every other one a token shorter."""
    query_lens = np.full(requests, tokens, dtype=np.int32)
    if ragged:
        query_lens[::2] -= 1
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    return {
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
