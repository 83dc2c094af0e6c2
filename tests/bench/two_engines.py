"""Is what a scrape says of two data-parallel engines what their traces say, engine by engine and in sum?

usage: python -m tests.bench.two_engines PROFILE MODEL [--requests 64] [--out FILE] [-- arguments of vllm serve]

Serves the profile with two data-parallel engines, has them answer requests of uneven length, and compares. Exits with 1
where a count differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from patches.telemetry.trace import trace_file
from tests.e2e.running import Server, serving

ENGINES = 2
TOKENS = ("proposed", "verified", "accepted")
SETTLED_S, SETTLING_TRIES = 1.0, 30


def ask_for_uneven_work(server: Server, model: str, *, requests: int) -> None:
    """Requests that begin together, each longer than the one before; all end with the tokens asked for."""

    def one(number: int) -> int:
        body: dict[str, Any] = {"model": model, "max_tokens": 4 + number, "ignore_eos": True, "temperature": 1.0}
        prompt = [(7 * number + 13 * place) % 900 + 8 for place in range(24)]
        return int(server.complete(prompt, **body)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(requests) as pool:
        assert list(pool.map(one, range(requests))) == [4 + number for number in range(requests)]


def traced(path: Path) -> dict[str, int]:
    """What an engine's trace adds up to: drafts of each kind, and steps by plan."""
    counts: Counter[str] = Counter()
    for line in path.read_text().splitlines() if path.exists() else ():
        step = json.loads(line)
        if step["kind"] == "verification":
            counts[f"steps {step['plan']}"] += 1
            counts["proposed"] += step["proposed"]
            counts["verified"] += step["verified"]
            counts["accepted"] += sum(step["accepted"])
    return {name: count for name, count in counts.items() if count}


def scraped(text: str) -> dict[int, dict[str, int]]:
    """The same of a scrape, engine -> counts."""
    engines: dict[int, Counter[str]] = {}
    names = {f"dspark_{kind}_draft_tokens_total": kind for kind in TOKENS}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                name = names[sample.name]
            elif sample.name == "dspark_verification_steps_total":
                name = f"steps {sample.labels['plan']}"
            else:
                continue
            engines.setdefault(int(sample.labels["engine"]), Counter())[name] += int(sample.value)
    return {engine: {name: n for name, n in counts.items() if n} for engine, counts in engines.items()}


def at_rest(server: Server) -> dict[int, dict[str, int]]:
    """A scrape that the next one repeats: the last steps are counted a moment after their answers."""
    found = scraped(server.client.get("/metrics").text)
    for _ in range(SETTLING_TRIES):
        time.sleep(SETTLED_S)
        before, found = found, scraped(server.client.get("/metrics").text)
        if found == before:
            break
    return found


def compared(server: Server) -> dict[str, Any]:
    """Compare once the server is at rest: `engines` -> what each counted, `sum`, and what is `wrong`."""
    by_scrape = at_rest(server)
    by_trace = {engine: traced(Path(trace_file(str(server.trace), engine))) for engine in range(ENGINES)}
    wrong = [
        f"engine {engine}: scrape {by_scrape.get(engine)}, trace {by_trace[engine]}"
        for engine in by_trace
        if by_scrape.get(engine, {}) != by_trace[engine]
    ]
    total: Counter[str] = Counter()
    for counts in by_scrape.values():
        total.update(counts)
    return {
        "engines": {
            engine: {
                **{kind: counts.get(kind, 0) for kind in TOKENS},
                "steps": sum(n for name, n in counts.items() if name.startswith("steps ")),
            }
            for engine, counts in by_scrape.items()
        },
        "sum": dict(total),
        "wrong": wrong,
    }


def main() -> None:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", help="a bundled profile's name, or the path of a YAML file")
    parser.add_argument("model", help="the name it serves its model by")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--out", type=Path, help="where the comparison goes")
    options = parser.parse_args(arguments[:split])
    vllm = ("--data-parallel-size", str(ENGINES), *arguments[split + 1 :])
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(Path(directory), profile=options.profile, vllm=vllm) as server,
    ):
        server.wait_until_ready()
        ask_for_uneven_work(server, options.model, requests=options.requests)
        found = compared(server)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    sys.exit(bool(found["wrong"]) or any(engine["steps"] == 0 for engine in found["engines"].values()))


if __name__ == "__main__":
    main()
