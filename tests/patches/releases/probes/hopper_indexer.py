"""The real indexer of 0.28.0, told that it runs on SM90 or SM100 with DeepGEMM, with or without the patch.

usage: hopper_indexer.py VERSION stock|patched FAMILY TASK [then TASK ...], a TASK being one of

    facts
    adaptive|fixed SEED COUNT
    replay SEED COUNT         (on a GPU)
    time REQUESTS TOKENS      (on a GPU)
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import release
import torch

version, variant, family, *words = sys.argv[1:]
if not torch.cuda.is_available():
    release.interpret()
if variant == "patched":
    release.install(version, "cuda-hopper", "hopper-flattened-indexer")

import indexer_steps as steps  # noqa: E402
from vllm.v1.attention.backends.mla import indexer  # noqa: E402

from tests.bench.alternating import microseconds  # noqa: E402

SHAPES = (steps.Shape(3, 5, compress_ratio=4), steps.Shape(7, 1), steps.Shape(5, 17, compress_ratio=4))

steps.pretend(release.platform(cuda_family=int(family)), deep_gemm=True)


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
        "adaptive": steps.config(3, adaptive=True),
        "fixed": steps.config(3, adaptive=False),
        "fixed_7": steps.config(7, adaptive=False),
        "plain": steps.config(None, adaptive=False),
    }
    for vllm_config in configs.values():
        steps.make_builder(vllm_config, steps.Shape(3, 4))
    support = indexer.DeepseekV32IndexerMetadataBuilder.get_cudagraph_support
    return {
        "mismatch": [
            backend.supports_device_cpu_query_lens_mismatch()
            for backend in (indexer.DeepseekV32IndexerBackend, indexer.DeepseekV4IndexerBackend)
        ],
        "graphs": {name: support(vllm_config, None).name for name, vllm_config in configs.items()},
        "log": dict(zip(configs, lines, strict=True)),
        "startup_error": startup_error(configs["adaptive"]) if steps.DEVICE.type == "cpu" else None,
    }


def builders(*, adaptive: bool) -> Iterator[tuple[Any, steps.Shape]]:
    for shape in SHAPES:
        builder = steps.make_builder(steps.config(shape.drafts, adaptive=adaptive), shape)
        if adaptive:
            builder.use_flattening = True
        yield builder, shape


def timings(requests: int, tokens: int) -> dict[str, dict[str, float]]:
    """What preparing decode rows costs, for requests of equal and of unequal length."""
    calls: dict[str, Callable[[], object]] = {}
    for name, ragged in (("uniform", False), ("ragged", True)):
        shape = steps.Shape(tokens - 1, 64)
        builder = steps.make_builder(steps.config(shape.drafts, adaptive=ragged, max_rows=8192), shape)
        builder.use_flattening = True
        step = steps.decode_step(requests, tokens, shape.pages, ragged=ragged)
        calls[name] = lambda builder=builder, step=step: builder._prepare_decode_tensors(**step)
    return microseconds(calls, 300, torch.cuda.synchronize)


def answer(task: str, *numbers: int) -> Any:
    if task == "facts":
        return facts()
    if task == "replay":
        return steps.replayed_steps(builders(adaptive=True), *numbers)
    if task == "time":
        return timings(*numbers)
    adaptive = task == "adaptive"
    return steps.random_steps(builders(adaptive=adaptive), *numbers, adaptive=adaptive)


logging.disable(logging.INFO)
for task, *numbers in release.tasks(words):
    print(json.dumps(answer(task, *map(int, numbers))), flush=True)
