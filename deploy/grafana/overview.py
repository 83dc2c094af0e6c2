"""dspark-overview: is it well, how fast is it, and what does adaptive verification bring, on one screen."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from panels import (
    BLUE,
    ENGINE,
    GREEN,
    NUMBER,
    PER_SECOND,
    RED,
    SECONDS,
    SERVER,
    SHARE,
    TOKENS,
    TOKENS_PER_SECOND,
    YELLOW,
    areas,
    dashboard,
    lines,
    mean,
    number,
    quantile,
    query,
    rate,
    table,
    thresholds,
)

PLAIN = thresholds((None, BLUE))

HEALTH = (
    number(
        "Ready replicas",
        "Servers whose model answers.",
        NUMBER,
        thresholds((None, RED), (1, GREEN)),
        query(f'sum(dspark_state{{{SERVER}, state="ready"}}) or vector(0)', "ready"),
    ),
    number(
        "Replicas not ready",
        "Servers that are starting, draining or failed, and targets that do not answer a scrape.",
        NUMBER,
        thresholds((None, GREEN), (1, YELLOW)),
        query(
            f'(sum(dspark_state{{{SERVER}, state!="ready"}}) or vector(0)) + sum(up{{{SERVER}}} == bool 0)', "not ready"
        ),
    ),
    number(
        "Verification mode",
        "Replicas in each verification mode.",
        NUMBER,
        PLAIN,
        query(f"sum by (mode) (dspark_mode{{{SERVER}}}) > 0", "{{mode}}"),
    ),
    number(
        "Acceptance length",
        "Accepted drafts and the bonus token, per request and verification step. It falls as load rises, because the "
        "budget trims: that is correct.",
        TOKENS,
        PLAIN,
        query(mean("dspark_acceptance_length"), "mean"),
    ),
    number(
        "Output",
        "Tokens generated a second.",
        TOKENS_PER_SECOND,
        PLAIN,
        query(f"sum({rate('vllm:generation_tokens_total')})", "output"),
    ),
    number(
        "Fullest KV cache",
        "Share in use of the KV cache of the fullest engine. A full one matters once requests wait or are preempted.",
        SHARE,
        thresholds((None, GREEN), (0.8, YELLOW), (0.95, RED)),
        query(f"max(vllm:kv_cache_usage_perc{{{ENGINE}}})", "in use"),
    ),
)

LOAD = (
    lines(
        "Requests",
        "Requests in the running batches, and requests that wait for a place in one.",
        NUMBER,
        query(f"sum(vllm:num_requests_running{{{ENGINE}}})", "running"),
        query(f"sum(vllm:num_requests_waiting{{{ENGINE}}})", "waiting"),
    ),
    lines(
        "Tokens",
        "Tokens computed a second: prompts and generated output.",
        TOKENS_PER_SECOND,
        query(f"sum({rate('vllm:prompt_tokens_total')})", "prompt"),
        query(f"sum({rate('vllm:generation_tokens_total')})", "output"),
    ),
    areas(
        "Finished requests",
        "Requests that finished a second, by reason.",
        PER_SECOND,
        query(f"sum by (finished_reason) ({rate('vllm:request_success_total')})", "{{finished_reason}}"),
        span=8,
    ),
    lines(
        "KV cache",
        "Share of the KV cache in use, of the fullest engine and on average.",
        SHARE,
        query(f"max(vllm:kv_cache_usage_perc{{{ENGINE}}})", "fullest"),
        query(f"avg(vllm:kv_cache_usage_perc{{{ENGINE}}})", "average"),
        span=8,
    ).max(1),
    lines(
        "Preemptions",
        "Requests a second that lost their place in the KV cache to others. Their tokens are computed again.",
        PER_SECOND,
        query(f"sum({rate('vllm:num_preemptions_total')})", "preempted"),
        span=8,
    ),
)

LATENCY = tuple(
    lines(
        title,
        description,
        SECONDS,
        *(query(quantile(share, histogram), f"p{round(share * 100)}") for share in (0.5, 0.95, 0.99)),
        span=8,
    )
    for title, description, histogram in (
        (
            "Time to first token",
            "From a request's arrival to its first token, queue included.",
            "vllm:time_to_first_token_seconds",
        ),
        (
            "Time between tokens",
            "From one output to the next. A verification step yields several tokens at once.",
            "vllm:inter_token_latency_seconds",
        ),
        (
            "Time to the last token",
            "From a request's arrival to its end.",
            "vllm:e2e_request_latency_seconds",
        ),
    )
)

VERIFICATION = (
    lines(
        "Acceptance and verified length",
        "Tokens that a request gains in a verification step (accepted drafts and the bonus token), and the width that "
        "was verified for it, bonus token included. The gap is what verification was spent on in vain.",
        TOKENS,
        query(mean("dspark_acceptance_length"), "acceptance length"),
        query(mean("dspark_verified_length"), "verified length"),
    ),
    lines(
        "Draft tokens",
        "Drafts that were proposed, that the budget admitted to verification, and that were accepted.",
        TOKENS_PER_SECOND,
        query(f"sum({rate('dspark_proposed_draft_tokens_total')})", "proposed"),
        query(f"sum({rate('dspark_verified_draft_tokens_total')})", "verified"),
        query(f"sum({rate('dspark_accepted_draft_tokens_total')})", "accepted"),
    ),
)

BUILD = (
    table(
        "Versions",
        "What the replicas were built from, one row a build: more than one while a release is rolled out.",
        ("version", "vllm_version", "hardware", "patchset"),
        f"dspark_build_info{{{SERVER}}}",
    ),
    table(
        "Patches",
        "What became of each patch of the backend.",
        ("id", "status"),
        f"dspark_patch_info{{{SERVER}}}",
    ),
)


def overview() -> Dashboard:
    """The dashboard to open first."""
    return dashboard(
        "dspark-overview",
        "dspark-serve / Overview",
        "Health, load, latency and what adaptive verification brings.",
        ("Health", HEALTH),
        ("Load", LOAD),
        ("Latency", LATENCY),
        ("Adaptive verification", VERIFICATION),
        ("Build", BUILD),
    )
