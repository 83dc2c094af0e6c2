"""Nothing that a client sends makes the server fail: no 5xx, and the same answers afterwards."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.requests_at_random import Fuzzed, requests
from tests.e2e.running import Server

AT_ONCE = 20
PATIENCE_SECONDS = 5.0
"""A valid request may ask for many tokens: its client leaves then, which is no failure."""
SETTINGS = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


def failures(server: Server, batch: list[Fuzzed], statuses: Counter[int]) -> list[tuple[Fuzzed, int, str]]:
    """Those of the requests that the server failed at."""

    def send(fuzzed: Fuzzed) -> tuple[Fuzzed, int, str]:
        patience = httpx.Timeout(60, read=PATIENCE_SECONDS)
        with httpx.Client(base_url=server.url, timeout=patience) as client:
            headers = fuzzed.headers | {"authorization": server.client.headers.get("authorization", "")}
            try:
                answer = client.request(fuzzed.method, fuzzed.path, content=fuzzed.body, headers=headers)
            except httpx.ReadTimeout:
                return fuzzed, 0, "the client left"
        return fuzzed, answer.status_code, answer.text[:500]

    with ThreadPoolExecutor(len(batch)) as pool:
        seen = list(pool.map(send, batch))
    statuses.update(status for _, status, _ in seen)
    return [one for one in seen if one[1] >= 500]


def fuzz(server: Server, count: int) -> Counter[int]:
    """Send so many requests; returns how often each status was answered (0: the client left)."""
    statuses: Counter[int] = Counter()

    @settings(SETTINGS, max_examples=count // AT_ONCE)
    @given(st.lists(requests(), min_size=AT_ONCE, max_size=AT_ONCE))
    def every_answer_is_one(batch: list[Fuzzed]) -> None:
        assert failures(server, batch, statuses) == []

    every_answer_is_one()
    return statuses


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.robustness)])
def test_no_request_makes_the_server_fail(server: Server, count: int) -> None:
    before = server.complete("def f(x):", max_tokens=16)["choices"][0]["text"]
    statuses = fuzz(server, count)
    print(f"{sum(statuses.values())} requests: {dict(sorted(statuses.items()))}")
    assert sum(statuses.values()) >= count
    assert {200, 400, 404} <= set(statuses)
    server.client.put("/dspark/mode", json={"mode": "adaptive"})
    assert server.client.get("/readyz").status_code == 200
    assert server.complete("def f(x):", max_tokens=16)["choices"][0]["text"] == before
