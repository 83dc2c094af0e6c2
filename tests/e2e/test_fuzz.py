"""Nothing that a client sends makes the server fail: no 5xx, and the same answers afterwards."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.e2e.open_requests import under_way
from tests.e2e.requests_at_random import Fuzzed, requests
from tests.e2e.running import Server

AT_ONCE = 20
PATIENCE_SECONDS = 20.0
"""A valid request may ask for many tokens: its client leaves then, which is no failure."""
MOST_THAT_LEAVE = 0.2
"""Of all. Where more do, the machine is too slow to have shown anything about what they asked for."""


@dataclass
class Seen:
    """What the server answered.

    Attributes:
        statuses: Status -> how often; 0 where the client left.
        failures: Requests that the server failed at, with status and answer.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[tuple[int, str, Fuzzed]] = field(default_factory=list)


def send(client: httpx.Client, fuzzed: Fuzzed) -> tuple[int, str]:
    """Status and beginning of the answer."""
    try:
        answer = client.request(fuzzed.method, fuzzed.path, content=fuzzed.body, headers=fuzzed.headers)
    except httpx.ReadTimeout:
        return 0, "the client left"
    return answer.status_code, answer.text[:500]


def made(count: int) -> list[Fuzzed]:
    """So many requests, the same ones each time."""
    found: list[Fuzzed] = []

    @settings(
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        max_examples=count // AT_ONCE,
    )
    @given(st.lists(requests(), min_size=AT_ONCE, max_size=AT_ONCE))
    def make(some: list[Fuzzed]) -> None:
        found.extend(some)

    make()
    return found


def fuzz(server: Server, count: int) -> Seen:
    """Send so many requests, some at once, each over a connection of its own."""
    seen = Seen()
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
    timeout = httpx.Timeout(60, read=PATIENCE_SECONDS)
    with (
        httpx.Client(base_url=server.url, headers=server.client.headers, limits=limits, timeout=timeout) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        everything = made(count)
        answers = pool.map(lambda fuzzed: send(client, fuzzed), everything)
        for fuzzed, (status, text) in zip(everything, answers, strict=True):
            seen.statuses[status] += 1
            if status >= 500:
                seen.failures.append((status, text, fuzzed))
    return seen


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.robustness)])
def test_no_request_makes_the_server_fail(server: Server, count: int) -> None:
    before = server.complete("def f(x):", max_tokens=16)["choices"][0]["text"]
    seen = fuzz(server, count)
    print(f"{seen.statuses.total()} requests: {dict(sorted(seen.statuses.items()))}")
    assert seen.failures == []
    assert seen.statuses.total() >= count
    assert {200, 400, 404} <= set(seen.statuses)
    assert seen.statuses[0] < MOST_THAT_LEAVE * count
    # Whoever left was still waited for: nothing is stuck.
    server.wait_until(lambda: under_way(server) == 0 and server.samples()["vllm:num_requests_running", ""] == 0)
    server.client.put("/dspark/mode", json={"mode": "adaptive"})
    assert server.client.get("/readyz").status_code == 200
    assert server.complete("def f(x):", max_tokens=16)["choices"][0]["text"] == before
