"""What cannot be measured here is left out with its reason and what to do about it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from validation_samples import protocol

from serve.commands.validate import check_context, what_is_skipped
from serve.errors import InputError
from serve.preflight import installed_names
from serve.profile import load
from serve.validate.plan import plan
from serve.validate.results import Arm


def test_a_data_set_that_cannot_be_had_says_what_to_give_instead(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    (skipped,) = what_is_skipped(protocol(tasks=("gsm8k",)), None, environment)
    assert skipped.what == "gsm8k"
    assert skipped.reason.startswith("the data set openai/gsm8k cannot be had: ")
    assert skipped.reason.endswith("give a file of its questions with --gsm8k, or a mirror in HF_ENDPOINT")
    assert "\n" not in skipped.reason
    assert what_is_skipped(protocol(tasks=("gsm8k",), gsm8k="/g.jsonl"), None, environment) == []


def test_a_task_longer_than_the_model_is_left_out() -> None:
    asked = protocol(tasks=("niah-1024", "niah-16384"))
    (skipped,) = what_is_skipped(asked, 2048, {})
    assert skipped.what == "niah-16384"
    assert "the model takes 2048 tokens and the task 16640" in skipped.reason
    assert what_is_skipped(asked, None, {}) == []


def test_exactness_needs_off_and_another_arm() -> None:
    for arms in ((Arm.FIXED, Arm.ADAPTIVE), (Arm.OFF,)):
        (skipped,) = what_is_skipped(protocol(arms=arms, tasks=()), None, {})
        assert skipped.what == "exactness"
        assert what_is_skipped(protocol(arms=arms, tasks=(), exactness=False), None, {}) == []


def test_a_context_that_undoes_a_long_tasks_own_is_refused_at_once() -> None:
    recipe, names = load("tiny-cpu"), installed_names()
    servings = plan(protocol(tasks=("niah-1024", "niah-2048")), context=1024)
    for words in (("--max-model-len", "1024"), ("--max_model_len=1k",)):
        with pytest.raises(InputError, match=r"^-- --max-model-len 10\d\d: .*niah-2048 .* --set max_model_len=2304"):
            check_context(servings, recipe, words, names)
    for enough in ((), ("--max-model-len", "2304"), ("--seed", "3")):
        check_context(servings, recipe, enough, names)
