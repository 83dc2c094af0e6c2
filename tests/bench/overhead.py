"""What the wrapper costs: the same load against plain `vllm serve` and against `dspark-serve`, alternating.

    make bench-overhead            throughput and time to first token, A B A B ..., then streamed chunks
    python -m tests.bench.overhead --sets 6 --json results.json

The engine runs without speculation and without Triton's interpreter (V1 model runner, native CPU kernels), so that it
does not hide the server. Two servers of one kind differ, with where the system puts their threads, and one server
differs from minute to minute. So a set of servers is started together, short bursts of load go to one after the
other, forwards and backwards, and then a new set is started, in another order: the first of a set is the slowest. A
second plain server in every set says what a ratio is worth. The load is vLLM's own `vllm bench serve`, called in this
process. Every burst is printed and kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from serve.profile import Verification, load
from tests.e2e.running import BIN, MODEL, free_port

ENGINE = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "TRITON_INTERPRET": "0",
    # Leave the interpreter's backend out, so that vLLM takes its native CPU kernels.
    "TRITON_BACKENDS_IN_TREE": "1",
}
MANY_STREAMS = ["--max-num-seqs=64", "--max-num-batched-tokens=2048"]
"""What lets the engine answer 64 streams at once, so that the server has chunks to carry."""
TOKENIZER = str(Path(__file__).parents[2] / "serve/tiny/target")


PLAIN, OURS, CONTROL = "vllm serve", "dspark-serve", "vllm serve, a second one"
FIGURES = {
    "tokens_per_s": "output tokens/s",
    "ttft_ms": "median time to first token, ms",
    "server_us": "processor time of the server a token, us",
    "engine_us": "processor time of the engine a token, us",
}

Figures = dict[str, list[dict[str, float]]]
"""Every burst's figures, by arm."""


@dataclass(frozen=True)
class Arm:
    """One server of a comparison."""

    name: str
    command: list[str]
    environment: dict[str, str]


def plain(port: int, api_servers: int = 1, extra: Sequence[str] = ()) -> Arm:
    """`vllm serve` with the profile's own arguments, our plugin left out."""
    profile = load(MODEL)
    command = [
        "serve",
        *profile.command_line(Verification.OFF),
        f"--port={port}",
        "--disable-uvicorn-access-log",
        *extra,
    ]
    return Arm(
        PLAIN if api_servers == 1 else f"{PLAIN}, {api_servers} API processes",
        [str(BIN / "vllm"), *command, f"--api-server-count={api_servers}"],
        {**profile.environment, **ENGINE, "VLLM_PLUGINS": ""},
    )


def ours(port: int, extra: Sequence[str] = ()) -> Arm:
    """`dspark-serve up` with the same engine."""
    command = [str(BIN / "dspark-serve"), "up", MODEL, "--verification=off", f"--port={port}", "--", *extra]
    return Arm(OURS, command, ENGINE)


def control(port: int) -> Arm:
    """`vllm serve` once more: what it differs from the first by is noise."""
    return replace(plain(port), name=CONTROL)


@contextlib.contextmanager
def running(arm: Arm, port: int) -> Iterator[tuple[str, psutil.Process]]:
    """The arm's server, until the block ends; yields its URL and its first process."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            arm.command, env={**os.environ, **arm.environment}, stdout=log, stderr=subprocess.STDOUT
        )
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(1200):
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/v1/models").status_code == 200:
                        break
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"{arm.name} ended while starting:\n{log.read()[-3000:]}")
                time.sleep(0.25)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def measure(url: str, requests: int, concurrency: int, tokens: int, seed: int) -> dict[str, float]:
    """One burst of load; output tokens and streamed chunks a second, and milliseconds to the first token."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as directory:
        arguments = parser.parse_args(
            [
                "--backend=openai",
                f"--base-url={url}",
                "--endpoint=/v1/completions",
                f"--model={MODEL}",
                f"--tokenizer={TOKENIZER}",
                "--dataset-name=random",
                "--random-input-len=24",
                f"--random-output-len={tokens}",
                f"--num-prompts={requests}",
                f"--max-concurrency={concurrency}",
                f"--seed={seed}",
                "--ignore-eos",
                "--disable-tqdm",
                "--save-result",
                "--save-detailed",
                f"--result-dir={directory}",
                "--result-filename=result.json",
            ]
        )
        with contextlib.redirect_stdout(io.StringIO()):
            asyncio.run(main_async(arguments))
        result = json.loads(Path(directory, "result.json").read_text())
    if result["failed"] or result["completed"] != requests:
        raise SystemExit(f"{result['failed']} of {requests} requests failed at {url}")
    chunks = sum(len(gaps) + 1 for gaps in result["itls"])
    return {
        "tokens_per_s": result["output_throughput"],
        "chunks_per_s": chunks / result["duration"],
        "ttft_ms": result["median_ttft_ms"],
    }


def processor_seconds(server: psutil.Process) -> tuple[float, float]:
    """Processor time so far of the server's own process, and of the processes below it: the engine's."""

    def spent(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    return spent(server), sum(spent(child) for child in server.children(recursive=True))


def compare(arms: Sequence[Callable[[int], Arm]], sets: int, bursts: int, load_of: dict[str, int]) -> Figures:
    """Start all arms' servers `sets` times, and load them in turn `bursts` times; every burst's figures by arm."""
    figures: Figures = {}
    for number in range(sets):
        with contextlib.ExitStack() as servers:
            started = []
            for make in rotated(arms, number):
                port = free_port()
                arm = make(port)
                url, server = servers.enter_context(running(arm, port))
                started.append((arm.name, url, server))
                measure(url, seed=0, **load_of)
            for burst in range(bursts):
                for name, url, server in started if burst % 2 == 0 else started[::-1]:
                    figures.setdefault(name, []).append(observe(url, server, seed=1 + burst, load_of=load_of))
                    print(f"set {number + 1}, burst {burst + 1}, {name}: {described(figures[name][-1])}", flush=True)
    return figures


def observe(url: str, server: psutil.Process, seed: int, load_of: dict[str, int]) -> dict[str, float]:
    """One burst, with the processor time that a token took in the server's process and in the engine's."""
    before = processor_seconds(server)
    figures = measure(url, seed=seed, **load_of)
    after = processor_seconds(server)
    tokens = load_of["requests"] * load_of["tokens"]
    figures["server_us"], figures["engine_us"] = (
        1e6 * (then - now) / tokens for now, then in zip(before, after, strict=True)
    )
    return figures


def described(row: dict[str, float]) -> str:
    """One burst in words."""
    return (
        f"{row['tokens_per_s']:.0f} tokens/s, {row['chunks_per_s']:.0f} chunks/s, first token {row['ttft_ms']:.1f} ms, "
        f"processor time a token {row['server_us']:.0f} us server, {row['engine_us']:.0f} us engine"
    )


def rotated(arms: Sequence[Callable[[int], Arm]], by: int) -> list[Callable[[int], Arm]]:
    """The arms, begun with another one each time: take a multiple of their number of sets."""
    first = by % len(arms)
    return [*arms[first:], *arms[:first]]


def summary(figures: Figures, key: str) -> dict[str, dict[str, float]]:
    """Median and range of one figure, by arm."""
    return {
        arm: {
            "median": median(r[key] for r in rows),
            "min": min(r[key] for r in rows),
            "max": max(r[key] for r in rows),
        }
        for arm, rows in figures.items()
    }


def paired_ratio(figures: Figures, key: str, over: str, under: str) -> dict[str, float]:
    """Median and range over bursts of one arm's figure divided by the other's in the same burst."""
    ratios = [a[key] / b[key] for a, b in zip(figures[over], figures[under], strict=True)]
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}


def table(title: str, rows: dict[str, dict[str, float]], digits: int) -> None:
    """Print medians with their range."""
    print(f"\n{title}")
    for name, row in rows.items():
        print(f"  {name:34s} {row['median']:.{digits}f}  ({row['min']:.{digits}f} to {row['max']:.{digits}f})")


def main() -> None:
    """Run both comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=6, help="How often the servers are started.")
    parser.add_argument("--bursts", type=int, default=4, help="How often each server of a set is loaded.")
    parser.add_argument("--json", type=Path, help="Where to write every burst.")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a killed benchmark still ends its servers
    results: dict[str, Any] = {"machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"}

    load_of = {"requests": 96, "concurrency": 8, "tokens": 64}
    figures = compare([plain, ours, control], options.sets, options.bursts, load_of)
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for key, title in FIGURES.items():
        table(title, summary(figures, key), 1)
        ratios[key] = {name: paired_ratio(figures, key, name, PLAIN) for name in (OURS, CONTROL)}
        table(f"{title}, divided by {PLAIN}", ratios[key], 3)
    results["overhead"] = {"bursts": figures, "ratios": ratios}
    write(options.json, results)

    arms = [
        partial(plain, extra=MANY_STREAMS),
        partial(ours, extra=MANY_STREAMS),
        partial(plain, api_servers=2, extra=MANY_STREAMS),
    ]
    many = {"requests": 256, "concurrency": 64, "tokens": 64}
    chunks = compare(arms, max(1, options.sets // 2), options.bursts, many)
    table("streamed chunks/s, 64 streams", summary(chunks, "chunks_per_s"), 0)
    results["chunks"] = chunks
    write(options.json, results)


def write(path: Path | None, results: dict[str, Any]) -> None:
    """Keep what was measured so far."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
