"""DeepSeek-V4.1's real ROCm backends and builders of a release, asked as on gfx950, with or without the patch.

usage: rocm_dsv41.py VERSION stock|patched facts
       rocm_dsv41.py VERSION stock|patched metadata DRAFTS SEED COUNT

What a CPU cannot answer by itself is injected, and nothing else: the platform says that it is ROCm (gfx950), and
AITER, whose compiled modules the model file imports, is absent as it is wherever there is no ROCm.
"""

from __future__ import annotations

import json
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import release
import torch

release.interpret()
version, variant, task, *numbers = sys.argv[1:]
if variant == "patched":
    release.install(version, "rocm-gfx950", "rocm-dsv41-adaptive")

# `vllm.platforms.rocm` asks the driver for its GPUs when it is imported; these are the names its users take from it.
gfx950 = ModuleType("vllm.platforms.rocm")
gfx950.__dict__.update(
    _ON_GFX950=True,
    _ON_GFX942=False,
    _ON_MI3XX=True,
    on_gfx950=lambda: True,
    on_gfx942=lambda: False,
    on_gfx9=lambda: True,
    on_mi3xx=lambda: True,
    get_cdna_version=lambda: 4,
)
sys.modules["vllm.platforms.rocm"] = gfx950

from vllm.models.deepseek_v41 import sparse_mla as shared  # noqa: E402
from vllm.models.deepseek_v41.amd import rocm as model  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.mla import indexer  # noqa: E402
from vllm.v1.kv_cache_interface import MLAAttentionSpec  # noqa: E402

from tests.patches.flattened_reference import Batch, differences, random_batch  # noqa: E402

DRAFTS = {"adaptive": 5, "adaptive_1": 1, "fixed": 5, "fixed_1": 1}


def config(name: str, architecture: str = "DeepseekV41ForCausalLM") -> SimpleNamespace:
    drafts = DRAFTS.get(name)
    return SimpleNamespace(
        speculative_config=None
        if drafts is None
        else release.speculation(drafts, adaptive=name.startswith("adaptive")),
        num_speculative_tokens=drafts or 0,
        model_config=SimpleNamespace(
            architectures=[architecture], max_model_len=4096, hf_config=SimpleNamespace(model_type="deepseek_v41")
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=16),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        attention_config=SimpleNamespace(
            resolve_indexer_kv_dtype=lambda default: default, sparse_mla_prefill_workspace_factor=5
        ),
    )


def facts() -> dict[str, Any]:
    indexer.current_platform = release.platform(rocm=True)
    names = (*DRAFTS, "plain")
    mla = model.DeepseekV4ROCMAiterMLASparseBackend.get_builder_cls()
    swa = model.DeepseekV41ROCMAiterSparseSWABackend.get_builder_cls()
    answers: dict[str, Any] = {
        "mismatch": {
            backend.__name__: backend.supports_device_cpu_query_lens_mismatch()
            for backend in (
                indexer.DeepseekV41IndexerBackend,
                indexer.DeepseekV32IndexerBackend,
                model.DeepseekV4ROCMAiterMLASparseBackend,
                model.DeepseekV41ROCMAiterSparseSWABackend,
            )
        },
        "flattening": {name: indexer._use_flattening(config(name)) for name in names},
        "flattening_of_another_model": indexer._use_flattening(config("adaptive_1", "DeepseekV42ForCausalLM")),
        "builder_is_the_shared_one": issubclass(mla, shared.DeepseekV4SparseMLAMetadataBuilder),
        "shared_builder": shared.DeepseekV4SparseMLAMetadataBuilder.get_cudagraph_support(
            config("adaptive"), None
        ).name,
    }
    for part, builder in (
        ("indexer", indexer.DeepseekV32IndexerMetadataBuilder),
        ("mla", mla),
        ("swa", swa),
    ):
        answers[part] = {name: builder.get_cudagraph_support(config(name), None).name for name in names}
    indexer.current_platform = release.platform(cuda_family=90)
    indexer.has_deep_gemm = lambda: False
    answers["mismatch_off_rocm"] = indexer.DeepseekV41IndexerBackend.supports_device_cpu_query_lens_mismatch()
    return answers


def common_metadata(batch: Batch) -> CommonAttentionMetadata:
    """The step as the model runner describes it: boundaries of the device beside the host's guess."""
    return CommonAttentionMetadata(
        query_start_loc=torch.from_numpy(batch.boundaries),
        query_start_loc_cpu=torch.from_numpy(batch.host_boundaries),
        seq_lens=torch.from_numpy(batch.seq_lens),
        num_reqs=len(batch.seq_lens),
        num_actual_tokens=batch.num_rows,
        max_query_len=int(batch.host_query_lens.max()),
        max_seq_len=int(batch.seq_lens.max()),
        block_table_tensor=torch.from_numpy(batch.block_table),
        slot_mapping=torch.zeros(batch.num_rows, dtype=torch.int64),
        seq_lens_cpu_upper_bound=torch.from_numpy(batch.seq_lens),
    )


def metadata(drafts: int, seed: int, count: int) -> dict[str, Any]:
    """Random adaptive batches through the builder's own `build`, each compared with the reference."""
    indexer.current_platform = release.platform(rocm=True)
    indexer.num_compute_units = lambda _device: 4
    pages = 5
    spec = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    builder = indexer.DeepseekV32IndexerMetadataBuilder(
        spec,
        ["layer"],
        config(next(name for name, steps in DRAFTS.items() if steps == drafts)),
        torch.device("cpu"),
        block_table_width=pages,
    )
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    for _ in range(count):
        batch = random_batch(rng, drafts=drafts, max_requests=6, max_rows=48, pages=pages)
        decode = builder.build(0, common_metadata(batch)).decode
        if decode is None or decode.seq_lens.shape != (batch.num_rows, 1):
            wrong.append("not one row a token")
            continue
        wrong += differences(
            batch,
            decode.seq_lens.squeeze(-1).numpy(),
            decode.block_table.numpy(),
            decode.decode_lens.numpy(),
            tokens_per_page=4096 // pages,
        )[:1]
    return {"wrong": len(wrong), "first": wrong[:1]}


logging.disable(logging.INFO)
print(json.dumps(facts() if task == "facts" else metadata(*map(int, numbers))))
