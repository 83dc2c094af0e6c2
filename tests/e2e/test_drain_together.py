"""The shape of vllm#54011: hundreds of requests that run together and end together, round after round, on two
tensor-parallel ranks.

There, while a batch drained, ranks chose different budgets, acceptance collapsed and a collective hung. `make drain`
runs it in full.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.prompts import python_prompts
from tests.e2e.running import MODEL, Server, serving

pytestmark = pytest.mark.robustness

TOGETHER = 200
ROUNDS = 20
TOKENS = 12
"""The same for every request, so that a whole batch ends within a few steps."""
PROMPT_CHARACTERS = 24
"""Short, so that all have joined the batch before the first one ends."""
ANSWER_SECONDS = 900
"""A round takes a tenth of it on two cores. Nothing is said before the end, so this also bounds a hang."""
ONE_BATCH = ("--max-num-seqs", str(TOGETHER), "--max-num-batched-tokens", str(8 * TOGETHER))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("ranks")
    # One NUMA node has the cores of one rank only, unless threads are bound to none. One thread a rank: more threads
    # than cores wait for each other by spinning, which takes the cores from those that they wait for.
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with serving(directory, vllm=("--tensor-parallel-size", "2", *ONE_BATCH), **threads) as server:
        server.wait_until_ready()
        yield server


def counts(server: Server) -> tuple[float, float]:
    """Accepted drafts and what was expected of them, so far."""
    samples = server.samples()
    names = ("dspark_accepted_draft_tokens_total", "dspark_expected_accepted_draft_tokens_total")
    return samples[names[0], ""], samples[names[1], ""]


def complete_together(server: Server, prompts: list[str]) -> list[dict[str, Any]]:
    """Completions of all prompts at once, each over a connection of its own."""
    limits = httpx.Limits(max_connections=len(prompts))
    with (
        httpx.Client(base_url=server.url, limits=limits, timeout=ANSWER_SECONDS) as client,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        body = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answers = pool.map(lambda prompt: client.post("/v1/completions", json=body | {"prompt": prompt}), prompts)
        return [answer.raise_for_status().json() for answer in answers]


def test_many_that_end_together_never_hang_and_acceptance_holds(two_ranks: Server) -> None:
    lines = [prompt.strip()[:PROMPT_CHARACTERS] for prompt in python_prompts()]
    acceptance, largest = [], []
    for number in range(ROUNDS):
        accepted, expected = counts(two_ranks)
        seen, began = len(two_ranks.decisions("verification")), time.monotonic()
        answers = complete_together(two_ranks, [lines[(number + i) % len(lines)] for i in range(TOGETHER)])
        took = time.monotonic() - began
        assert {answer["usage"]["completion_tokens"] for answer in answers} == {TOKENS}
        after = counts(two_ranks)
        acceptance.append((after[0] - accepted) / (after[1] - expected))
        steps = two_ranks.decisions("verification")[seen:]
        largest.append(max(len(step["requests"]) for step in steps))
        plans = {plan: sum(step["plan"] == plan for step in steps) for plan in ("full", "trimmed", "none")}
        print(f"round {number}: {took:.1f} s, up to {largest[-1]} together, steps {plans}, ", end="")
        print(f"accepted / expected {acceptance[-1]:.2f}", flush=True)
    assert two_ranks.samples()["dspark_verification_steps_total", "trimmed"] > 0
    assert min(largest) > TOGETHER / 2
    assert min(acceptance) > 0.6
    assert max(acceptance) < 1.6
    assert two_ranks.client.get("/v1/models").json()["data"][0]["id"] == MODEL
