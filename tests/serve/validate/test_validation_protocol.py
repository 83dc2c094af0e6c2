"""Options to protocol: the seeds' own where nothing is said, and one clear error for what cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve.errors import InputError
from serve.profile import load
from serve.validate.plan import requests_of
from serve.validate.protocol import Options, profile_protocol, url_protocol
from serve.validate.results import Arm, Protocol


def asked(profile: str = "deepseek-v4.1-flash-mi355x4-ep", options: Options | None = None, **fields: Any) -> Protocol:
    usual: dict[str, Any] = {"tasks": None, "gsm8k": None, "questions": None, "exactness": True}
    return profile_protocol(load(profile), profile, (), (), options or Options(), **{**usual, **fields})


def test_without_options_the_seeds_own_protocol_is_repeated() -> None:
    protocol = asked()
    assert protocol.arms == (Arm.OFF, Arm.FIXED, Arm.ADAPTIVE)
    assert protocol.concurrencies == (4, 16, 32, 64, 128, 256)
    assert {requests_of(protocol, concurrency) for concurrency in protocol.concurrencies} == {880}
    assert (protocol.output_tokens, protocol.temperature, protocol.warmup_requests) == (512, 1.0, 64)
    assert (protocol.rounds, protocol.seed) == (3, 42)
    assert protocol.tasks == ("gsm8k", "niah-16384", "niah-65536")
    assert protocol.questions is None


def test_a_profile_is_not_loaded_beyond_what_it_is_for() -> None:
    assert max(asked("qwen3-8b-dspark-h200").concurrencies) <= (load("qwen3-8b-dspark-h200").concurrency or 0)


def test_the_cpu_has_a_protocol_of_minutes() -> None:
    protocol = asked("tiny-cpu")
    tokens = [requests_of(protocol, c) * protocol.output_tokens for c in protocol.concurrencies]
    assert protocol.rounds * 3 * sum(tokens) < 20_000
    assert protocol.tasks == ()
    assert asked("tiny-cpu", gsm8k=Path("g.jsonl")).tasks == ("gsm8k",)
    assert asked("tiny-cpu", gsm8k=Path("g.jsonl")).questions == 8


def test_paths_do_not_depend_on_where_a_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert asked(options=Options(prompts="mine.jsonl")).prompts == f"{tmp_path}/mine.jsonl"
    assert asked(options=Options(prompts="speed-bench:data")).prompts == f"speed-bench:{tmp_path}/data"
    assert asked(gsm8k=Path("g.jsonl")).gsm8k == f"{tmp_path}/g.jsonl"


def test_lists_are_put_in_order() -> None:
    options = Options(arms="adaptive, off", concurrencies="16,1,4")
    assert asked(options=options).arms == (Arm.OFF, Arm.ADAPTIVE)
    assert asked(options=options).concurrencies == (1, 4, 16)
    assert asked(tasks="").tasks == ()


def test_the_sweep_of_a_running_server_has_nothing_else() -> None:
    protocol = url_protocol("http://127.0.0.1:1", (Arm.FIXED,), Options(rounds=1))
    assert (protocol.profile, protocol.tasks, protocol.exactness, protocol.rounds) == (None, (), False, 1)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("arms", "sometimes", "--arms sometimes: use off, fixed and adaptive"),
        ("arms", "off,off", "off is there twice"),
        ("arms", ",", "--arms is empty"),
        ("concurrencies", "0", "--concurrencies 0: use whole numbers"),
        ("concurrencies", "4,x", "--concurrencies x"),
        ("concurrencies", "4,4", "4 is there twice"),
        ("concurrencies", "99999999", "from 1 to 65536"),
        ("concurrencies", "", "--concurrencies is empty"),
    ],
)
def test_a_list_with_something_else_is_refused(field: str, value: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        asked(options=replace(Options(), **{field: value}))


@pytest.mark.parametrize("tasks", ["mmlu", "niah", "niah-", "niah-511", "niah-4k", "gsm8k,gsm8k"])
def test_a_task_that_there_is_not_is_refused(tasks: str) -> None:
    with pytest.raises(InputError, match="--tasks"):
        asked(tasks=tasks)


def test_questions_for_a_task_that_is_left_out_are_refused() -> None:
    with pytest.raises(InputError, match="--gsm8k is given, and --tasks leaves gsm8k out"):
        asked(gsm8k=Path("g.jsonl"), tasks="niah-4096")
