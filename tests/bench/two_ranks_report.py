"""The tables of a two-rank run, as Markdown for RESULTS.md."""

from __future__ import annotations

from typing import Any

from tests.bench.in_turns import median_and_range, ratios


def markdown(results: dict[str, Any]) -> str:
    """What `two_ranks` found so far.

    Args:
        results: `facts`, and a part's name -> what it found.
    """
    facts = results["facts"]
    shown = ", ".join(f"{key} {facts[key]}" for key in ("device", "driver", "vllm", "torch") if key in facts)
    lines = [
        f"`python -m tests.bench.two_ranks {facts['command']}`: {facts['ranks']} tensor-parallel ranks; {shown}.",
        "",
    ]
    decisions = [row for name, row in (("drift", _drift), ("apart", _apart), ("stress", _stress)) if name in results]
    if decisions:
        lines += ["| what | how much | result |", "|---|---|---|"]
        for name, row in (("drift", _drift), ("apart", _apart), ("stress", _stress)):
            if name in results:
                found = results[name]
                lines.append(f"| {name} | | {found['error']} |" if "error" in found else row(found))
        lines.append("")
    if "token_ms" in results.get("cost", {}):
        lines += _cost(results["cost"])
    return "\n".join(lines)


def _drift(found: dict[str, Any]) -> str:
    return (
        f"| ranks' confidences drift apart and are shared | {found['steps']:,} steps, {found['trimmed']:,} of them "
        f"trimmed, {found['distinct_budgets']} different budgets | {found['budgets']} budgets and "
        f"{found['boundaries']} boundaries differ |"
    )


def _apart(found: dict[str, Any]) -> str:
    if found["first"] is None:
        return f"| the same, not shared | {found['steps']:,} steps | nothing differed |"
    budgets = found["first_budgets"]
    what = f"budgets {budgets[0]} and {budgets[1]}" if budgets[0] != budgets[1] else "boundaries"
    return (
        f"| the same, not shared | until a step differs | step {found['first'] + 1}: {what}; the engine "
        f"{found['engine']} |"
    )


def _stress(found: dict[str, Any]) -> str:
    compared = found["compared"]
    return (
        f"| waves of {found['concurrency']} requests that drain together | {found['seconds'] / 60:.1f} min, "
        f"{found['waves']} waves, {found['finished']:,} requests finished, {found['aborted']} aborted, "
        f"{found['steps']:,} steps | longest wait for a step {found['longest_s']:.2f} s; of {compared['steps']:,} "
        f"compared steps {compared['budgets']} budgets and {compared['boundaries']} boundaries differ; up to "
        f"{found['together']} ended at once |"
    )


def _cost(found: dict[str, Any]) -> list[str]:
    lines = [
        "Milliseconds a token, in turns, median and range over the rounds; the ratio round by round; the broadcast by "
        "itself, microseconds, median (10th to 90th percentile), rank 0 and 1.",
        "",
        "| requests | shared | not shared | ratio | broadcast, host | broadcast, device |",
        "|---|---|---|---|---|---|",
    ]
    for requests, times in found["token_ms"].items():
        broadcast = found["broadcast_us"][requests]
        lines.append(
            f"| {requests} | {median_and_range(times['on'])} | {median_and_range(times['off'])} "
            f"| {median_and_range(ratios(times))} "
            f"| {_percentiles(broadcast, 'host')} | {_percentiles(broadcast, 'device')} |"
        )
    return [*lines, ""]


def _percentiles(broadcast: list[dict[str, Any]], what: str) -> str:
    if what not in broadcast[0]:
        return "none: no device"
    return ", ".join(f"{each[what]['median']} ({each[what]['p10']} to {each[what]['p90']})" for each in broadcast)
