"""What `/dspark/status` says about the engine's effective configuration, the patches and what was verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from patches.install import Installed
from patches.telemetry.counters import PLANS, Snapshot
from patches.telemetry.tally import BINS
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


def verification_counts(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """What all engines verified since they were started.

    Args:
        snapshots: One of every engine; none without speculation.

    Returns:
        `steps` by plan, `positions` (from 0) and `reliability` by confidence. `reliability` and every `expected` are
        None where nothing predicts acceptance.
    """
    return {
        "steps": {plan: sum(snapshot.steps[plan] for snapshot in snapshots) for plan in PLANS},
        "positions": _positions(snapshots),
        "reliability": _reliability(snapshots),
    }


def _positions(snapshots: Sequence[Snapshot]) -> list[dict[str, float | None]]:
    predicting = [snapshot.expected for snapshot in snapshots if snapshot.expected is not None]
    return [
        {
            "position": position,
            "proposed": sum(snapshot.proposed[position] for snapshot in snapshots),
            "verified": sum(snapshot.verified[position] for snapshot in snapshots),
            "accepted": sum(snapshot.accepted[position] for snapshot in snapshots),
            "expected": round(sum(expected[position] for expected in predicting), 3) if predicting else None,
        }
        for position in range(max((snapshot.max_drafts for snapshot in snapshots), default=0))
    ]


def _reliability(snapshots: Sequence[Snapshot]) -> list[dict[str, float]] | None:
    predicting = [
        (snapshot.bin_predictions, snapshot.bin_accepted)
        for snapshot in snapshots
        if snapshot.bin_predictions is not None and snapshot.bin_accepted is not None
    ]
    if not predicting:
        return None
    return [
        {
            "from": number / BINS,
            "to": (number + 1) / BINS,
            "predictions": sum(predictions[number] for predictions, _ in predicting),
            "accepted": sum(accepted[number] for _, accepted in predicting),
        }
        for number in range(BINS)
    ]
