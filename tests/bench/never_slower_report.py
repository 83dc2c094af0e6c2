"""From raw rounds of `never_slower` to results.json and a section of RESULTS.md. Pure text; runs anywhere."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.step_trace import Spent, by_kind, differences

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
DATA = HERE / "results.json"
BEGIN, END = "<!-- never-slower -->", "<!-- /never-slower -->"

Row = dict[str, Any]
Cell = tuple[str, int]
"""(workload, requests)"""
Arms = dict[str, dict[tuple[str, int], float]]
"""Arm -> (run, round) -> ms per token."""


def read(paths: Iterable[Path]) -> list[Row]:
    """Every measurement of the raw files. A line that a killed run cut short is left out."""
    rows = []
    for path in paths:
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def token_ms(requests: int, found: Row) -> list[float]:
    """[repeats] milliseconds between two tokens of a request while all requests run together."""
    return [1e3 * requests * took / tokens for took, tokens in zip(found["decode_s"], found["decoded"], strict=True)]


def by_round(rows: list[Row], part: str) -> dict[Cell, Arms]:
    """What each cell took. Without drafts a workload's acceptance is nothing, so `off` stands in every workload."""
    cells: dict[Cell, Arms] = defaultdict(lambda: defaultdict(dict))
    found = [row for row in rows if row["part"] == part]
    for row in found:
        alike = {row["workload"]}
        if row["arm"] == "off":
            alike |= {other["workload"] for other in found if other["requests"] == row["requests"]}
        took = median(token_ms(row["requests"], row))
        for workload in alike:
            cells[workload, row["requests"]][row["arm"]][row["run"], row["round"]] = took
    return cells


def ratio(arms: Arms, of: str, to: Iterable[str]) -> tuple[float, float, float] | None:
    """Median and range over rounds of `of` divided by the best of `to`, in ms per token.

    The best is the one with the lowest median. The best of each round would be lucky in that round.
    """
    others = {name: arms[name] for name in to if arms.get(name)}
    if not others or not arms.get(of):
        return None
    best = min(others.values(), key=lambda rounds: median(rounds.values()))
    shared = [key for key in arms[of] if key in best]
    if not shared:
        return None
    ratios = [arms[of][key] / best[key] for key in shared]
    return median(ratios), min(ratios), max(ratios)


def spread(values: Iterable[float], digits: int) -> str:
    held = list(values)
    return f"{median(held):.{digits}f} ({min(held):.{digits}f} to {max(held):.{digits}f})"


def from_to(counts: Iterable[int]) -> str:
    held = list(counts)
    return str(held[0]) if min(held) == max(held) else f"{min(held)} to {max(held)}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def shown(found: tuple[float, float, float] | None) -> str:
    return "" if found is None else f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"


OVERHEAD_REQUESTS = 4
"""Requests up to which full budgets are asked for by the time a token."""

UPSTREAMS_GRID = "without-coarser-capture-grid"
ORDER = ("off", "fixed", "upstream", "unpatched", "patched")


def ordered(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def overhead_section(rows: list[Row]) -> list[str]:
    cells = by_round(rows, "overhead")
    if not cells:
        return []
    arms = ordered({name for arms in cells.values() for name in arms})
    lines = ["### Full budgets: only the overhead differs", ""]
    lines += ["Milliseconds a token; median and range over the rounds. Every draft is accepted.", ""]
    lines += table(
        ["requests", *arms],
        [
            [str(requests), *(spread(found[a].values(), 3) if a in found else "" for a in arms)]
            for (_, requests), found in sorted(cells.items(), key=lambda item: item[0][1])
        ],
    )
    lines += ["Divided by fixed, round by round:", ""]
    adaptive = [name for name in arms if name not in ("off", "fixed")]
    lines += table(
        ["requests", *adaptive],
        [
            [str(requests), *(shown(ratio(found, a, ["fixed"])) for a in adaptive)]
            for (_, requests), found in sorted(cells.items(), key=lambda item: item[0][1])
        ],
    )
    return lines


def workload_section(rows: list[Row], part: str, title: str, rivals: tuple[str, ...]) -> list[str]:
    cells = by_round(rows, part)
    lines: list[str] = []
    for workload in sorted({workload for workload, _ in cells}, reverse=True):
        found = {requests: arms for (name, requests), arms in cells.items() if name == workload}
        arms = ordered({name for each in found.values() for name in each})
        lines += [
            f"### {title}: {workload}",
            "",
            "Output tokens a second while all requests run; median and range.",
            "",
        ]
        lines += table(
            ["requests", "rounds", *arms],
            [
                [
                    str(requests),
                    from_to(map(len, each.values())),
                    *(spread((1e3 * requests / ms for ms in each[a].values()), 0) if a in each else "" for a in arms),
                ]
                for requests, each in sorted(found.items())
            ],
        )
        if "patched" in arms:
            others = [name for name in rivals if name in arms]
            best = others[0] if len(others) == 1 else f"the best of {', '.join(others)}"
            to = {best: others} | ({"off": ["off"]} if "off" in arms else {})
            lines += ["Throughput of patched divided by others, round by round:", ""]
            lines += table(
                ["requests", *to],
                [
                    [str(requests), *(inverse(ratio(each, "patched", names)) for names in to.values())]
                    for requests, each in sorted(found.items())
                ],
            )
    return lines


def inverse(found: tuple[float, float, float] | None) -> str:
    """A ratio of times as a ratio of throughputs."""
    return shown(None if found is None else (1 / found[0], 1 / found[2], 1 / found[1]))


def micro_section(rows: list[Row]) -> list[str]:
    lines: list[str] = []
    for name, title in (("metadata", "The indexer's decode metadata"), ("ranking", "Ranking and boundaries")):
        found = [row for row in rows if row["part"] == "micro" and row["of"] == name and "costs" in row]
        if not found:
            continue
        lines += [
            f"### {title}",
            "",
            "Microseconds until the device is done / until the host may go on / on the device; of several rounds the"
            " median and range.",
            "",
        ]
        sizes = "requests x tokens, pages" if name == "metadata" else "requests x drafts"
        by_size = rounds_of_sizes(found)
        kinds = list(dict.fromkeys(kind for rounds in by_size.values() for kind in rounds))
        body = [
            [size, *(" / ".join(cost_texts(rounds.get(kind, []))) for kind in kinds)]
            for size, rounds in by_size.items()
        ]
        lines += table([sizes, *kinds], body)
    return lines


def size_of(row: Row) -> str:
    """The batch of a micro-benchmark, as its table names it."""
    if "steps" in row:
        return f"{row['requests']} x {row['steps']}"
    return f"{row['requests']} x {row['tokens']}, {row['pages']}"


def rounds_of_sizes(rows: Iterable[Row]) -> dict[str, dict[str, list[dict[str, float | None]]]]:
    """Batch -> what was called -> its costs, one of each round."""
    by_size: dict[str, dict[str, list[dict[str, float | None]]]] = {}
    for row in rows:
        kinds = by_size.setdefault(size_of(row), {})
        for kind, cost in row["costs"].items():
            kinds.setdefault(kind, []).append(cost)
    return by_size


def values_of(rounds: Iterable[dict[str, float | None]], name: str) -> list[float]:
    """One cost in every round that measured it."""
    return [value for cost in rounds if (value := cost.get(name)) is not None]


def share_of_each(rounds: Iterable[dict[str, float | None]], others: Iterable[dict[str, float | None]]) -> list[float]:
    """Wall time divided by another's, round by round."""
    pairs = zip(values_of(rounds, "wall_us"), values_of(others, "wall_us"), strict=True)
    return [ours / other for ours, other in pairs]


def cost_texts(rounds: list[dict[str, float | None]]) -> list[str]:
    found = [values_of(rounds, name) for name in dict.fromkeys(name for cost in rounds for name in cost)]
    return [spread(values, 1) if len(values) > 1 else f"{values[0]:.1f}" for values in found if values]


def start_section(rows: list[Row]) -> list[str]:
    found = [row for row in rows if row["part"] == "start" and row["capture"]]
    if not found:
        return []
    lines = [
        "### Start-up",
        "",
        "Graph capture as vLLM logs it; together means that several engines started at once: what memory each then took"
        " is not known, since vLLM logs what the device lost meanwhile.",
        "",
    ]
    return lines + table(
        ["of", "arm", "size", "ready", "capture", "memory", "together"],
        [
            [
                row["of"],
                row["arm"],
                row["size"],
                f"{row['ready_s']} s",
                f"{row['capture'][-1][0]} s",
                "" if row["together"] else f"{row['capture'][-1][1]} GiB",
                "yes" if row["together"] else "no",
            ]
            for row in found
        ],
    )


OLDER, NEWER = "patched", "without-unblocked-confidences"
"""Arms whose budgets read record N-2 and record N-1."""


def staleness_batches(rows: list[Row]) -> list[dict[str, Row]]:
    """Arm -> measurement, of every batch of prompts that both arms answered."""
    by_batch: dict[tuple[str, int], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["part"] == "staleness":
            by_batch[row["run"], row["first_prompt"]][row["arm"]] = row
    return [arms for arms in by_batch.values() if {OLDER, NEWER} <= set(arms)]


def request_steps_and_length(batches: list[dict[str, Row]], arm: str) -> tuple[int, float]:
    """Pairs of a request and a step, and the acceptance length over them."""
    steps = sum(arms[arm]["request_steps"] for arms in batches)
    return steps, 1 + sum(arms[arm]["accepted"] for arms in batches) / steps


def staleness_section(rows: list[Row]) -> list[str]:
    batches = staleness_batches(rows)
    if not batches:
        return []
    lines = ["### What a record's age costs", "", "The bundled pair on a CPU, 16 greedy requests at a time.", ""]
    shown_of = {name: request_steps_and_length(batches, arm) for name, arm in (("N-1", NEWER), ("N-2", OLDER))}
    lines += table(
        ["budget reads", "request-steps", "acceptance length"],
        [[f"record {name}", str(steps), f"{length:.4f}"] for name, (steps, length) in shown_of.items()],
    )
    same = sum(arms[OLDER]["said"] == arms[NEWER]["said"] for arms in batches)
    lines += [f"Answers were the same in {same} of {len(batches)} batches.", ""]
    return lines


NAME = 90
"""Characters shown of a kernel's name."""


def shortened(name: str) -> str:
    """A kernel's name, or a gap's, that a table has room for: what its template holds fills hundreds of characters."""
    # A copy's own name holds an arrow: `Memcpy HtoD (Pinned -> Device)`.
    kernels = [each.removeprefix("void ") for each in re.split(r" -> (?!\w+\))", name)]
    short = [each if len(each) <= NAME else f"{each[: NAME - 20]}...{each[-17:]}" for each in kernels]
    return f"`{' -> '.join(short)}`".replace("|", "\\|")


WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize")
"""Calls in which the host waits for the device."""
OF_THE_TRACE = "cudaDeviceSynchronize"
"""In which a trace itself waited when the recorded rows were measured; no engine calls it in a step."""


def trace_section(rows: list[Row]) -> list[str]:
    """Sums of every trace, and by what patched differs from fixed."""
    traces = {(row["requests"], row["arm"]): row for row in rows if row["part"] == "trace"}
    if not traces:
        return []
    lines = [
        "### A step under the profiler",
        "",
        "Microseconds a step, every draft accepted. The device was watched in one run and the host in another. Watching"
        " takes its own time, above all where graphs are launched, and not the same in every run: compare arms by how"
        " long the device was busy, not by how long it was idle.",
        "",
    ]
    body = []
    for (requests, arm), row in traces.items():
        called = {name: us for name, (us, _) in row["by_host"].items()}
        waits = sum(called.get(name, 0.0) for name in WAITS)
        calls = row["host_us"] - waits - called.get(OF_THE_TRACE, 0.0)
        spent = (row["device_us"] - row["idle_us"], row["idle_us"], calls, waits)
        body.append([str(requests), arm, str(row["steps"]), f"{row['kernels']:.1f}", *(f"{us:.0f}" for us in spent)])
    lines += table(["requests", "arm", "steps", "kernels", "busy", "idle", "host's calls", "host's waits"], body)
    pairs = {
        n: (row, traces[n, "fixed"]) for (n, arm), row in traces.items() if arm == "patched" and (n, "fixed") in traces
    }
    return lines + (trace_differences(pairs) if pairs else [])


def trace_differences(pairs: dict[int, tuple[Row, Row]]) -> list[str]:
    """By what patched differs from fixed, of both traces of each number of requests."""
    kernels, gaps = (
        {n: differences(by_kind(ours[spent]), by_kind(fixed[spent])) for n, (ours, fixed) in pairs.items()}
        for spent in ("by_kernel", "by_gap")
    )
    added: dict[int, Spent] = {n: {} for n in pairs}
    alike: dict[int, Spent] = {n: {} for n in pairs}
    for n, spent in kernels.items():
        for name, (us, times) in spent.items():
            (added if abs(times) >= 0.5 else alike)[n][name] = (us, times)
    return [
        "Patched against fixed, microseconds more (times more) a step, by requests. Kernels run more or less often:",
        "",
        *by_requests("kernel", added),
        "Those that run as often, and gaps, the ten that differ most; of one run each, so also by chance:",
        "",
        *by_requests("kernel", alike, 10),
        *by_requests("gap", gaps, 10),
    ]


def by_requests(what: str, found: dict[int, Spent], most: int | None = None) -> list[str]:
    """A row for each name, the largest difference first, and a column for each number of requests."""
    largest: dict[str, float] = defaultdict(float)
    for each in found.values():
        for name, (us, _) in each.items():
            largest[name] = max(largest[name], abs(us))
    body = []
    for name in sorted(largest, key=lambda name: (-largest[name], name))[:most]:
        spent = (each.get(name) for each in found.values())
        body.append([shortened(name), *("" if us is None else f"{us[0]:+.1f} ({us[1]:+.1f})" for us in spent)])
    return table([what, *map(str, found)], body)


def criteria_section(rows: list[Row]) -> list[str]:
    """What was asked for beside what was measured; what was not measured is not in it."""
    body: list[list[str]] = []

    def state(what: str, target: str, measured: float, met: bool, digits: int) -> None:
        body.append([what, target, f"{measured:.{digits}f}", "yes" if met else "no"])

    for part in ("overhead", "workloads"):
        sizes = ", ".join(sorted({row["size"] for row in rows if row["part"] == part}))
        for (workload, requests), arms in sorted(by_round(rows, part).items()):
            found = ratio(arms, "patched", ["fixed"])
            if found and workload == "full" and requests <= OVERHEAD_REQUESTS:
                what = f"time a token, full budgets, {sizes}, {requests} requests, patched / fixed"
                state(what, "at most 1.01", found[0], found[0] <= 1.01, 3)
    micro = {"metadata": [], "ranking": []} | by_key(
        [row for row in rows if row["part"] == "micro" and "costs" in row], "of"
    )
    metadata = rounds_of_sizes(row for row in micro["metadata"] if 16 <= row["requests"] <= 128)
    if metadata:
        for name, title, most in (("wall_us", "wall", 60), ("enqueue_us", "host", 25)):
            slowest = max(median(values_of(rounds["ragged, one kernel"], name)) for rounds in metadata.values())
            state(f"ragged metadata, 16 to 128 requests, {title} us", f"at most {most}", slowest, slowest <= most, 1)
    if micro["metadata"]:
        slowest = max(
            median(share_of_each(rounds["uniform, one kernel"], rounds["uniform, upstream"]))
            for rounds in rounds_of_sizes(micro["metadata"]).values()
        )
        state("even metadata, patched / upstream, wall", "at most 1", slowest, slowest <= 1, 2)
    ranking = rounds_of_sizes(micro["ranking"]).get("256 x 7")
    if ranking:
        share = median(share_of_each(ranking["ranking and boundaries, one kernel"], ranking["ranking, upstream"]))
        state("ranking 256 x 7, patched / upstream, wall", "at most 0.5", share, share <= 0.5, 2)
    for (workload, requests), arms in sorted(by_round(rows, "workloads").items()):
        # The time a token of the same rounds is above.
        if workload == "full" and requests <= OVERHEAD_REQUESTS:
            continue
        what = f"throughput, {workload}, {requests} requests, patched"
        if found := ratio(arms, "patched", ["fixed", "upstream", "unpatched"]):
            state(f"{what} / best other", "at least 0.99", 1 / found[0], 1 / found[0] >= 0.99, 3)
        found = ratio(arms, "patched", ["off"])
        if found and workload == "high":
            state(f"{what} / off", "at least 1.0", 1 / found[0], 1 / found[0] >= 1, 3)
        elif found and workload == "decaying":
            # Where few drafts are accepted, drafting itself may be a loss.
            body.append([f"{what} / off", "no target", f"{1 / found[0]:.3f}", ""])
    starts = by_key(
        [row for row in rows if row["part"] == "start" and row["of"] == "startup" and row["capture"]], "arm"
    )
    if (ours := starts.get("patched")) and (fixed := starts.get("fixed")):
        for place, what in enumerate(("time", "memory")):
            ends = [median(float(row["capture"][-1][place]) for row in each) for each in (ours, fixed)]
            compared = f"graph capture, {what}, patched / fixed, medians of {len(ours)} and {len(fixed)} starts"
            state(compared, "at most 1.3", ends[0] / ends[1], ends[0] / ends[1] <= 1.3, 2)
    if batches := staleness_batches(rows):
        share = request_steps_and_length(batches, OLDER)[1] / request_steps_and_length(batches, NEWER)[1]
        state("acceptance length, budgets of record N-2 / N-1", "at least 0.995", share, share >= 0.995, 4)
    for (workload, requests), arms in sorted(by_round(rows, "grids").items()):
        found = ratio(arms, "patched", [UPSTREAMS_GRID])
        if found:
            what = f"throughput, {workload}, {requests} requests, patched / upstream's grid"
            state(what, "at least 0.99", 1 / found[0], 1 / found[0] >= 0.99, 3)
    if not body:
        return []
    return ["### Asked for and measured", "", *table(["what", "asked", "measured", "met"], body)]


def by_key(rows: list[Row], key: str) -> dict[str, list[Row]]:
    grouped: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row[key]].append(row)
    return grouped


def section(rows: list[Row]) -> str:
    """The section of RESULTS.md."""
    lines = ["## Adaptive verification against fixed", ""]
    for row in (row for row in rows if row["part"] == "machine"):
        facts = ", ".join(
            f"{name} {row[name]}" for name in ("device", "driver", "vllm", "torch", "triton") if name in row
        )
        lines.append(f"- `python -m tests.bench.never_slower {row['command']}`: {facts}")
    lines += [
        "",
        "What ran is a Qwen3 shape with dummy weights and FlashAttention. Every raw round is in results.json.",
        "",
    ]
    lines += criteria_section(rows)
    lines += overhead_section(rows)
    lines += workload_section(rows, "workloads", "Throughput", ("fixed", "upstream", "unpatched"))
    lines += micro_section(rows)
    lines += start_section(rows)
    lines += workload_section(rows, "grids", "Throughput by token grid", (UPSTREAMS_GRID,))
    lines += trace_section(rows)
    lines += staleness_section(rows)
    return "\n".join(lines).rstrip() + "\n"


def write(paths: list[Path]) -> None:
    """Merge raw files into results.json, and rewrite the section of RESULTS.md."""
    rows = read(paths)
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    data["never_slower"] = rows
    lines = [f" {json.dumps(name)}: [\n  " + ",\n  ".join(json.dumps(r) for r in data[name]) + "\n ]" for name in data]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    text = RESULTS.read_text()
    body = f"{BEGIN}\n{section(rows)}{END}"
    if BEGIN in text:
        text = re.sub(f"{BEGIN}.*?{END}", lambda _: body, text, flags=re.DOTALL)
    else:
        text = text.rstrip() + f"\n\n{body}\n"
    RESULTS.write_text(text)
