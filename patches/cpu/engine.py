"""cpu-engine: adaptive verification on vLLM's CPU platform, kernels interpreted.

Upstream's V2 model runner, DSpark and `AdaptiveVerificationManager` are plain PyTorch and Triton. What stands
between them and a CPU is assumptions, one hook each:

- configuration insists on full CUDA graphs, and the CPU platform turns them off: a CPU replays no graph, so every
  batch shape is allowed (`VllmConfig._validate_adaptive_verification`, `get_varlen_cudagraph_unsupported_backend`,
  `resolve_adaptive_cudagraph_mode`);
- cost tables are profiled during graph capture, which never happens: they are injected (`patches.cpu.costs`);
- the ranking, whosever it is, is compiled by Inductor, which wants a C++ compiler on the user's machine: it runs
  eagerly;
- attention returns its output buffer unwritten in warm-up, and what lies there may be NaN: it is zeroed;
- top-k and top-p are cut by a Triton kernel wherever there is Triton, and the interpreter cannot run it (its loop
  counts in Python's integers, which have no `to`): upstream's PyTorch path for CPUs without Triton is taken;
- matrix products are compiled for each number of rows and kept, a quarter to half a MiB each: up to 1,024 by vLLM's
  oneDNN, twice as many by PyTorch, and 32 by every layer. Batches come in all sizes, so a server went on growing for
  hours. Each of them keeps 16 here, and a layer its last; to compile one takes a small part of an interpreted step.

The interpreter's own gaps are in `patches.cpu.interpreter`. Delete this when upstream's CPU platform serves adaptive
verification by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import wrapt

from patches.cpu import interpreter
from patches.cpu.costs import DRAFT_CURVE_MS, VERIFY_CURVE_MS
from patches.install import Hook, replace_everywhere

_RUNNER = "vllm.v1.worker.gpu.model_runner"
_ADAPTIVE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
_ATTENTION = "vllm.v1.worker.gpu.attn_utils"

KEPT_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
"""Compiled matrix products that oneDNN and PyTorch each keep; a batch needs about ten, one for each shape of weights.

Few, so that they are all there soon and memory is level: with 128 a server still grew after 50 minutes."""


def _allow_without_graphs(config_module: ModuleType) -> None:
    """Run upstream's other checks (LoRA, pipeline parallelism) as if full graphs were on."""

    def validate(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        compilation = instance.compilation_config
        mode = compilation.cudagraph_mode
        compilation.cudagraph_mode = type(mode).FULL_DECODE_ONLY
        try:
            wrapped(*args, **kwargs)
        finally:
            compilation.cudagraph_mode = mode

    wrapt.wrap_function_wrapper(config_module, "VllmConfig._validate_adaptive_verification", validate)


def _allow_every_decode_width(attention_module: ModuleType) -> None:
    def every_backend_replays(*_args: object, **_kwargs: object) -> None:
        """No backend is unsupported: nothing is replayed on a CPU."""

    replace_everywhere(
        "get_varlen_cudagraph_unsupported_backend", every_backend_replays, attention_module, (_ADAPTIVE,)
    )


def _plan_without_capture(adaptive_module: ModuleType) -> None:
    def keep_mode(mode: object, **_kwargs: object) -> object:
        """Keep the mode that the CPU platform chose."""
        return mode

    create = adaptive_module.maybe_create_adaptive_verification_manager

    def create_with_costs(**kwargs: Any) -> Any:
        """Create upstream's manager and give it the cost curves that nothing will profile."""
        manager = create(**kwargs)
        if manager is not None:
            manager.set_cost_curves(list(DRAFT_CURVE_MS), list(VERIFY_CURVE_MS))
        return manager

    replace_everywhere("resolve_adaptive_cudagraph_mode", keep_mode, adaptive_module, (_RUNNER,))
    replace_everywhere("maybe_create_adaptive_verification_manager", create_with_costs, adaptive_module, (_RUNNER,))
    adaptive_module._assign_draft_token_budget_compiled = adaptive_module._assign_draft_token_budget  # type: ignore[attr-defined]


def _write_attention_output_in_warm_up(attention_module: ModuleType) -> None:
    forward = attention_module.CPUAttentionBackendImpl.forward

    def forward_or_zero(
        self: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Upstream's forward; without metadata (warm-up) a zeroed output instead of an unwritten one."""
        if attn_metadata is None:
            return output.zero_()
        return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)

    attention_module.CPUAttentionBackendImpl.forward = forward_or_zero


def _cut_top_k_top_p_in_torch(sampler_module: ModuleType) -> None:
    sampler_module.HAS_TRITON = False  # type: ignore[attr-defined]


def _keep_few_products(operators_module: ModuleType) -> None:
    # They are read at the first product, which is later than this import.
    for name, count in KEPT_PRODUCTS.items():
        os.environ.setdefault(name, count)
    create = operators_module.create_onednn_mm

    def create_with_one_product(weight: Any, primitive_cache_size: int = 1) -> Any:  # noqa: ARG001
        """Upstream's handler of a layer's products; however many are asked for, it keeps the last one used."""
        return create(weight, 1)

    operators_module.create_onednn_mm = create_with_one_product  # type: ignore[attr-defined]


HOOKS: Mapping[str, Hook] = {
    **interpreter.HOOKS,
    "vllm.config.vllm": _allow_without_graphs,
    _ATTENTION: _allow_every_decode_width,
    _ADAPTIVE: _plan_without_capture,
    "vllm.v1.sample.ops.topk_topp_sampler": _cut_top_k_top_p_in_torch,
    "vllm.v1.attention.backends.cpu_attn": _write_attention_output_in_warm_up,
    "vllm._custom_ops": _keep_few_products,
}
