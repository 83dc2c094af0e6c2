"""`python -m tests.bench.telemetry_engine [--cpu]`: what telemetry adds to a step of a real engine.

One engine, its step recorder taken out and put back in turns. Acceptance is injected, so that a request takes the same
steps either way and the ratio of times a token is that of steps. Wanted: at most 0.5 % of a step on a GPU. The record
is `OUT/telemetry-engine.json`, the table `OUT/telemetry-engine.md`. `telemetry_cost` measures the same work alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.arms import ARMS, DRAFTS, Setting
from tests.bench.in_turns import Cell, Times, in_turns, median_and_range, ratios
from tests.bench.never_slower import SPREAD, WORKLOADS, Run, machine, say, started

WANTED = 1.005
WHOLE_S = 4 * 3600.0


def markdown(facts: dict[str, Any], token_ms: dict[int, Times]) -> str:
    shown = ", ".join(f"{key} {facts[key]}" for key in ("device", "driver", "vllm", "torch") if key in facts)
    lines = [
        f"`python -m tests.bench.telemetry_engine {facts['command']}`: {shown}. Milliseconds a token, in turns in one "
        "engine, median and range over the rounds; the ratio round by round, at most "
        f"{WANTED} wanted of its median.",
        "",
        "| requests | with telemetry | without | ratio | met |",
        "|---|---|---|---|---|",
    ]
    for requests, times in token_ms.items():
        met = "yes" if statistics.median(ratios(times)) <= WANTED else "no"
        on, off = (median_and_range(times[name]) for name in ("on", "off"))
        lines.append(f"| {requests} | {on} | {off} | {median_and_range(ratios(times), 4)} | {met} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the bundled tiny pair: does it run, not how fast")
    parser.add_argument("--size", default="8b", help="8b, 4b or tiny: dummy weights of that shape")
    parser.add_argument("--requests", default="1,16,64", help="at once, separated by commas")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, help="of a request (385, with --cpu 33)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/telemetry-engine"), help="models, logs, caches")
    parser.add_argument("--out", type=Path, default=Path("telemetry-engine"), help="where results go")
    options = parser.parse_args()
    if not options.cpu:
        import torch

        if not torch.cuda.is_available():
            sys.exit("telemetry_engine: needs a GPU; --cpu runs it on the tiny pair")
    requests = [int(text) for text in options.requests.split(",")]
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out / "telemetry-engine.jsonl", options.folder)
    run.begin(WHOLE_S)
    setting = (
        Setting("cpu", max(requests), 0, 0.25)
        if options.cpu
        else Setting(options.size, max(requests), max(requests) * (DRAFTS + 1), 6.0)
    )
    facts = {"command": " ".join(sys.argv[1:]), **dict(machine())}
    with tempfile.TemporaryDirectory() as counters:
        os.environ["DSPARK_TELEMETRY_DIR"] = counters
        with started(run, "telemetry-engine", [ARMS["patched"]], setting, together=True) as engines:
            if not engines:
                sys.exit("telemetry_engine: the engine did not start")
            (engine,) = engines.values()
            token_ms: dict[int, Times] = {}
            if not engine.rpc("bench_telemetry", True):
                sys.exit("telemetry_engine: the engine has no step recorder")
            rates = WORKLOADS["high"][: setting.drafts]
            engine.rpc("bench_workload", rates, rates, SPREAD)
            for each in requests:
                cell = Cell(each, options.tokens or (33 if options.cpu else 385), 600.0 if options.cpu else 120.0)
                token_ms[each] = in_turns(engine, lambda on: engine.rpc("bench_telemetry", on), cell, options.rounds)
                say(f"{each} requests: {token_ms[each]}")
                record = {"facts": facts, "token_ms": token_ms}
                (options.out / "telemetry-engine.json").write_text(json.dumps(record, indent=1) + "\n")
                (options.out / "telemetry-engine.md").write_text(markdown(facts, token_ms))


if __name__ == "__main__":
    main()
