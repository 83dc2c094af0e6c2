"""Load: every request is counted, whatever became of it, and the tool is asked as the seeds asked it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from failing_server import failing_server
from hypothesis import given
from hypothesis import strategies as st
from validation_samples import protocol

from serve.profile import resolve_model
from serve.validate.children import tool_environment
from serve.validate.endpoint import Endpoint
from serve.validate.load import LoadError, Target, counted, measure, warm_up
from serve.validate.plan import Cell, requests_of
from serve.validate.prompts import BUILT_IN, PromptSet, prompt_set
from serve.validate.results import Arm, Load

TOKENIZER = ("--tokenizer", resolve_model("bundled:tiny/target"))
CELL = Cell(1, Arm.OFF, 4)


def result(*requests: tuple[int, str]) -> dict[str, Any]:
    """A detailed result of (output tokens, error) each."""
    return {
        "duration": 2.0,
        "output_lens": [tokens for tokens, _ in requests],
        "errors": [error for _, error in requests],
        "input_lens": [10 for _ in requests],
        "ttfts": [0.1 for _ in requests],
        "itls": [[0.01] * max(tokens - 1, 0) for tokens, _ in requests],
    }


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["", "Service Unavailable", "Traceback\n  x\nOSError: b"])))
)
def test_every_request_is_completed_or_failed_with_a_message(requests: list[tuple[int, str]]) -> None:
    found = counted(result(*requests), 8)
    record = Load(round=1, arm=Arm.OFF, concurrency=1, drafts=None, raw="", command=(), **found)
    assert record.requested == len(requests) == record.completed + record.failed
    assert sum(record.errors.values()) == record.failed
    assert record.output_tokens == 8 * record.completed
    assert record.output_tokens_per_s == record.output_tokens / 2
    assert (record.ttft_ms is None) == (record.completed == 0)
    assert all(message and "\n" not in message for message in record.errors)


def test_times_are_of_whole_answers_only() -> None:
    data = result((8, ""), (8, ""), (3, ""))
    data["ttfts"] = [0.1, 0.3, 9.0]
    data["itls"] = [[0.07, 0.0], [0.21, 0.0], [5.0]]
    found = counted(data, 8)
    assert found["ttft_ms"] == pytest.approx((200.0, 298.0))
    assert found["tpot_ms"] == pytest.approx((20.0, 29.8))
    assert found["errors"] == {"the answer ended after fewer than 8 tokens": 1}


def test_a_cell_has_enough_requests_for_its_concurrency() -> None:
    assert requests_of(protocol(requests=880, requests_per_stream=1), 256) == 880
    assert requests_of(protocol(requests=8, requests_per_stream=2), 16) == 32


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for folder in ("raw", "logs"):
        (tmp_path / folder).mkdir()
    return tmp_path


def test_a_server_that_fails_in_every_way_loses_no_request(directory: Path) -> None:
    asked = protocol(requests=24, output_tokens=8)
    prompts = PromptSet("custom", prompts=BUILT_IN)
    with failing_server() as url:
        endpoint = Endpoint(url)
        target = Target(endpoint, endpoint.chats(), TOKENIZER, tool_environment(os.environ, "a-secret"))
        record = measure(target, asked, prompts, CELL, directory)
    assert not target.chats
    assert (record.requested, record.completed, record.failed) == (24, 8, 16)
    assert record.output_tokens == 64
    assert record.errors["Service Unavailable"] == 4
    assert record.errors["the answer ended after fewer than 8 tokens"] == 8
    (cut,) = set(record.errors) - {"Service Unavailable", "the answer ended after fewer than 8 tokens"}
    assert "Response payload is not completed" in cut
    assert record.drafts is None
    assert record.ttft_ms is not None
    assert len(json.loads((directory / record.raw).read_text())["errors"]) == 24
    assert "--extra-body" in record.command
    assert '{"cache_salt": "dspark-round-1-off-c4"}' in record.command
    for path in directory.rglob("*"):
        assert path.is_dir() or "a-secret" not in path.read_text()


@pytest.mark.slow
def test_a_tool_that_fails_is_an_error_that_names_its_log(directory: Path) -> None:
    with failing_server() as url:
        target = Target(Endpoint(url), False, ("--tokenizer", "/nowhere"), tool_environment(os.environ, None))
        with pytest.raises(
            LoadError, match=r"vllm bench serve ended with 1: \w+Error: .*/nowhere.*logs/warm-up-x\.log"
        ):
            warm_up(target, protocol(warmup_requests=2), prompt_set("built-in"), "x", directory)
