"""What the wrapper costs: the same load against plain `vllm serve` and against `dspark-serve`, alternating.

    make bench-overhead            throughput and time to first token, A B A B ..., then streamed chunks
    python -m tests.bench.overhead --rounds 9 --json results.json

The engine runs without speculation and without Triton's interpreter (V1 model runner, native CPU kernels), so that it
does not hide the server. Every round starts each server afresh: two servers of the same kind differ by more than the
wrapper costs, with where the system puts their threads. The load comes from vLLM's own `vllm bench serve`. Every round
is printed and kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

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


Figures = dict[str, list[dict[str, float]]]
"""Every round's figures, by arm."""


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
        f"vllm serve, {api_servers} API process{'es' if api_servers > 1 else ''}",
        [str(BIN / "vllm"), *command, f"--api-server-count={api_servers}"],
        {**profile.environment, **ENGINE, "VLLM_PLUGINS": ""},
    )


def ours(port: int, extra: Sequence[str] = ()) -> Arm:
    """`dspark-serve up` with the same engine."""
    command = [str(BIN / "dspark-serve"), "up", MODEL, "--verification=off", f"--port={port}", "--", *extra]
    return Arm("dspark-serve", command, ENGINE)


@contextlib.contextmanager
def running(arm: Arm, port: int) -> Iterator[str]:
    """The arm's server, until the block ends; yields its URL."""
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
            yield url
        finally:
            process.terminate()
            process.wait(60)


def measure(url: str, requests: int, concurrency: int, tokens: int, seed: int) -> dict[str, float]:
    """One round of load; output tokens and streamed chunks a second, and milliseconds to the first token."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [
                str(BIN / "vllm"),
                "bench",
                "serve",
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
                "--save-result",
                "--save-detailed",
                f"--result-dir={directory}",
                "--result-filename=result.json",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        result = json.loads(Path(directory, "result.json").read_text())
    if result["failed"] or result["completed"] != requests:
        raise SystemExit(f"{result['failed']} of {requests} requests failed at {url}")
    chunks = sum(len(gaps) + 1 for gaps in result["itls"])
    return {
        "tokens_per_s": result["output_throughput"],
        "chunks_per_s": chunks / result["duration"],
        "ttft_ms": result["median_ttft_ms"],
    }


def compare(arms: Sequence[Callable[[int], Arm]], rounds: int, load_of: dict[str, int]) -> Figures:
    """Alternate the arms for `rounds` rounds, each on a fresh server after a warm-up; every round's figures by arm."""
    figures: Figures = {}
    for number in range(rounds):
        for make in arms if number % 2 == 0 else arms[::-1]:
            port = free_port()
            arm = make(port)
            with running(arm, port) as url:
                measure(url, seed=0, **{**load_of, "requests": load_of["requests"] // 4})
                last = measure(url, seed=number + 1, **load_of)
            figures.setdefault(arm.name, []).append(last)
            print(
                f"round {number + 1} {arm.name}: {last['tokens_per_s']:.0f} tokens/s, "
                f"{last['chunks_per_s']:.0f} chunks/s, first token {last['ttft_ms']:.1f} ms",
                flush=True,
            )
    return figures


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
    """Median and range over rounds of one arm's figure divided by the other's in the same round."""
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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="Where to write every raw round.")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"}

    figures = compare([plain, ours], options.rounds, {"requests": 320, "concurrency": 8, "tokens": 64})
    ours_name, plain_name = ours(0).name, plain(0).name
    table("output tokens/s", summary(figures, "tokens_per_s"), 0)
    table("time to first token, ms", summary(figures, "ttft_ms"), 1)
    ratios = {
        "throughput": paired_ratio(figures, "tokens_per_s", ours_name, plain_name),
        "time to first token": paired_ratio(figures, "ttft_ms", ours_name, plain_name),
    }
    table("dspark-serve / vllm serve", ratios, 3)
    results["overhead"] = {"rounds": figures, "ratios": ratios}
    write(options.json, results)

    arms = [
        partial(plain, extra=MANY_STREAMS),
        partial(ours, extra=MANY_STREAMS),
        partial(plain, api_servers=2, extra=MANY_STREAMS),
    ]
    chunks = compare(arms, max(1, options.rounds // 2), {"requests": 512, "concurrency": 64, "tokens": 64})
    table("streamed chunks/s, 64 streams", summary(chunks, "chunks_per_s"), 0)
    results["chunks"] = chunks
    write(options.json, results)


def write(path: Path | None, results: dict[str, Any]) -> None:
    """Keep what was measured so far."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
