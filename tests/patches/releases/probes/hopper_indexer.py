"""The real indexer of a release, told that it runs on SM90 or SM100 with DeepGEMM, with or without the patch.

usage: hopper_indexer.py VERSION stock|patched FAMILY facts | VERSION stock|patched FAMILY batches SEED COUNT MODE
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from types import SimpleNamespace

import numpy as np
import release

release.interpret()
version, variant, family, task, *rest = sys.argv[1:]
if variant == "patched":
    release.install(version, "cuda-hopper", "hopper-flattened-indexer")

import torch  # noqa: E402
import vllm.v1.attention.backends.mla.indexer as indexer  # noqa: E402
import vllm.v1.worker.gpu.spec_decode.adaptive_verification as adaptive_verification  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata  # noqa: E402
from vllm.v1.kv_cache_interface import MLAAttentionSpec  # noqa: E402
from vllm.v1.worker.gpu.attn_utils import AttentionCGSupportInfo  # noqa: E402

from tests.patches.flattened_reference import differences, random_batch  # noqa: E402

MULTIPROCESSORS = 4
indexer.current_platform = release.platform(cuda_family=int(family))
indexer.has_deep_gemm = lambda: True
indexer.num_compute_units = lambda _device: MULTIPROCESSORS
indexer.native_next_n_supported = lambda next_n: next_n in (1, 2, 4)
indexer.get_paged_mqa_logits_metadata = lambda *_args, **_kwargs: torch.zeros(MULTIPROCESSORS + 1, 2, dtype=torch.int32)


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


def make_builder(vllm_config: SimpleNamespace, *, pages: int, compress_ratio: int = 1) -> object:
    spec = MLAAttentionSpec(
        block_size=256, num_kv_heads=1, head_size=132, dtype=torch.uint8, compress_ratio=compress_ratio
    )
    return indexer.DeepseekV32IndexerMetadataBuilder(
        spec, ["layer"], vllm_config, torch.device("cpu"), block_table_width=pages
    )


def startup_error(vllm_config: SimpleNamespace) -> str | None:
    """What the engine says when it creates its adaptive manager after loading the weights, or None."""
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


def facts() -> dict[str, object]:
    lines: list[str] = []
    indexer.logger.info_once = lambda message, *values: lines.append(message % values)
    support = indexer.DeepseekV32IndexerMetadataBuilder.get_cudagraph_support
    adaptive, fixed = config(3, adaptive=True), config(3, adaptive=False)
    for vllm_config in (adaptive, fixed, config(7, adaptive=False), config(None, adaptive=False)):
        make_builder(vllm_config, pages=4)
    return {
        "mismatch": {
            backend.__name__: backend.supports_device_cpu_query_lens_mismatch()
            for backend in (indexer.DeepseekV32IndexerBackend, indexer.DeepseekV4IndexerBackend)
        },
        "graphs_adaptive": support(adaptive, None).name,
        "graphs_fixed": support(fixed, None).name,
        "graphs_plain": support(config(None, adaptive=False), None).name,
        "startup_error": startup_error(adaptive),
        "log_adaptive": lines[0],
        "log_fixed": lines[1],
        "log_fixed_7": lines[2],
        "log_plain": lines[3],
    }


def batches(seed: int, count: int, mode: str) -> dict[str, object]:
    """Random batches through the builder's own `build`, each compared with the reference."""
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    moved = 0
    outputs = hashlib.sha256()
    builders = []
    for drafts, compress_ratio, pages in ((3, 4, 5), (7, 1, 1), (5, 4, 17)):
        builder = make_builder(config(drafts, adaptive=mode == "adaptive"), pages=pages, compress_ratio=compress_ratio)
        if mode == "adaptive":
            builder.use_flattening = True
        builders.append((builder, drafts, compress_ratio, pages))
    for _ in range(count):
        builder, drafts, compress_ratio, pages = builders[int(rng.integers(len(builders)))]
        batch = random_batch(rng, drafts=drafts, max_requests=6, max_rows=48, pages=pages)
        boundaries = torch.from_numpy(batch.boundaries)
        host = torch.from_numpy(batch.host_boundaries if mode == "adaptive" else batch.boundaries)
        addresses = [
            buffer.data_ptr()
            for buffer in (
                builder.decode_seq_lens_buffer, builder.expanded_block_table_buffer, builder.decode_lens_buffer
            )
        ]
        metadata = builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=boundaries,
                query_start_loc_cpu=host,
                seq_lens=torch.from_numpy(batch.seq_lens),
                num_reqs=len(batch.seq_lens),
                num_actual_tokens=batch.num_rows,
                max_query_len=int(batch.host_query_lens.max() if mode == "adaptive" else batch.query_lens.max()),
                max_seq_len=int(batch.seq_lens.max()),
                block_table_tensor=torch.from_numpy(batch.block_table),
                slot_mapping=torch.zeros(batch.num_rows, dtype=torch.int64),
            ),
        )
        decode = metadata.decode
        outputs.update(decode.seq_lens.contiguous().numpy().tobytes())
        outputs.update(decode.decode_lens.contiguous().numpy().tobytes())
        if mode == "adaptive":
            wrong += differences(
                batch,
                decode.seq_lens.squeeze(-1).numpy(),
                decode.block_table.numpy(),
                decode.decode_lens.numpy(),
                compress_ratio=compress_ratio,
            )[:1]
            moved += [decode.seq_lens.data_ptr(), decode.block_table.data_ptr(), decode.decode_lens.data_ptr()] != addresses
    return {"wrong": len(wrong), "first": wrong[:1], "moved": moved, "digest": outputs.hexdigest()}


logging.disable(logging.INFO)
assert AttentionCGSupport.ALWAYS.value > AttentionCGSupport.UNIFORM_BATCH.value
if task == "facts":
    print(json.dumps(facts()))
else:
    print(json.dumps(batches(int(rest[0]), int(rest[1]), rest[2])))
