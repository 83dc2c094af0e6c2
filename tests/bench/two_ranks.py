"""tp-consensus in a real engine of two tensor-parallel ranks: what it prevents, what it survives, what it costs.

usage: python -m tests.bench.two_ranks [--cpu] [--steps 10000] [--minutes 5] [--only cost,drift,stress,apart] [options]

One engine runs all parts, in the order given; its ranks are real processes (NCCL on two GPUs, gloo with --cpu, which
serves the bundled tiny pair). A part that hangs is told by a watchdog: no answer in `--longest-step` seconds beyond
what was asked for ends the engine. The record is `OUT/two-ranks.json`, the tables `OUT/two-ranks.md`. Exits with 1
unless every part that ran found what it must.

  cost    milliseconds a token with the broadcast and without it, in turns, and how long the broadcast takes
  drift   every rank's confidences drift differently and are shared: all ranks decide alike, for so many steps
  stress  the same while waves of requests of one length drain together, some aborted, for so many minutes
  apart   the same without sharing: ranks decide differently, and the engine, which hangs then or not, is ended
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench import rank_records
from tests.bench.arms import ARMS, DRAFTS, PROMPT, Engine, EngineError, Setting
from tests.bench.in_turns import Cell, in_turns
from tests.bench.never_slower import FULL, WORKLOADS, Run, machine, say, started
from tests.bench.two_ranks_report import markdown

RANKS = 2
DRIFT = 1e-3
"""By how much a drifting confidence is off: more than two ways of adding up an all-reduce are."""
SPREAD = 0.4
WHOLE_S = 4 * 3600.0
ABORTS = 0.02
"""Probability that a request is aborted after an output."""


def curves(max_requests: int, max_tokens: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Draft and verify costs under which budgets bind, and neither always nor alike: the more tokens, the dearer."""
    sizes = [1, *range(4, max_tokens + 4, 4)]
    return [(1, 1.0), (max_requests, 1.0)], [(size, 10 + 10 * (size / max_tokens) ** 2) for size in sizes]


class Ranks:
    """The engine under test, and how its parts talk to it."""

    def __init__(self, engine: Engine, folder: Path, options: argparse.Namespace) -> None:
        self.engine, self._folder, self.options = engine, folder, options
        self.max_requests = engine.setting.max_requests
        self.drafts = engine.setting.drafts

    def every_rank(self, method: str, *args: Any) -> list[Any]:
        return self.engine.rpc_of_ranks(method, *args, seconds=self.options.longest_step)

    def drift(self, amount: float) -> None:
        """Varying confidences, drafts accepted as often as these say, and the ranks' own errors on top."""
        rates = WORKLOADS["decaying"][: self.drafts]
        self.every_rank("bench_workload", rates, rates, SPREAD)
        self.every_rank("ranks_set_costs", *curves(self.max_requests, self.max_requests * (self.drafts + 1)))
        self.every_rank("ranks_drift", amount)

    def recording(self, name: str, every: int) -> Path:
        """Record into a folder of its own, which is returned."""
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(RANKS):
            rank_records.record_file(folder, rank).unlink(missing_ok=True)
        self.every_rank("ranks_record", str(folder), every)
        return folder

    def compared(self, folder: Path) -> rank_records.Comparison:
        return rank_records.compare(*(rank_records.read(folder, rank, self.max_requests) for rank in range(RANKS)))

    def waves(self, seconds: float, *, shortest: int, longest: int, aborts: float = 0.0) -> dict[str, Any]:
        seen: dict[str, Any] = self.engine.ask(
            "waves",
            seconds + self.options.longest_step,
            lasting=seconds,
            requests=self.max_requests,
            prompt=PROMPT,
            shortest=shortest,
            longest=longest,
            aborts=aborts,
        )
        return seen

    def end_waves(self) -> None:
        self.engine.ask("end_waves", self.options.longest_step)


def drift(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """No step of so many differs."""
    ranks.drift(DRIFT)
    folder, began = ranks.recording("drift", options.every), time.monotonic()
    compared = ranks.compared(folder)
    while compared.steps < options.steps and time.monotonic() - began < options.drift_seconds:
        ranks.waves(options.slice, shortest=2, longest=4 * options.tokens)
        compared = ranks.compared(folder)
        say(f"drift: {compared.steps} steps, {compared.budgets} budgets and {compared.boundaries} boundaries differ")
    ranks.end_waves()
    ranks.every_rank("ranks_record", None, 0)
    compared = ranks.compared(folder)
    return {
        "seconds": round(time.monotonic() - began, 1),
        "wanted_steps": options.steps,
        **asdict(compared),
        "as_it_must": compared.steps >= options.steps and compared.first is None and compared.distinct_budgets > 5,
    }


def stress(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Waves that drain; every request ends with all its tokens or is aborted, and no step takes too long."""
    ranks.drift(DRIFT)
    folder, began = ranks.recording("stress", options.every), time.monotonic()
    steps_before = ranks.every_rank("bench_counts")[0]["steps"]
    seen = ranks.waves(0.0, shortest=options.tokens, longest=options.tokens)
    while time.monotonic() - began < 60 * options.minutes:
        seen = ranks.waves(options.slice, shortest=options.tokens, longest=options.tokens, aborts=ABORTS)
        say(f"stress: {time.monotonic() - began:.0f} s, {seen}")
        if seen["longest_s"] > options.longest_step:
            break
    steps = ranks.every_rank("bench_counts")[0]["steps"] - steps_before
    ranks.end_waves()
    counts = {name: seen[name] for name in ("waves", "finished", "aborted", "outputs")}
    ranks.every_rank("ranks_record", None, 0)
    compared = ranks.compared(folder)
    return {
        "seconds": round(time.monotonic() - began, 1),
        "concurrency": ranks.max_requests,
        "steps": steps,
        **counts,
        "together": seen["together"],
        "longest_s": round(seen["longest_s"], 3),
        "compared": asdict(compared),
        "longest_allowed_s": options.longest_step,
        "as_it_must": seen["longest_s"] <= options.longest_step and counts["finished"] > 0 and compared.first is None,
    }


def apart(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Without sharing a step differs soon. What becomes of the engine then is not known, so this is its last part."""
    ranks.drift(DRIFT)
    folder, began = ranks.recording("apart", 1), time.monotonic()
    ranks.every_rank("ranks_share", False)
    ended = "went on"
    compared = ranks.compared(folder)
    while compared.first is None and ended == "went on" and time.monotonic() - began < options.apart_seconds:
        try:
            ranks.waves(1.0, shortest=2, longest=4 * options.tokens)
        except EngineError as error:
            ended = str(error)
        compared = ranks.compared(folder)
    found: dict[str, Any] = {}
    if compared.first is not None:
        rows = [rank_records.read(folder, rank, ranks.max_requests)[compared.first] for rank in range(RANKS)]
        found = {
            "first_budgets": [int(row[rank_records.BUDGET]) for row in rows],
            "first_boundaries_equal": bool((rows[0] == rows[1])[rank_records.BOUNDARIES :].all()),
            "first_batch_equal": bool((rows[0] == rows[1])[: rank_records.BUDGET].all()),
        }
    return {
        "seconds": round(time.monotonic() - began, 1),
        "engine": ended,
        **asdict(compared),
        **found,
        "as_it_must": bool(found) and found["first_batch_equal"],
    }


def cost(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Full budgets from equal confidences, so that nothing differs but the broadcast."""
    ranks.every_rank("ranks_drift", 0.0)
    ranks.every_rank("bench_workload", [1.0] * ranks.drafts, [FULL] * ranks.drafts, 0.0)
    token_ms, broadcast = {}, {}
    for requests in (1, 16, 64):
        if requests > ranks.max_requests:
            continue
        cell = Cell(requests, options.cost_tokens, options.measure_seconds)
        token_ms[requests] = in_turns(
            ranks.engine, lambda on: ranks.every_rank("ranks_share", on), cell, options.rounds
        )
        ranks.every_rank("ranks_time_broadcast")
        cell.token_ms(ranks.engine, 1)
        times = ranks.every_rank("ranks_broadcast_times")
        broadcast[requests] = [{what: spread(of_rank) for what, of_rank in each.items()} for each in times]
        say(f"cost: {requests} requests, {token_ms[requests]}, broadcast {broadcast[requests]}")
    return {
        "token_ms": token_ms,
        "broadcast_us": broadcast,
        "no_device_time": None if "device" in broadcast[1][0] else "a CPU's work is done when its call returns",
        "as_it_must": True,
    }


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "calls": len(ordered),
        "median": round(statistics.median(ordered), 2),
        "p10": round(ordered[len(ordered) // 10], 2),
        "p90": round(ordered[9 * len(ordered) // 10], 2),
    }


PARTS = {"cost": cost, "drift": drift, "stress": stress, "apart": apart}


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the bundled tiny pair on two CPU ranks")
    parser.add_argument("--size", default="8b", help="8b, 4b or tiny: dummy weights of that shape")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, in order; apart must be the last")
    parser.add_argument("--requests", type=int, default=64, help="largest batch, and requests of a wave")
    parser.add_argument("--steps", type=int, default=10_000, help="of drift")
    parser.add_argument("--minutes", type=float, default=5.0, help="of stress")
    parser.add_argument("--tokens", type=int, help="of a request of stress (200, with --cpu 12)")
    parser.add_argument("--rounds", type=int, default=8, help="of cost")
    parser.add_argument("--cost-tokens", type=int, help="of a measurement (385, with --cpu 25)")
    parser.add_argument("--longest-step", type=float, help="seconds that a step may take (20, with --cpu 120)")
    parser.add_argument("--every", type=int, help="steps that a rank writes at once (256, with --cpu 8)")
    parser.add_argument("--slice", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--drift-seconds", type=float, default=7200.0, help="bound on drift")
    parser.add_argument("--apart-seconds", type=float, default=120.0, help="bound on apart")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/two-ranks"), help="models, logs, caches, records")
    parser.add_argument("--out", type=Path, default=Path("two-ranks"), help="where results go")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"--only: no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if "apart" in names[:-1]:
        parser.error("--only: apart must be the last, the engine may hang in it")
    options.tokens = options.tokens or (12 if options.cpu else 200)
    options.every = options.every or (8 if options.cpu else 256)
    options.cost_tokens = options.cost_tokens or (25 if options.cpu else 385)
    options.longest_step = options.longest_step or (120.0 if options.cpu else 20.0)
    options.measure_seconds = 600.0 if options.cpu else 120.0
    return options


def cannot_run(options: argparse.Namespace) -> str | None:
    """Why this host cannot run it, or None."""
    if options.cpu:
        return None
    import torch

    devices = torch.cuda.device_count()
    return None if devices >= RANKS else f"needs {RANKS} GPUs and sees {devices}; --cpu runs it on the tiny pair"


def main() -> None:
    options = parsed(sys.argv[1:])
    reason = cannot_run(options)
    if reason is not None:
        sys.exit(f"two_ranks: {reason}")
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out / "two-ranks.jsonl", options.folder)
    run.begin(WHOLE_S)
    facts = {"command": " ".join(sys.argv[1:]), "ranks": RANKS, **dict(machine())}
    setting = (
        Setting("cpu", options.requests, 0, 0.25, ranks=RANKS)
        if options.cpu
        else Setting(options.size, options.requests, options.requests * (DRAFTS + 1), 6.0, ranks=RANKS)
    )
    results: dict[str, Any] = {"facts": facts}
    with started(run, "two-ranks", [ARMS["patched"]], setting, together=True) as engines:
        if not engines:
            sys.exit("two_ranks: the engine did not start")
        (engine,) = engines.values()
        facts["ready_s"] = engine.ready["ready_s"]
        ranks = Ranks(engine, options.folder / "records", options)
        for name in options.only.split(","):
            say(f"part {name}")
            try:
                results[name] = PARTS[name](ranks, options)
            except EngineError as error:
                results[name] = {"as_it_must": False, "error": str(error)}
                say(error, "\n" + engine.tail())
            say(name, json.dumps(results[name]))
            run.record(name, **results[name])
            (options.out / "two-ranks.json").write_text(json.dumps(results, indent=1) + "\n")
            (options.out / "two-ranks.md").write_text(markdown(results))
            if "error" in results[name]:
                break
    failed = [name for name in options.only.split(",") if not results.get(name, {}).get("as_it_must")]
    say(f"not as they must be: {', '.join(failed)}" if failed else "all as they must be")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
