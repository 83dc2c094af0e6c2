"""dspark-fleet: replicas and engines side by side, to find the one that differs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from panels import (
    BLUE,
    ENGINE,
    GREEN,
    GREY,
    NUMBER,
    RED,
    SERVER,
    SHARE,
    TOKENS,
    TOKENS_PER_SECOND,
    YELLOW,
    dashboard,
    lines,
    mean,
    number,
    query,
    rate,
    table,
    thresholds,
    timeline,
)

BY_ENGINE = " by (instance, engine)"
NAMED = "{{instance}} engine {{engine}}"
STATES = (("starting", YELLOW), ("ready", GREEN), ("draining", BLUE), ("failed", RED), ("stopped", GREY))
MODES = (("adaptive", GREEN), ("fixed", BLUE), ("off", GREY))


def held(series: str, label: str, texts: tuple[tuple[str, str], ...]) -> str:
    """Which of a 0/1 series' label values holds on each replica, as its position in `texts`, from 1 on."""
    return " + ".join(
        f'{position} * sum by (instance) ({series}{{{SERVER}, {label}="{text}"}})'
        for position, (text, _) in enumerate(texts, 1)
    )


REPLICAS = (
    number(
        "Replicas that answer",
        "Targets that answer a scrape.",
        NUMBER,
        thresholds((None, RED), (1, GREEN)),
        query(f"sum(up{{{SERVER}}})", "up"),
        span=6,
    ),
    number(
        "Restarts in the last hour",
        "Processes that were started again at the same address.",
        NUMBER,
        thresholds((None, GREEN), (1, YELLOW), (2, RED)),
        query(f"sum(changes(process_start_time_seconds{{{SERVER}}}[1h]))", "restarts"),
        span=6,
    ),
    number(
        "Builds",
        "Different builds that serve: more than one while a release is rolled out.",
        NUMBER,
        thresholds((None, GREEN), (2, YELLOW)),
        query(f"count(count by (version, vllm_version, patchset) (dspark_build_info{{{SERVER}}}))", "builds"),
        span=6,
    ),
    number(
        "Replicas not as configured",
        "Replicas whose verification mode was switched at run time.",
        NUMBER,
        thresholds((None, GREEN), (1, YELLOW)),
        query(f"sum((dspark_mode{{{SERVER}}} == bool 1) * (dspark_configured_mode{{{SERVER}}} == bool 0))", "switched"),
        span=6,
    ),
    timeline(
        "State",
        "The state of each replica. One that is missing does not answer.",
        STATES,
        query(held("dspark_state", "state", STATES), "{{instance}}"),
    ),
    timeline(
        "Mode",
        "The verification mode in force on each replica.",
        MODES,
        query(held("dspark_mode", "mode", MODES), "{{instance}}"),
    ),
    table(
        "Alerts",
        "Alerts of dspark-serve that fire or are about to.",
        ("alertname", "alertstate", "severity", "instance", "engine"),
        f'ALERTS{{alertname=~"Dspark.*", {SERVER}}}',
    ),
    table(
        "Builds by replica",
        "What each replica was built from.",
        ("instance", "version", "vllm_version", "hardware", "patchset"),
        f"dspark_build_info{{{SERVER}}}",
    ),
)

LOAD = (
    lines(
        "Running requests",
        "Requests in the running batch of each engine. One that stands out points at the load balancer.",
        NUMBER,
        query(f"sum{BY_ENGINE} (vllm:num_requests_running{{{ENGINE}}})", NAMED),
    ),
    lines(
        "Waiting requests",
        "Requests that wait for a place in an engine's batch.",
        NUMBER,
        query(f"sum{BY_ENGINE} (vllm:num_requests_waiting{{{ENGINE}}})", NAMED),
    ),
    lines(
        "Output",
        "Tokens that each engine generates a second.",
        TOKENS_PER_SECOND,
        query(f"sum{BY_ENGINE} ({rate('vllm:generation_tokens_total')})", NAMED),
    ),
    lines(
        "KV cache",
        "Share of each engine's KV cache in use.",
        SHARE,
        query(f"max{BY_ENGINE} (vllm:kv_cache_usage_perc{{{ENGINE}}})", NAMED),
    ).max(1),
)

VERIFICATION = (
    lines(
        "Acceptance length",
        "Tokens gained per request and verification step, by engine. Engines under different load differ rightly: "
        "compare with the running requests.",
        TOKENS,
        query(mean("dspark_acceptance_length", BY_ENGINE), NAMED),
    ),
    lines(
        "Accepted of expected",
        "Accepted drafts over those that confidence predicted, by engine: about 1, whatever the load.",
        SHARE,
        query(
            f"sum{BY_ENGINE} ({rate('dspark_accepted_draft_tokens_total')}) / "
            f"(sum{BY_ENGINE} ({rate('dspark_expected_accepted_draft_tokens_total')}) > 0)",
            NAMED,
        ),
    ),
)


def fleet() -> Dashboard:
    """Every replica and engine."""
    return dashboard(
        "dspark-fleet",
        "dspark-serve / Fleet",
        "Replicas and engines side by side.",
        ("Replicas", REPLICAS),
        ("Load by engine", LOAD),
        ("Verification by engine", VERIFICATION),
    )
