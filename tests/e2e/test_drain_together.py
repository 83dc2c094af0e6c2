"""The shape of vllm#54011: hundreds of requests that end together, round after round, on two tensor-parallel ranks.

There, while a batch drained, ranks chose different budgets, acceptance collapsed and a collective hung. `make drain`
runs it in full.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.prompts import python_prompts
from tests.e2e.running import MODEL, Server, serving

pytestmark = pytest.mark.robustness

TOGETHER = 200
ROUNDS = 20
TOKENS = 12
"""The same for every request, so that a whole batch ends within a few steps."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("ranks")
    # One NUMA node has the cores of one rank only, unless threads are bound to none. One thread a rank: more threads
    # than cores wait for each other by spinning, which takes the cores from those that they wait for.
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with serving(directory, vllm=("--tensor-parallel-size", "2"), **threads) as server:
        server.wait_until_ready()
        yield server


def counts(server: Server) -> tuple[float, float]:
    """Accepted drafts and what was expected of them, so far."""
    samples = server.samples()
    names = ("dspark_accepted_draft_tokens_total", "dspark_expected_accepted_draft_tokens_total")
    return samples[names[0], ""], samples[names[1], ""]


def test_many_that_end_together_never_hang_and_acceptance_holds(two_ranks: Server) -> None:
    prompts = python_prompts()
    acceptance = []
    with ThreadPoolExecutor(TOGETHER) as pool:
        for number in range(ROUNDS):
            accepted, expected = counts(two_ranks)
            bodies = [prompts[(number + i) % len(prompts)] for i in range(TOGETHER)]
            began = time.monotonic()
            answers = list(pool.map(lambda p: two_ranks.complete(p, max_tokens=TOKENS, ignore_eos=True), bodies))
            assert {answer["usage"]["completion_tokens"] for answer in answers} == {TOKENS}
            after = counts(two_ranks)
            acceptance.append((after[0] - accepted) / (after[1] - expected))
            print(f"round {number}: {time.monotonic() - began:.1f} s, accepted / expected {acceptance[-1]:.2f}")
    steps = two_ranks.samples()
    assert steps["dspark_verification_steps_total", "trimmed"] > 0
    assert min(acceptance) > 0.6
    assert max(acceptance) < 1.6
    assert two_ranks.client.get("/v1/models").json()["data"][0]["id"] == MODEL
