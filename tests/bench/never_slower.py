"""Is adaptive verification ever slower than fixed? Measures it on one GPU, in interleaved rounds. See RESULTS.md.

usage: python -m tests.bench.never_slower --raw RAW.jsonl --only PART[,PART] [--part-seconds 480] [options]
       python -m tests.bench.never_slower --report RAW.jsonl [RAW.jsonl ...]

All engines of a part live on the device at once, one process each, and all but one are idle at any time, so that the
arms of a cell are compared in the same minute. Every measurement is printed and appended to RAW as soon as it is there.
A part ends in good order `--part-seconds` after it began, the start of its engines included. Run again with the same
RAW, it goes on: what RAW has of rounds and micro-benchmarks is not measured again. An engine that fails shows the end
of its log, and the others go on.

Parts:
  overhead   confidences forced to 0.999 and every draft accepted: budgets are full, only the overhead differs
  micro      the indexer's metadata, and the ranking, by themselves
  workloads  synthetic acceptance with varying confidences of the same mean, from 1 to 256 requests, the overhead, and
             no speculation, which comes last in a round
  startup    time and memory of graph capture, one engine after another, in turns
  grids      throughput with the coarser grid of captured sizes and with upstream's
  trace      PyTorch's profiler over some steps: kernels and the gaps between them, then the host's calls
  staleness  acceptance length with confidences one record older, of the bundled pair, on a CPU

On an H200 host, calls of at most ten minutes each:

  python -m tests.bench.never_slower --raw workloads.jsonl --only workloads --rounds 9 --part-seconds 540
  python -m tests.bench.never_slower --raw startup.jsonl --only startup --rounds 3 --part-seconds 480
  python -m tests.bench.never_slower --raw grids.jsonl --only grids --rounds 9 --part-seconds 250
  python -m tests.bench.never_slower --raw trace.jsonl --only trace --part-seconds 400
  python -m tests.bench.never_slower --raw micro.jsonl --only micro --part-seconds 120

On a CPU, then the report:

  python -m tests.bench.never_slower --raw staleness.jsonl --only staleness --part-seconds 800
  python -m tests.bench.never_slower --report {workloads,startup,grids,trace,micro,staleness}.jsonl

Does the driver work? On any CPU: the same with `--cpu-smoke --arms fixed,patched --rounds 1 --most 4`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.bench.arms import ARMS, DRAFTS, REPOSITORY, Arm, Engine, EngineError, Setting
from tests.bench.never_slower_report import NEWER, OLDER, UPSTREAMS_GRID, read, token_ms

WORKLOADS: dict[str, list[float]] = {
    "full": [1.0] * DRAFTS,
    "high": [0.9] * DRAFTS,
    "decaying": [0.85, 0.75, 0.6, 0.45, 0.35, 0.25, 0.2],
}
"""[positions] probability that a draft is accepted, given that those before it were."""

SPREAD = 0.1
"""Injected confidences vary evenly this far around the workload's rates; those of `full` do not vary."""

FULL = 0.999
"""Every confidence of `full`: budgets are full, and adaptive and fixed differ by the overhead only."""

FEW = 16
"""Requests at once up to which the overhead is a noticeable part of a step."""

CONCURRENCY = (1, 4, 16, 64, 128, 256)
TRACED = 20
"""Steps of a trace, at most."""
BEFORE, AFTER = 8, 4
"""Steps with every draft accepted before a trace, those of prompts among them, and after it."""
START_S, MEASURE_S = 420.0, 120.0
"""How long an engine may take to start, and for one measurement; five times as long on a CPU."""
START_ROOM_S = 60.0
"""A start is not begun with less time left; five times as much on a CPU."""
TRACE_ROOM_S = 30.0
"""Nor a trace of one engine."""


class Run:
    """Where measurements go, what is there already, and how long there is."""

    def __init__(self, raw: Path, folder: Path) -> None:
        raw.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._raw, self.folder = raw, folder
        self._deadline = time.monotonic()
        self._run = f"{time.time():.0f}"
        self.before = read([raw]) if raw.exists() else []
        if raw.exists() and not raw.read_text().endswith("\n"):
            with raw.open("a") as cut_short:
                cut_short.write("\n")

    def begin(self, seconds: float) -> None:
        """A part begins, and has so long."""
        self._deadline = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the part must end."""
        return self._deadline - time.monotonic()

    def has(self, part: str, **what: Any) -> bool:
        """Whether an earlier run recorded such a measurement."""
        return any(row["part"] == part and what.items() <= row.items() for row in self.before)

    def rounds_left(self, part: str, cells: list[dict[str, Any]], rounds: int) -> int:
        """How many of `rounds` earlier runs did not record whole."""
        wanted = {(arm, cell["workload"], cell["requests"]) for cell in cells for arm in cell["arms"]}
        found: dict[tuple[str, int], set[tuple[str, str, int]]] = {}
        for row in self.before:
            if row["part"] == part:
                seen = found.setdefault((row["run"], row["round"]), set())
                seen.add((row["arm"], row["workload"], row["requests"]))
        return max(rounds - sum(wanted <= seen for seen in found.values()), 0)

    def record(self, part: str, **what: Any) -> None:
        """Append one measurement."""
        with self._raw.open("a") as raw:
            raw.write(json.dumps({"run": self._run, "part": part, "at": round(time.time(), 1), **what}) + "\n")


def say(*what: object) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]", *what, flush=True)


@contextlib.contextmanager
def started(
    run: Run, part: str, arms: list[Arm], setting: Setting, *, together: bool, **facts: Any
) -> Iterator[dict[str, Engine]]:
    """Engines that started; with the block every one ends, also one that an interrupted start leaves.

    Together saves time; one at a time leaves each start a quiet device but for idle ones. `facts` are recorded.
    """
    engines: dict[str, Engine] = {}
    waiting = list(arms)
    with contextlib.ExitStack() as ends:
        while waiting:
            if engines and run.left() < 60:
                say(f"{part}: no time left for {', '.join(arm.name for arm in waiting)}")
                break
            batch = waiting if together else waiting[:1]
            waiting = waiting[len(batch) :]
            begun = []
            for arm in batch:
                begun.append(Engine(arm, setting, run.folder / part))
                ends.callback(begun[-1].stop)
            engines |= {
                engine.arm.name: engine
                for engine in begun
                if became_ready(run, part, engine, together=together, **facts)
            }
        yield engines


def became_ready(run: Run, part: str, engine: Engine, **facts: Any) -> bool:
    """Wait for an engine that was begun and record its start; one that fails is ended at once."""
    try:
        ready = engine.wait_until_ready(min(START_S * patience(engine.setting), run.left()))
    except EngineError as error:
        say(error, "\n" + engine.tail())
        engine.stop()
        return False
    name, size = engine.arm.name, engine.setting.size
    capture = re.findall(r"Graph capturing finished in (\d+) secs, took (-?[\d.]+) GiB", engine.tail(200_000))
    run.record("start", of=part, arm=name, size=size, capture=capture, **facts, **ready)
    say(f"{name}: ready in {ready['ready_s']} s, graphs {capture}")
    return True


def profile_costs(run: Run, engines: dict[str, Engine]) -> None:
    """Every adaptive engine's own cost profile once more, one after another while nothing else runs."""
    for name, engine in list(engines.items()):
        if engine.arm.speculation != "adaptive" or engine.setting.size == "cpu":
            continue
        try:
            profile = engine.rpc("bench_profile_costs", seconds=min(180.0, run.left()))
        except EngineError as error:
            lose(engines, name, error)
            continue
        run.record("costs", arm=name, size=engine.setting.size, **profile)
        say(f"{name}: {profile['batches']} batches of {profile['graphs']} graphs profiled in {profile['seconds']} s")


def rotated(names: list[str], by: int) -> list[str]:
    by %= max(len(names), 1)
    return names[by:] + names[:by]


def lose(engines: dict[str, Engine], name: str, error: EngineError) -> None:
    say(error, "\n" + engines[name].tail())
    engines.pop(name).stop()


def measure(
    run: Run, part: str, engines: dict[str, Engine], cells: list[dict[str, Any]], rounds: int, **facts: Any
) -> None:
    """Rounds over all cells; in each cell the engines take turns, in another order every round.

    A cell holds `requests`, `tokens`, `repeats`, the injected `workload`, `rates` and `confidences`, and the `arms`
    that measure it.
    """
    for number in range(-1, rounds) if engines else ():  # the first only warms up
        for cell in cells:
            for name in rotated([name for name in engines if name in cell["arms"]], number):
                engine = engines[name]
                if run.left() < 15:
                    say(f"{part}: out of time in round {number}")
                    return
                try:
                    if len({c["workload"] for c in cells}) > 1 or number < 0:
                        inject(engine, cell)
                    found = engine.measure(
                        allowed(run, engine),
                        requests=cell["requests"],
                        tokens=cell["tokens"] if number >= 0 else min(48, cell["tokens"]),
                        repeats=cell["repeats"] if number >= 0 else 1,
                    )
                except EngineError as error:
                    lose(engines, name, error)
                    continue
                if number >= 0:
                    kept = {key: cell[key] for key in ("workload", "requests", "tokens", "spread")}
                    run.record(part, round=number, arm=name, size=engine.setting.size, **kept, **facts, **found)
                    took = ", ".join(f"{ms:.3f}" for ms in token_ms(cell["requests"], found))
                    say(f"{part} {number}: {cell['workload']} x {cell['requests']}, {name}: {took} ms a token")
        say(f"{part}: round {number} done, {run.left():.0f} s left")


def cell_of(
    setting: Setting, arms: list[str], workload: str, requests: int, tokens: int, repeats: int = 1
) -> dict[str, Any]:
    """What `measure` measures of one workload at one number of requests."""
    return injected(setting, workload) | {
        "requests": requests,
        "tokens": tokens_of(setting, tokens),
        "repeats": repeats,
        "arms": arms,
    }


def injected(setting: Setting, workload: str) -> dict[str, Any]:
    """A workload's name, and the acceptance and confidences that stand for it."""
    rates = WORKLOADS[workload][: setting.drafts]
    return {
        "workload": workload,
        "rates": rates,
        "confidences": [min(rate, FULL) for rate in rates],
        "spread": 0.0 if workload == "full" else SPREAD,
    }


def inject(engine: Engine, what: dict[str, Any]) -> None:
    """Have an engine work on a workload, or a cell's."""
    engine.rpc("bench_workload", what["rates"], what["confidences"], what["spread"])


def overhead(run: Run, options: argparse.Namespace) -> None:
    setting = setting_of(options, size="8b", requests=16, graph_tokens=128, kv_gib=3.0)
    arms = arms_of(options, ["fixed", "patched", "upstream"])
    cells = [
        cell_of(setting, arms, "full", requests, 385, repeats=3)
        for requests in CONCURRENCY
        if requests <= min(FEW, options.most)
    ]
    with_engines(run, "overhead", options, arms, setting, cells)


def workloads(run: Run, options: argparse.Namespace) -> None:
    setting = setting_of(options)
    arms = arms_of(options, ["off", "fixed", "upstream", "patched"])
    cells = [
        cell_of(
            setting,
            [name for name in arms if name != "off"],
            workload,
            requests,
            1025 if requests <= FEW else tokens_that_fit(requests),
        )
        for requests in CONCURRENCY
        for workload in WORKLOADS
        if requests <= options.most and (workload != "full" or requests <= FEW)
    ]
    # Without drafts every token is a step, and the same in every workload.
    cells += [
        cell_of(setting, ["off"], "high", requests, tokens_that_fit(requests))
        for requests in CONCURRENCY
        if requests <= options.most and "off" in arms
    ]
    with_engines(run, "workloads", options, arms, setting, cells)


def arms_of(options: argparse.Namespace, default: list[str]) -> list[str]:
    """The arms that were asked for, or a part's own."""
    named: list[str] | None = options.arms
    if options.size == "cpu":
        # Upstream alone does not run there.
        default = ["unpatched" if name == "upstream" else name for name in default]
    return named or default


def setting_of(
    options: argparse.Namespace, *, size: str = "4b", requests: int = 256, graph_tokens: int = 2048, kv_gib: float = 9.0
) -> Setting:
    """A part's own setting, of the size that was asked for; on a CPU that of the bundled pair."""
    if options.size == "cpu":
        return Setting("cpu", 16, 0, 0.25)
    return Setting(options.size or size, requests, graph_tokens, kv_gib)


def tokens_that_fit(requests: int) -> int:
    """Tokens of each of many requests that the KV cache holds."""
    return 257 if requests < 256 else 161


def tokens_of(setting: Setting, tokens: int) -> int:
    return 33 if setting.size == "cpu" else tokens


def patience(setting: Setting) -> float:
    return 5.0 if setting.size == "cpu" else 1.0


def allowed(run: Run, engine: Engine) -> float:
    """Seconds that a measurement may take."""
    return min(MEASURE_S * patience(engine.setting), run.left())


def with_engines(
    run: Run, part: str, options: argparse.Namespace, arms: list[str], setting: Setting, cells: list[dict[str, Any]]
) -> None:
    rounds = run.rounds_left(part, cells, options.rounds)
    if not rounds:
        say(f"{part}: all {options.rounds} rounds are there")
        return
    with started(run, part, [ARMS[name] for name in arms], setting, together=not options.one_by_one) as engines:
        profile_costs(run, engines)
        measure(run, part, engines, cells, rounds)


def trace(run: Run, options: argparse.Namespace) -> None:
    """What a step with a full budget does, adaptive and fixed, and what one without speculation does."""
    setting = setting_of(options)
    names = arms_of(options, ["fixed", "patched", "upstream", "off"])
    with started(run, "trace", [ARMS[name] for name in names], setting, together=not options.one_by_one) as engines:
        profile_costs(run, engines)
        for requests in (n for n in (1, 16, 128, 256) if n <= options.most):
            for name in list(engines):
                if run.left() < TRACE_ROOM_S * patience(setting):
                    say(f"trace: out of time at {requests} requests, {name}")
                    return
                try:
                    found = trace_steps(run, engines[name], requests)
                except EngineError as error:
                    lose(engines, name, error)
                    continue
                run.record("trace", arm=name, size=setting.size, requests=requests, **found)
                whole = ("steps", "device_us", "idle_us", "kernels", "host_us")
                say(f"trace of {requests} requests, {name}:", {key: found[key] for key in whole})


def trace_steps(run: Run, engine: Engine, requests: int) -> dict[str, Any]:
    """One run to warm up, one with the device watched, and one with the host: each watch slows the other.

    Every draft is accepted.
    """
    most = engine.setting.drafts + 1
    tokens, skipped, steps = steps_to_trace(requests, 1 if engine.arm.speculation == "off" else most, most)
    inject(engine, injected(engine.setting, "full"))
    engine.measure(allowed(run, engine), requests=requests, tokens=tokens)
    found: dict[str, Any] = {}
    for watched in ("device", "host"):
        engine.rpc("bench_begin_trace", watched, skipped, steps)
        engine.measure(allowed(run, engine), requests=requests, tokens=tokens)
        found |= engine.rpc("bench_end_trace", seconds=allowed(run, engine))
    return found


def steps_to_trace(requests: int, a_step: int, most: int) -> tuple[int, int, int]:
    """Around the same token, as many steps, whatever a step makes.

    Args:
        requests: At once.
        a_step: Tokens that a step makes of each.
        most: Tokens that a step with every draft accepted makes.

    Returns:
        Tokens of each request, steps to skip, and steps to watch.
    """
    steps = min(TRACED, tokens_that_fit(requests) // most - BEFORE - AFTER)
    middle = (BEFORE + steps / 2) * most
    return (BEFORE + steps + AFTER) * most, round(middle / a_step - steps / 2), steps


def startup(run: Run, options: argparse.Namespace) -> None:
    """One start after another with no other engine on the device; the arms take turns, in another order each time."""
    setting = setting_of(options)
    names = arms_of(options, ["fixed", "patched", UPSTREAMS_GRID])
    if setting.size != "cpu" and not (run.folder / "caches").exists():
        # The first engines of a host compile its kernels, and the later ones would look the better for it.
        ends = [ARMS[name] for name in dict.fromkeys((names[0], names[-1]))]
        with started(run, "startup-compiling", ends, setting, together=True):
            pass
    for turn in range(options.rounds):
        for name in rotated(names, turn):
            if run.has("start", of="startup", arm=name, turn=turn):
                continue
            if run.left() < START_ROOM_S * patience(setting):
                say(f"startup: no time left in turn {turn}")
                return
            with started(run, "startup", [ARMS[name]], setting, together=False, turn=turn):
                pass


def grids(run: Run, options: argparse.Namespace) -> None:
    """Throughput with the coarser grid of captured sizes and with upstream's; nothing else differs."""
    setting = setting_of(options)
    arms = arms_of(options, ["patched", UPSTREAMS_GRID])
    cells = [
        cell_of(setting, arms, workload, requests, tokens_that_fit(requests))
        for requests in CONCURRENCY
        for workload in WORKLOADS
        if 1 < requests <= options.most and workload != "full"
    ]
    with_engines(run, "grids", options, arms, setting, cells)


def micro(run: Run, options: argparse.Namespace) -> None:
    """In a process of its own each, since the probes stand in for parts of vLLM."""
    for name in ("metadata", "ranking"):
        if run.has("micro", of=name, whole=True):
            say(f"micro {name}: there already")
            continue
        command = [sys.executable, "-m", f"tests.bench.micro_{name}"]
        with subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            assert process.stdout is not None
            # With its own child, which holds the pipe.
            stop = threading.Timer(max(run.left(), 1.0), os.killpg, (process.pid, signal.SIGKILL))
            stop.start()
            for line in process.stdout:
                if line.startswith("{"):
                    row = json.loads(line)
                    run.record("micro", of=name, **row)
                    say("micro", row)
            process.wait()
            stop.cancel()
        if process.returncode:
            say(f"micro {name} ended with {process.returncode}")
        else:
            run.record("micro", of=name, whole=True)


def staleness(run: Run, options: argparse.Namespace) -> None:
    """Acceptance length with confidences one record older, of the bundled pair, which is trained; on a CPU.

    Greedy answers to the same prompts: which drafts are verified differs, and nothing else does.
    """
    setting = Setting("cpu", 16, 0, 0.25, rejection="standard")
    arms = [ARMS[NEWER], ARMS[OLDER]]
    prompts = tiny_prompts(options.prompts)
    with started(run, "staleness", arms, setting, together=True) as engines:
        for begin in range(0, len(prompts), 32):
            for engine in engines.values():
                if run.left() > 30:
                    batch = prompts[begin : begin + 32]
                    found = engine.ask("accept", run.left(), prompts=batch, tokens=64)
                    run.record("staleness", arm=engine.arm.name, first_prompt=begin, prompts=len(batch), **found)
            say(f"staleness: {begin + 32} prompts, {run.left():.0f} s left")


def tiny_prompts(count: int) -> list[list[int]]:
    """The beginnings of functions of Python's standard library, in the tiny pair's tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(REPOSITORY / "serve/tiny/target/tokenizer.json"))
    prompts: list[list[int]] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 12:
                lines = source.splitlines()[node.lineno - 1 : node.lineno + 5]
                prompts.append(tokenizer.encode("\n".join(lines) + "\n").ids[:60])
                break
    return prompts[:count]


PARTS = {
    "overhead": overhead,
    "micro": micro,
    "workloads": workloads,
    "trace": trace,
    "startup": startup,
    "grids": grids,
    "staleness": staleness,
}


def machine() -> Iterator[tuple[str, str]]:
    """Card and versions."""
    yield "python", platform.python_version()
    try:
        import torch
        import triton

        yield "torch", torch.__version__
        yield "triton", triton.__version__
        if torch.cuda.is_available():
            yield "device", torch.cuda.get_device_name()
    except ImportError as error:
        yield "torch", str(error)
    from patches.install import vllm_release

    yield "vllm", vllm_release()
    # No driver, nothing to say of it.
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        yield "driver", driver.stdout.split()[0]  # a line for each GPU


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of names with commas between them."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return names

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path, default=Path("never-slower.jsonl"), help="measurements, one a line")
    parser.add_argument("--part-seconds", type=float, default=480.0, help="when each part stops")
    parser.add_argument(
        "--only", type=some_of(PARTS), default="micro,workloads,startup,grids", help="parts, in order, with commas"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", help="8b, 4b or tiny; each part has its own default")
    parser.add_argument("--most", type=int, default=256, help="largest number of concurrent requests")
    parser.add_argument("--prompts", type=int, default=128, help="prompts of staleness")
    parser.add_argument("--arms", type=some_of(ARMS), help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--one-by-one", action="store_true", help="start engines one after another")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/never-slower"), help="models, logs and caches")
    parser.add_argument(
        "--cpu-smoke", action="store_true", help="the bundled tiny pair on a CPU: does the driver work?"
    )
    parser.add_argument("--report", nargs="+", type=Path, help="write results.json and RESULTS.md from raw files")
    options = parser.parse_args()
    if options.report:
        from tests.bench.never_slower_report import write

        write(options.report)
        return
    if options.cpu_smoke:
        options.size = "cpu"
    run = Run(options.raw, options.folder)
    run.record("machine", command=" ".join(sys.argv[1:]), **dict(machine()))
    for name in options.only:
        run.begin(options.part_seconds)
        say(f"part {name}, {run.left():.0f} s")
        try:
            PARTS[name](run, options)
        except (EngineError, subprocess.TimeoutExpired) as error:
            say(f"part {name} ended: {error}")


if __name__ == "__main__":
    main()
