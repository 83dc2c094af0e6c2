"""Every way of sampling that the API has: served, right, and beside each other in one batch.

On the CPU each is a Triton kernel under an interpreter, which may lack what one of them needs; that ends the engine.
"""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.running import MODEL, Server

PROMPT = "def add(a, b):\n"
TOKENS = 12
LIKELIEST_ONLY: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "top_k and top_p": {"top_k": 5, "top_p": 1e-6},
}
OTHERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "seed": {"temperature": 1.0, "top_p": 0.95, "seed": 7},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": TOKENS, "ignore_eos": False},
    "several": {"temperature": 1.0, "n": 2, "top_k": 10},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
}


@pytest.fixture(scope="module")
def greedy(server: Server) -> dict[str, Any]:
    return choice(server)


def choice(server: Server, **fields: Any) -> dict[str, Any]:
    answer = server.complete(PROMPT, **{"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, **fields})
    found: dict[str, Any] = answer["choices"][0]
    assert len(found["token_ids"]) == TOKENS or not fields.get("ignore_eos", True)
    return found


def test_all_at_once(server: Server, greedy: dict[str, Any]) -> None:
    """And those that leave one token to choose from choose what greedy sampling does."""
    asked = [{"temperature": 1.0, **fields} for fields in LIKELIEST_ONLY.values()] + list(OTHERS.values())
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda fields: choice(server, **fields), asked))
    assert [answer["text"] for answer in answers[: len(LIKELIEST_ONLY)]] == [greedy["text"]] * len(LIKELIEST_ONLY)


def test_a_seed_repeats(server: Server) -> None:
    assert len({choice(server, **OTHERS["seed"])["text"] for _ in range(2)}) == 1


def test_what_is_forced_or_forbidden(server: Server, greedy: dict[str, Any]) -> None:
    first, last = greedy["token_ids"][0], greedy["token_ids"][-1]
    assert set(choice(server, temperature=1.0, allowed_token_ids=[first, last])["token_ids"]) <= {first, last}
    word = re.findall(r"\w+", greedy["text"])[0]
    assert word not in re.findall(r"\w+", choice(server, bad_words=[word, f" {word}"])["text"])
    # The end is ignored, so that it goes on freely once the pattern is matched.
    assert re.match(r"[0-9]{4}", choice(server, temperature=1.0, structured_outputs={"regex": "[0-9]{4}"})["text"])


@pytest.mark.parametrize("fields", [{"min_p": 0.1, "temperature": 1.0}, {"logit_bias": {"5": 1.0}}])
def test_what_vllm_does_not_speculate_with_is_refused(server: Server, fields: dict[str, Any]) -> None:
    answer = server.client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, **fields})
    assert answer.status_code == 400
    assert "not yet supported with speculative decoding" in answer.json()["error"]["message"]


def test_probabilities_of_prompt_and_answer(server: Server, greedy: dict[str, Any]) -> None:
    answer = choice(server, logprobs=2, prompt_logprobs=2)
    assert answer["text"] == greedy["text"]
    for token, top in zip(answer["logprobs"]["token_logprobs"], answer["logprobs"]["top_logprobs"], strict=True):
        assert token == pytest.approx(max(top.values()), abs=1e-3)
        assert sum(map(math.exp, top.values())) <= 1.001
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
