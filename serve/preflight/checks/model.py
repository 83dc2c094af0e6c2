"""Checks of the model and of its draft, from their small files."""

from __future__ import annotations

from patches.hardware import CPU, CUDA_HOPPER, ROCM_GFX950
from serve.preflight.check import Check, Finding, Problem, Severity, Unknown
from serve.preflight.checkpoint import Checkpoint
from serve.preflight.facts import Facts
from serve.preflight.plan import Plan

ARCHITECTURES: dict[str, frozenset[str]] = {
    CUDA_HOPPER: frozenset({"DeepseekV4ForCausalLM", "Qwen3ForCausalLM"}),
    ROCM_GFX950: frozenset({"DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"}),
    CPU: frozenset({"Qwen3ForCausalLM"}),
}
"""What adaptive verification was validated with. Nothing is added by a pattern: each one is tried first."""


def _checkpoints(facts: Facts) -> list[Checkpoint]:
    draft = facts.draft
    return [facts.target, *([draft] if draft is not None and draft.name != facts.target.name else [])]


def _config(facts: Facts, _: Plan) -> Finding:
    problems = [f"{c.name}: {c.problem}" for c in _checkpoints(facts) if c.config is None and not c.gated]
    return Problem("; ".join(problems)) if problems else None


def _token(facts: Facts, _: Plan) -> Finding:
    gated = [checkpoint.name for checkpoint in _checkpoints(facts) if checkpoint.gated]
    if not gated:
        return None
    if facts.hub_token:
        return Problem(
            f"{', '.join(gated)} is gated, and the account of the token has no access to it",
            "accept its licence on the model's page with that account",
        )
    return Problem(f"{', '.join(gated)} is gated, and there is no token")


def _architecture(facts: Facts, plan: Plan) -> Finding:
    if facts.target.config is None:
        return Unknown("the model's architecture")
    name = facts.target.architecture
    if facts.upstream is not None and name not in facts.upstream.architectures:
        return Problem(f"vLLM {facts.release} has no architecture '{name}'", "use a vLLM that has it, or another model")
    validated = ARCHITECTURES.get(plan.profile.hardware, frozenset())
    if not plan.adaptive or name in validated:
        return None
    return Problem(
        f"adaptive verification of {name} was not validated on {plan.profile.hardware}"
        f" (validated: {', '.join(sorted(validated)) or 'nothing'})"
    )


def _block_size(facts: Facts) -> int | None:
    return facts.draft.number("dspark_block_size", "block_size") if facts.draft is not None else None


def _block(facts: Facts, plan: Plan) -> Finding:
    wanted = plan.num_speculative_tokens
    if facts.draft is None or wanted is None:
        return None
    block = _block_size(facts)
    if block is None:
        return Unknown("the draft's block size")
    if wanted == block:
        return None
    return Problem(
        f"num_speculative_tokens is {wanted} and the draft was trained for blocks of {block}: acceptance was seen to"
        " fall, to 4 % in one report (vllm#41834)",
        f"compare acceptance with speculative_config.num_speculative_tokens={block}",
    )


def _short_block(facts: Facts, plan: Plan) -> Finding:
    block, wanted = _block_size(facts), plan.num_speculative_tokens
    if facts.upstream is None or not facts.upstream.refuses_short_blocks or block is None or wanted is None:
        return None
    if wanted >= block:
        return None
    return Problem(
        f"num_speculative_tokens is {wanted}, and this vLLM rejects less than the draft's block size of {block}",
        f"set speculative_config.num_speculative_tokens={block}",
    )


def _confidence(facts: Facts, plan: Plan) -> Finding:
    if not plan.adaptive or facts.draft is None:
        return None
    if facts.confidence_head is None:
        return Unknown("whether the draft has a confidence head")
    if facts.confidence_head:
        return None
    return Problem(
        f"{facts.draft.name} has no confidence head: vLLM's online estimator sizes the budget from draft logits"
    )


def _method(_: Facts, plan: Plan) -> Finding:
    method = plan.speculation.get("method")
    if not plan.adaptive or method == "dspark":
        return None
    return Problem(f"adaptive verification was validated with DSpark drafts, and the method is {method!r}")


CHECKS = (
    Check(
        "model-config",
        "The config of the model and of its draft can be read",
        "config.json, local, cached or by one request; no weights",
        "correct the name or path, connect to the hub (or set HF_ENDPOINT), or fill the cache beforehand",
        _config,
    ),
    Check(
        "hub-token",
        "A gated model can be downloaded",
        "the hub's answer for config.json, and the token of HF_TOKEN or of the hub's login",
        "set HF_TOKEN to a token of an account that accepted the model's licence",
        _token,
    ),
    Check(
        "architecture",
        "The architecture is in vLLM and was validated on this hardware",
        "config.json, the registry in the installed vLLM's source, and an explicit list",
        "use --verification fixed, or a model that was validated",
        _architecture,
    ),
    Check(
        "draft-block",
        "As many tokens are drafted as the draft was trained for",
        "num_speculative_tokens against dspark_block_size or block_size in the draft's config",
        "set speculative_config.num_speculative_tokens to the block size",
        _block,
        Severity.WARNING,
    ),
    Check(
        "draft-block-minimum",
        "No fewer tokens are drafted than this vLLM accepts",
        "the guard in SpeculativeConfig of the installed vLLM's source, and the draft's block size",
        "set speculative_config.num_speculative_tokens to the block size",
        _short_block,
    ),
    Check(
        "confidence-head",
        "The draft has a confidence head",
        "enable_confidence_head in its config and the names of its weights",
        "use a draft with a confidence head, or measure whether adaptive pays with the estimator",
        _confidence,
        Severity.WARNING,
    ),
    Check(
        "speculative-method",
        "Adaptive verification has a DSpark draft",
        "speculative_config.method",
        "set speculative_config.method=dspark, or use --verification fixed",
        _method,
    ),
)
