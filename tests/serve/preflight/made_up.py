"""Made-up facts: the right machine for every profile, to be changed in one place by a test."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from patches import install
from patches.hardware import CPU, CUDA_HOPPER, ROCM_GFX950, Hardware
from patches.install import Decision, Installed
from patches.ledger import LEDGER, RELEASES, Patch, Status
from serve.arguments import argument_names
from serve.overrides import override
from serve.preflight import Facts, Plan, Report, judge
from serve.preflight.check import Check
from serve.preflight.checkpoint import Checkpoint, read_checkpoint
from serve.preflight.checks import TABLE
from serve.preflight.machine import Gpu, Machine
from serve.preflight.memory import GIB
from serve.preflight.plan import plan
from serve.preflight.upstream import Upstream, ask
from serve.profile import Verification, load, resolve_model

ROOT = install.vllm_root()
RELEASE_TREES = Path(os.environ.get("DSPARK_RELEASES_CACHE") or Path(__file__).parents[3] / ".cache" / "releases")
"""Python files of every supported release, unpacked from their wheels; tests that need one skip without it."""

_INDEXER = "vllm.v1.attention.backends.mla.indexer"
_ROCM = "vllm.models.deepseek_v41.amd.rocm"


def ledger_row(id: str, **fields: Any) -> Patch:
    """The ledger's own row of that id, or a stand-in with these fields until it has one."""
    stand_in = Patch(id=id, what="", upstream="", module="", removal="", **fields)
    return next((patch for patch in LEDGER if patch.id == id), stand_in)


HOPPER_INDEXER = ledger_row(
    "hopper-flattened-indexer",
    hardware=frozenset({CUDA_HOPPER}),
    releases=("0.28.0",),
    replaces=(
        f"{_INDEXER}:DeepseekV32IndexerBackend.supports_device_cpu_query_lens_mismatch",
        f"{_INDEXER}:DeepseekV32IndexerMetadataBuilder.get_cudagraph_support",
    ),
)
ROCM_V41 = ledger_row(
    "rocm-dsv41-adaptive",
    hardware=frozenset({ROCM_GFX950}),
    releases=("0.30.0", "0.31.0", "0.32.0"),
    replaces=(
        f"{_INDEXER}:DeepseekV41IndexerBackend.supports_device_cpu_query_lens_mismatch",
        f"{_ROCM}:DeepseekV4ROCMAiterMLASparseBackend.get_builder_cls",
        f"{_ROCM}:DeepseekV41ROCMAiterSparseSWABackend.get_builder_cls",
    ),
)
TP_CONSENSUS = ledger_row("tp-consensus", hardware=frozenset({CUDA_HOPPER, ROCM_GFX950, CPU}), releases=RELEASES)
BOUNDS = ledger_row(
    "block-rejection-bounds",
    hardware=frozenset({CUDA_HOPPER, ROCM_GFX950, CPU}),
    releases=("0.28.0", "0.29.0", "0.30.0", "0.31.0"),
)

H200, MI355X = 140 * GIB, 288 * GIB
MACHINES = {
    CUDA_HOPPER: Machine(
        Hardware(CUDA_HOPPER, "NVIDIA sm90"),
        gpus=(Gpu(H200, H200),) * 4,
        memory_available=1000 * GIB,
        driver_cuda=13000,
        torch_cuda=13000,
        shared_memory=64 * GIB,
        open_files=65536,
        compilers=frozenset({"cc", "nvcc"}),
    ),
    ROCM_GFX950: Machine(
        Hardware(ROCM_GFX950, "AMD gfx950"),
        gpus=(Gpu(MI355X, MI355X),) * 4,
        memory_available=1000 * GIB,
        shared_memory=64 * GIB,
        open_files=65536,
        compilers=frozenset({"cc", "hipcc"}),
    ),
    CPU: Machine(Hardware(CPU, "vLLM's CPU build"), memory_available=16 * GIB, shared_memory=8 * GIB, open_files=65536),
}

V4_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "dspark_block_size": 7,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
    "max_position_embeddings": 1 << 20,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-V4-Flash-0731": V4_CONFIG,
    "deepseek-ai/DeepSeek-V4.1-Flash": {
        **V4_CONFIG,
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dspark_block_size": 5,
    },
    "Qwen/Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "deepseek-ai/dspark_qwen3_8b_block7": {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "enable_confidence_head": True,
    },
}


def applied(release: str, hardware: str, *patches: Patch) -> Installed:
    """A ledger of which exactly these patches are applied."""
    return Installed(release, hardware, tuple(Decision(patch, Status.APPLIED) for patch in patches))


@cache
def upstream(root: Path, hardware: str, architecture: str, drafts: int) -> Upstream:
    """The real answers of a release, asked once."""
    return ask(root, hardware=hardware, architecture=architecture, num_speculative_tokens=drafts)


def made_up_plan(
    profile: str,
    sets: list[str] | None = None,
    extra: list[str] | None = None,
    *,
    verification: Verification = Verification.ADAPTIVE,
    environment: dict[str, str] | None = None,
    headless: bool = False,
) -> Plan:
    assert ROOT is not None
    names = argument_names(ROOT)
    recipe = override(load(profile), sets or [], names)
    return plan(recipe, verification, extra or [], names=names, environment=environment or {}, headless=headless)


def checkpoint(name: str) -> Checkpoint:
    if name in CONFIGS:
        return Checkpoint(name, CONFIGS[name], confidence_head=True)
    return read_checkpoint(name, None, {})


def made_up_facts(planned: Plan, *, root: Path | None = ROOT, release: str = "0.32.0", **changes: Any) -> Facts:
    """Facts of a machine on which `planned` would start: the right hardware, every patch applied."""
    assert root is not None
    hardware = planned.profile.hardware
    target = checkpoint(planned.model)
    draft = checkpoint(resolve_model(planned.draft_model)) if planned.draft_model else target
    facts = Facts(
        machine=MACHINES[hardware],
        release=release,
        patches=applied(release, hardware, HOPPER_INDEXER, ROCM_V41, TP_CONSENSUS, BOUNDS),
        plugin_installed=True,
        names=argument_names(root),
        upstream=upstream(root, hardware, target.architecture, planned.num_speculative_tokens or 1),
        target=target,
        draft=draft if planned.speculation else None,
        hub_token=False,
        port=None,
    )
    return replace(facts, **changes)


def failed(report: Report) -> dict[str, str]:
    """Id and text of every failed check."""
    return {result.check.id: f"{result.found}; {result.remedy}" for result in (*report.errors, *report.warnings)}


def without(check_id: str) -> tuple[Check, ...]:
    """The table less one check."""
    table = tuple(check for check in TABLE if check.id != check_id)
    assert len(table) == len(TABLE) - 1
    return table


__all__ = [name for name in globals() if not name.startswith("_")] + ["judge"]
