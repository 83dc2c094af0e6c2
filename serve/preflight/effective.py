"""What a start would really run with, where vLLM changes what was asked for without saying so."""

from __future__ import annotations

from patches.hardware import CPU
from serve.preflight.plan import Plan


def effective_graph_mode(plan: Plan) -> str:
    """The graph mode that the engine ends up with, and why it is not the one asked for.

    Adaptive verification forces FULL_AND_PIECEWISE (`resolve_adaptive_cudagraph_mode`, vllm#56626), which captures
    more graphs than fixed verification does.
    """
    if plan.profile.hardware == CPU or plan.arguments.get("enforce_eager") is True:
        return "NONE: nothing is captured"
    asked = plan.cudagraph_mode.upper() if plan.cudagraph_mode else None
    if not plan.adaptive:
        return asked or "vLLM's default"
    if asked == "FULL_DECODE_ONLY":
        return asked
    if asked in (None, "FULL_AND_PIECEWISE"):
        return "FULL_AND_PIECEWISE, forced by adaptive verification (FULL_DECODE_ONLY without piecewise capture)"
    return f"FULL_AND_PIECEWISE, forced by adaptive verification instead of {asked}"


def effective_lines(plan: Plan) -> list[str]:
    """The choices that decide speed and memory, one a line."""
    if plan.speculation:
        drafts = plan.num_speculative_tokens
        sampling = plan.speculation.get("draft_sample_method", "vLLM's default")
        method = plan.speculation.get("method", "vLLM's choice")
        draft = f"{method}, {drafts or 'as many as the block has'} draft tokens, {sampling} sampling"
    else:
        draft = "off"
    seqs = plan.max_num_seqs or "vLLM's default"
    capture = plan.max_cudagraph_capture_size
    return [
        f"verification: {'adaptive' if plan.adaptive else 'fixed' if plan.speculation else 'off'}",
        f"speculation: {draft}",
        f"parallelism: tensor {plan.tensor_parallel_size}, data {plan.data_parallel_size},"
        f" pipeline {plan.pipeline_parallel_size},"
        f" experts {'over all ranks' if plan.on('enable_expert_parallel') else 'split with tensors'}",
        f"requests: {seqs} x {plan.data_parallel_size} at a time",
        f"graphs: {effective_graph_mode(plan)}",
        f"largest graph: {f'{capture} tokens' if capture else 'as vLLM decides'}",
        f"KV cache: {plan.kv_cache_dtype}",
    ]
