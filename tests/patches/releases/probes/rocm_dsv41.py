"""DeepSeek-V4.1's real ROCm backends and builders of a release, asked as on gfx950, with or without the patch.

usage: rocm_dsv41.py VERSION stock|patched TASK [then TASK ...], a TASK being one of

    facts
    metadata DRAFTS SEED COUNT

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

release.interpret()
version, variant, *words = sys.argv[1:]
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

import indexer_steps as steps  # noqa: E402
from vllm.models.deepseek_v41 import sparse_mla as shared  # noqa: E402
from vllm.models.deepseek_v41.amd import rocm as model  # noqa: E402
from vllm.v1.attention.backends.mla import indexer  # noqa: E402

from tests.patches.flattened_reference import random_batch  # noqa: E402

DRAFTS = {"adaptive": 5, "adaptive_1": 1, "fixed": 5, "fixed_1": 1}


def config(name: str, architecture: str = "DeepseekV41ForCausalLM") -> SimpleNamespace:
    return steps.config(DRAFTS.get(name), adaptive=name.startswith("adaptive"), architecture=architecture)


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


def metadata(drafts: int, seed: int, count: int) -> dict[str, Any]:
    """Random adaptive batches through the builder's own `build`, each compared with the reference."""
    indexer.current_platform = release.platform(rocm=True)
    indexer.num_compute_units = lambda _device: steps.MULTIPROCESSORS
    shape = steps.Shape(drafts, 5)
    # Nothing is forced on it: whether it flattens is what is asked.
    builder = steps.make_builder(config(next(name for name, number in DRAFTS.items() if number == drafts)), shape)
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    for _ in range(count):
        batch = random_batch(
            rng, drafts=drafts, max_requests=steps.MAX_REQUESTS, max_rows=steps.MAX_ROWS, pages=shape.pages
        )
        decode = builder.build(0, steps.common_metadata(batch)).decode
        if decode is None or decode.seq_lens.shape != (batch.num_rows, 1):
            wrong.append("not one row a token")
            continue
        wrong += steps.compare(batch, decode, shape.compress_ratio)[:1]
    return {"wrong": len(wrong), "first": wrong[:1]}


logging.disable(logging.INFO)
for task, *numbers in release.tasks(words):
    print(json.dumps(facts() if task == "facts" else metadata(*map(int, numbers))), flush=True)
