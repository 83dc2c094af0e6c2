"""What `/dspark/status` says about the engine's effective configuration and the patches."""

from __future__ import annotations

from typing import Any

from patches.install import Installed
from serve.metrics import Identity


def effective_configuration(config: Any) -> dict[str, Any]:
    """What the engine really runs with, after vLLM and the hardware have had their say.

    Args:
        config: vLLM's `VllmConfig`.
    """
    model, scheduler, parallel = config.model_config, config.scheduler_config, config.parallel_config
    speculative = config.speculative_config
    return {
        "model": model.model,
        "dtype": str(model.dtype),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": scheduler.async_scheduling,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "speculative": None
        if speculative is None
        else {
            "method": speculative.method,
            "model": speculative.model,
            "num_speculative_tokens": speculative.num_speculative_tokens,
            "rejection_sample_method": speculative.rejection_sample_method,
            "adaptive_verification": speculative.enable_adaptive_verification,
        },
    }


def version_facts(identity: Identity) -> dict[str, Any]:
    """The body of `/version`: vLLM's own field, and beside it what this server is."""
    patches = identity.patches
    return {
        "version": patches.release,
        "dspark_serve": {
            "version": identity.version,
            "hardware": patches.hardware,
            "patchset": patches.digest,
            "patches": list(patches.applied),
        },
    }


def patch_rows(patches: Installed) -> list[dict[str, str]]:
    """Every patch with what became of it."""
    return [
        {"id": decision.patch.id, "status": decision.status.value, "reason": decision.reason}
        for decision in patches.decisions
    ]
