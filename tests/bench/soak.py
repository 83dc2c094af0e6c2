"""`python -m tests.bench.soak`: does a server that works hard for long keep its memory and descriptors?

32 clients send mixed requests to a real server, leave one in five while it is answered, and the mode is switched every
ten seconds. Every five seconds the memory and the open descriptors of every process are noted (`--raw` keeps them). At
the end a line is laid through the memory after the warm-up: on two cores it takes the server and the engine core 40
minutes to have seen all sizes of what they keep. Samples that follow each other are alike, so the slope's
uncertainty comes from the slopes of the windows that the run is cut into, not from the scatter around one line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from tests.e2e.prompts import python_prompts
from tests.e2e.running import MODEL, Server, serving

SAMPLE_SECONDS = 5.0
SWITCH_SECONDS = 10.0
LEAVING = 0.2
WINDOWS = 6
"""Slopes are taken of so many windows of the time after the warm-up."""
SLOPE_LIMIT = 1.0
"""MiB an hour."""
DESCRIPTORS_MORE = 8
"""Beyond what was open in the first third: connections come and go."""


@dataclass(frozen=True)
class Sample:
    """One look at the server's processes.

    Attributes:
        seconds: Since the start of the load.
        mib: Resident memory of all of them that no file stands behind. What a file stands behind comes when it is read
            and goes when the machine needs the room, whatever the server does.
        descriptors: Open descriptors of all of them.
        by_process: Process -> its part of `mib`, to tell what grows.
    """

    seconds: float
    mib: float
    descriptors: int
    by_process: dict[str, float] = field(default_factory=dict)


def look(server: Server, began: float) -> Sample:
    """Measure every process of a server."""
    processes = server.descendants()
    by_process = {_name(process): mib_without_files(process) for process in processes}
    return Sample(
        seconds=time.monotonic() - began,
        mib=sum(by_process.values()),
        descriptors=sum(process.num_fds() for process in processes),
        by_process=by_process,
    )


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    return f"{words[0].rsplit('/', 1)[-1] if words else process.name()} {process.pid}"


def mib_without_files(process: psutil.Process) -> float:
    """A process's resident memory that no file stands behind."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(int(status.partition(f"{kind}:")[2].split()[0]) for kind in ("RssAnon", "RssShmem")) / 1024


def slope(samples: Sequence[Sample]) -> float:
    """MiB an hour of the line through the samples."""
    hours = np.array([sample.seconds for sample in samples]) / 3600
    return float(np.polyfit(hours, [sample.mib for sample in samples], 1)[0])


def slope_and_error(samples: Sequence[Sample]) -> tuple[float, float]:
    """The slope over all samples, and its standard error: that of the mean slope of `WINDOWS` windows.

    Memory grows in steps that stay, as a random walk does, so a longer run helps by its length only, not by its many
    samples.
    """
    windows = [slope([samples[i] for i in part]) for part in np.array_split(np.arange(len(samples)), WINDOWS)]
    return slope(samples), float(np.std(windows, ddof=1)) / WINDOWS**0.5


def by_process(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Memory of every process that was there all the time: MiB at first, and MiB an hour."""
    rows = {}
    for name in sorted(set.intersection(*(set(sample.by_process) for sample in samples))):
        growth = slope([replace(sample, mib=sample.by_process[name]) for sample in samples])
        rows[name] = (round(samples[0].by_process[name], 1), round(growth, 2))
    return rows


def random_request(rng: random.Random, prompts: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """A path and a body with some sampling of its own."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": rng.choice([1, 8, 16, 32, 64]), "stream": rng.random() < 0.5}
    body |= rng.choice(
        [
            {"temperature": 0},
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 20, "seed": rng.randrange(1000)},
            {"temperature": 1.2, "repetition_penalty": 1.1},
            {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5},
            {"temperature": 1.0, "n": 2},
        ]
    )
    if rng.random() < 0.3:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": rng.choice(prompts)}]}
    return "/v1/completions", body | {"prompt": rng.choice(prompts)}


async def one_client(number: int, url: str, headers: dict[str, str], until: float, seen: Counter[str]) -> None:
    """Send one request after the other."""
    rng, prompts = random.Random(number), python_prompts()
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300) as client:
        while time.monotonic() < until:
            path, body = random_request(rng, prompts)
            patience = rng.uniform(0.05, 3.0) if rng.random() < LEAVING else 300.0
            try:
                async with asyncio.timeout(patience):
                    answer = await client.post(path, json=body)
            except TimeoutError:
                seen["left"] += 1
            except httpx.TransportError as error:
                seen[f"cut: {type(error).__name__}"] += 1
            else:
                failed = answer.status_code != 200 or '"error": {' in answer.text
                seen[f"error {answer.status_code}" if failed else "answered"] += 1


async def switch_modes(url: str, headers: dict[str, str], until: float, seen: Counter[str]) -> None:
    """Fixed, adaptive, fixed, and so on."""
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        mode = "fixed"
        while time.monotonic() < until:
            answer = await client.put("/dspark/mode", json={"mode": mode})
            seen[f"switched: {answer.status_code}"] += 1
            mode = "adaptive" if mode == "fixed" else "fixed"
            await asyncio.sleep(SWITCH_SECONDS)
        await client.put("/dspark/mode", json={"mode": "adaptive"})


async def soak(server: Server, seconds: float, clients: int) -> tuple[list[Sample], Counter[str]]:
    """Load a server for so long; returns what was measured and what clients saw."""
    began = time.monotonic()
    until, seen, samples = began + seconds, Counter[str](), []
    headers = dict(server.client.headers)
    work = [one_client(number, server.url, headers, until, seen) for number in range(clients)]
    tasks = [asyncio.create_task(part) for part in (*work, switch_modes(server.url, headers, until, seen))]
    while time.monotonic() < until:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            samples.append(await asyncio.to_thread(look, server, began))
        await asyncio.sleep(SAMPLE_SECONDS)
    await asyncio.gather(*tasks)
    return samples, seen


def verdict(samples: Sequence[Sample], seen: Counter[str], warm_up: float) -> dict[str, Any]:
    """What the run says, and whether it says that nothing grows."""
    warm = [sample for sample in samples if sample.seconds >= warm_up]
    growth, error = slope_and_error(warm)
    third = len(warm) // 3
    first, last = (max(sample.descriptors for sample in part) for part in (warm[:third], warm[-third:]))
    faults = {what: count for what, count in seen.items() if what.startswith(("cut", "error"))}
    return {
        "minutes": round(samples[-1].seconds / 60, 1),
        "seen": dict(seen),
        "mib_at_warm_up_and_end": [round(warm[0].mib, 1), round(warm[-1].mib, 1)],
        "mib_an_hour": round(growth, 2),
        "standard_error": round(error, 2),
        "mib_and_mib_an_hour_by_process": by_process(warm),
        "descriptors_first_and_last_third": [first, last],
        "flat": growth - 2 * error < SLOPE_LIMIT and last <= first + DESCRIPTORS_MORE,
        "conclusive": 2 * error < SLOPE_LIMIT,
        "faults": faults,
    }


def main() -> int:
    """Run a server and the load; 1 where something grew or a client was failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--warm-up-minutes", type=float, default=50.0)
    parser.add_argument("--raw", type=Path, help="write every sample here, one JSON object a line")
    arguments = parser.parse_args()
    if arguments.minutes <= arguments.warm_up_minutes:
        parser.error(f"--minutes {arguments.minutes:g} is all warm-up: more, or fewer --warm-up-minutes")
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory)) as server:
        server.wait_until_ready()
        samples, seen = asyncio.run(soak(server, arguments.minutes * 60, arguments.clients))
        exit_code = server.terminate(90)
    if arguments.raw is not None:
        arguments.raw.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples))
    result = verdict(samples, seen, arguments.warm_up_minutes * 60) | {"exit_code": exit_code}
    print(json.dumps(result, indent=2))
    return int(not result["flat"] or bool(result["faults"]) or exit_code != 0)


if __name__ == "__main__":
    sys.exit(main())
