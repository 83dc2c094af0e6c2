"""rocm-dsv41-adaptive: adaptive verification of DeepSeek-V4.1 on gfx950.

Upstream. On ROCm every query token becomes an indexer row of its own, and since 0.29.0 the rows come from device
boundaries when verification is adaptive. 0.31.0 opened that path for DeepSeek-V4 and kept V4.1 out of it: three
places still answer for a batch whose boundaries the host knows.

- `DeepseekV41IndexerBackend.supports_device_cpu_query_lens_mismatch` says no;
- `_use_flattening` forces rows a token for `DeepseekV4ForCausalLM` only (for nobody on ROCm in 0.30.0), so that
  with one draft the native two-token path would be taken;
- V4.1's sparse-MLA and sparse-SWA builders claim graphs for uniform batches only.

Why they may say yes. V4.1 runs V4's metadata code: `token_to_req_indices`, `get_compressed_slot_mapping` and the SWA
index kernels read `query_start_loc` on the device, the ragged SWA indices are packed from device lengths, and all of
it ends in buffers that are allocated once. A captured graph therefore follows the boundaries of the step that
replays it.

Instead. The same three answers, changed for V4.1 on ROCm, and only where verification is adaptive: a fixed K keeps
its graphs and its metadata. The sparse-MLA builder is shared with NVIDIA's backends, so ROCm's backend gets a
subclass of it and the shared class stays as it is. Architectures are named one by one: a pattern would opt in a
later model whose metadata nobody has looked at.

Upstream reference: #58151, in 0.33.0 (for 0.30.0 also what #52362 brought: forced flattening on ROCm). Hardware:
rocm-gfx950. vLLM: 0.30.0 to 0.32.0; 0.29.0 has no V4.1 for ROCm. Tensor parallelism needs tp-consensus besides, and
block rejection block-rejection-bounds. Delete this when 0.32.0 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import wrapt

from patches.install import Hook

_INDEXER = "vllm.v1.attention.backends.mla.indexer"
_MODEL = "vllm.models.deepseek_v41.amd.rocm"

_VALIDATED_ARCHITECTURES = frozenset({"DeepseekV41ForCausalLM"})


def _is_adaptive(vllm_config: Any) -> bool:
    speculation = vllm_config.speculative_config
    return bool(speculation is not None and speculation.enable_adaptive_verification)


def _report_always_when_adaptive(wrapped: Callable[..., Any], _cls: Any, args: Any, kwargs: Any) -> Any:
    """`get_cudagraph_support`: any decode shape under adaptive verification, else upstream's answer."""
    from vllm.v1.attention.backend import AttentionCGSupport

    vllm_config = args[0] if args else kwargs["vllm_config"]
    return AttentionCGSupport.ALWAYS if _is_adaptive(vllm_config) else wrapped(*args, **kwargs)


def _flatten_device_lengths(indexer: ModuleType) -> None:
    upstream_use_flattening = indexer._use_flattening

    def supports_mismatch(wrapped: Callable[[], bool], _cls: Any, _args: Any, _kwargs: Any) -> bool:
        """V4.1's indexer takes device boundaries on ROCm; elsewhere upstream's answer."""
        return bool(indexer.current_platform.is_rocm()) or wrapped()

    def use_flattening(vllm_config: Any) -> bool:
        """Upstream's answer, or that a validated architecture verifies adaptively on ROCm."""
        if upstream_use_flattening(vllm_config):
            return True
        model = vllm_config.model_config
        return bool(
            _is_adaptive(vllm_config)
            and indexer.current_platform.is_rocm()
            and model is not None
            and not _VALIDATED_ARCHITECTURES.isdisjoint(model.architectures)
        )

    wrapt.wrap_function_wrapper(
        indexer, "DeepseekV41IndexerBackend.supports_device_cpu_query_lens_mismatch", supports_mismatch
    )
    indexer._use_flattening = use_flattening  # type: ignore[attr-defined]


def _capture_any_decode_shape(model: ModuleType) -> None:
    shared_builder = model.DeepseekV4SparseMLAMetadataBuilder

    class RocmSparseMLAMetadataBuilder(shared_builder):  # type: ignore[misc, valid-type]
        """V4.1's shared builder, for ROCm's backend alone."""

    wrapt.wrap_function_wrapper(RocmSparseMLAMetadataBuilder, "get_cudagraph_support", _report_always_when_adaptive)
    wrapt.wrap_function_wrapper(
        model, "DeepseekV4ROCMAiterSparseSWAMetadataBuilder.get_cudagraph_support", _report_always_when_adaptive
    )
    model.DeepseekV4ROCMAiterMLASparseBackend.get_builder_cls = staticmethod(lambda: RocmSparseMLAMetadataBuilder)


HOOKS: Mapping[str, Hook] = {_INDEXER: _flatten_device_lengths, _MODEL: _capture_any_decode_shape}
