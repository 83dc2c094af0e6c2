"""Checks of settings against each other: combinations that upstream refuses late, or accepts and serves badly."""

from __future__ import annotations

from patches.hardware import CPU, CUDA_HOPPER, ROCM_GFX950
from serve.preflight.check import Check, Finding, Problem, Severity, Unknown
from serve.preflight.facts import Facts
from serve.preflight.plan import Plan

FULL_GRAPHS = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
"""The graph modes in which decode batches are captured whole."""

_FP8_LAYOUT = ("DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM")
_MXFP4_ON_ROCM = "DeepseekV41ForCausalLM"
_DEFAULT_NUM_SEQS = 128
_DEFAULT_CAPTURE = 512
_MONO_RANKS = (2, 4)


def _lora(_: Facts, plan: Plan) -> Finding:
    asked = plan.on("enable_lora") or bool(plan.arguments.get("lora_modules"))
    return Problem("LoRA is on, and adaptive verification does not work with it") if plan.adaptive and asked else None


def _pipeline(_: Facts, plan: Plan) -> Finding:
    if not plan.adaptive or plan.pipeline_parallel_size == 1:
        return None
    return Problem(
        f"pipeline_parallel_size is {plan.pipeline_parallel_size}, and only the last stage knows the confidences"
    )


def _eager(_: Facts, plan: Plan) -> Finding:
    if not plan.adaptive or plan.profile.hardware == CPU or not plan.on("enforce_eager"):
        return None
    return Problem("enforce_eager is on, and adaptive verification needs full graphs")


def _graph_mode(_: Facts, plan: Plan) -> Finding:
    mode = plan.cudagraph_mode
    if not plan.adaptive or plan.profile.hardware == CPU or mode is None or mode.upper() in FULL_GRAPHS:
        return None
    return Problem(f"cudagraph_mode is {mode}, and adaptive verification needs full graphs for decode batches")


def _routed_experts(_: Facts, plan: Plan) -> Finding:
    if not plan.adaptive or not plan.on("enable_return_routed_experts"):
        return None
    return Problem("enable_return_routed_experts is on, and trimmed requests would return wrong rows")


def _sampling_replay(_: Facts, plan: Plan) -> Finding:
    if not plan.adaptive or not plan.on("return_sampling_mask"):
        return None
    return Problem("return_sampling_mask (sampling replay) is on, and it needs fixed verification boundaries")


def _mono_experts(_: Facts, plan: Plan) -> Finding:
    if not plan.mono_decode or not plan.on("enable_expert_parallel"):
        return None
    return Problem("mono decode is on with enable_expert_parallel, which its layer lacks")


def _mono_ranks(_: Facts, plan: Plan) -> Finding:
    ranks = plan.tensor_parallel_size
    if not plan.mono_decode or ranks in _MONO_RANKS:
        return None
    return Problem(f"mono decode is on, and its layer splits over 2 or 4 tensor-parallel ranks, not {ranks}")


def _local_argmax(facts: Facts, plan: Plan) -> Finding:
    if not plan.adaptive or plan.speculation.get("use_local_argmax_reduction") is not True:
        return None
    if facts.confidence_head is None:
        return Unknown("whether the draft has a confidence head")
    if facts.confidence_head:
        return None
    return Problem(
        "use_local_argmax_reduction is on and the draft has no confidence head: the estimator in its place needs the"
        " draft logits, which are never made"
    )


def _indexer(facts: Facts, plan: Plan) -> Finding:
    if plan.indexer_kv_dtype != "mxfp4":
        return None
    if plan.profile.hardware == CUDA_HOPPER:
        return Problem("indexer_kv_dtype is mxfp4, which Blackwell and gfx950 have and Hopper has not")
    if plan.profile.hardware != ROCM_GFX950:
        return None
    if facts.target.config is None:
        return Unknown("whether the model has an mxfp4 indexer")
    if facts.target.architecture != _MXFP4_ON_ROCM:
        return Problem(f"indexer_kv_dtype is mxfp4, which on gfx950 only {_MXFP4_ON_ROCM} has")
    return None


def _kv_dtype(facts: Facts, plan: Plan) -> Finding:
    dtype = plan.kv_cache_dtype
    if dtype == "auto" or dtype.startswith("fp8"):
        return None
    if facts.target.config is None:
        return Unknown("whether the model uses the fp8_ds_mla layout")
    if facts.target.architecture not in _FP8_LAYOUT:
        return None
    return Problem(f"kv_cache_dtype is {dtype}, and the fp8_ds_mla layout of {facts.target.architecture} is fp8 only")


def _num_seqs(_: Facts, plan: Plan) -> Finding:
    wanted = plan.profile.concurrency
    if wanted is None:
        return None
    seqs = plan.max_num_seqs or _DEFAULT_NUM_SEQS
    together = seqs * plan.data_parallel_size
    if together >= wanted:
        return None
    origin = "max_num_seqs" if plan.max_num_seqs else "vLLM's default for max_num_seqs"
    needed = -(-wanted // plan.data_parallel_size)
    return Problem(
        f"{origin} lets {seqs} x {plan.data_parallel_size} = {together} requests run, and the profile wants {wanted}",
        f"set max_num_seqs={needed}, or the profile's concurrency={together}",
    )


def _capture(_: Facts, plan: Plan) -> Finding:
    drafts = plan.num_speculative_tokens
    if plan.profile.hardware == CPU or drafts is None or plan.on("enforce_eager"):
        return None
    seqs = plan.max_num_seqs or _DEFAULT_NUM_SEQS
    size = plan.max_cudagraph_capture_size
    largest = seqs * (drafts + 1)
    if (size if size is not None else _DEFAULT_CAPTURE) >= largest:
        return None
    origin = "vLLM's default of max_cudagraph_capture_size" if size is None else "max_cudagraph_capture_size"
    return Problem(
        f"{origin} is {_DEFAULT_CAPTURE if size is None else size} and a full batch has"
        f" {seqs} x ({drafts} + 1) = {largest} tokens: larger batches run without a full graph",
        f"set compilation_config.max_cudagraph_capture_size={largest}, or max_num_seqs lower",
    )


_FIXED = "or use --verification fixed"

CHECKS = (
    Check(
        "lora",
        "LoRA and adaptive verification are not both on",
        "enable_lora and lora_modules (VllmConfig._validate_adaptive_verification refuses the pair)",
        f"turn LoRA off, {_FIXED}",
        _lora,
    ),
    Check(
        "pipeline-parallel",
        "Pipeline parallelism and adaptive verification are not both on",
        "pipeline_parallel_size (VllmConfig._validate_adaptive_verification refuses the pair)",
        f"set pipeline_parallel_size=1, {_FIXED}",
        _pipeline,
    ),
    Check(
        "enforce-eager",
        "Graphs are on for adaptive verification",
        "enforce_eager; the embedded CPU engine needs no graphs",
        f"leave enforce_eager out, {_FIXED}",
        _eager,
    ),
    Check(
        "graph-mode",
        "The graph mode captures decode batches whole",
        "compilation_config.cudagraph_mode; unset, adaptive makes it FULL_AND_PIECEWISE",
        f"set compilation_config.cudagraph_mode=FULL_AND_PIECEWISE, {_FIXED}",
        _graph_mode,
    ),
    Check(
        "routed-experts",
        "Routed experts are not returned with adaptive verification",
        "enable_return_routed_experts",
        f"leave it out, {_FIXED}",
        _routed_experts,
    ),
    Check(
        "sampling-replay",
        "Sampling replay and adaptive verification are not both on",
        "return_sampling_mask",
        f"leave it out, {_FIXED}",
        _sampling_replay,
    ),
    Check(
        "local-argmax",
        "Draft logits are made where the estimator needs them",
        "speculative_config.use_local_argmax_reduction and the draft's confidence head",
        f"leave use_local_argmax_reduction out, {_FIXED}",
        _local_argmax,
    ),
    Check(
        "mono-decode-expert-parallel",
        "The mono decode layer runs without expert parallelism",
        "VLLM_ROCM_MONO_DECODE or monokernel, and enable_expert_parallel (vllm#60397)",
        "set VLLM_ROCM_MONO_DECODE=0, or leave enable_expert_parallel out",
        _mono_experts,
    ),
    Check(
        "mono-decode-ranks",
        "The mono decode layer has 2 or 4 tensor-parallel ranks",
        "VLLM_ROCM_MONO_DECODE or monokernel, and tensor_parallel_size",
        "set VLLM_ROCM_MONO_DECODE=0, or tensor_parallel_size to 2 or 4",
        _mono_ranks,
    ),
    Check(
        "mxfp4-indexer",
        "The mxfp4 indexer is not asked of Hopper, nor of a model without it on gfx950",
        "attention_config.indexer_kv_dtype and the architecture",
        "leave indexer_kv_dtype out",
        _indexer,
    ),
    Check(
        "kv-cache-dtype",
        "The KV cache of an fp8_ds_mla model is fp8",
        "kv_cache_dtype and the architecture",
        "set kv_cache_dtype=fp8",
        _kv_dtype,
    ),
    Check(
        "max-num-seqs",
        "As many requests may run as the profile is meant for",
        "max_num_seqs x data_parallel_size against the profile's concurrency",
        "set max_num_seqs higher",
        _num_seqs,
        Severity.WARNING,
    ),
    Check(
        "capture-size",
        "The largest graph holds a full batch",
        "max_cudagraph_capture_size against max_num_seqs x (num_speculative_tokens + 1)",
        "set max_cudagraph_capture_size higher, or max_num_seqs lower",
        _capture,
        Severity.WARNING,
    ),
)
