"""Prompt sets and files of questions: looked through before anything is measured, a bad line named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.errors import InputError
from serve.validate.accuracy import check_questions
from serve.validate.prompts import BUILT_IN, prompt_set, read_prompts, written


def test_the_built_in_set_has_64_different_prompts() -> None:
    assert len(BUILT_IN) == len(set(BUILT_IN)) == 64
    for prompt in BUILT_IN:
        compile(prompt, "prompt", "exec")


@pytest.mark.parametrize("count", [1, 64, 200])
def test_no_prompt_of_a_cell_is_like_another(count: int) -> None:
    lines = [json.loads(line)["prompt"] for line in written(BUILT_IN, count).splitlines()]
    assert len(lines) == len(set(lines)) == count
    assert lines[:64] == list(BUILT_IN[:count])


def test_a_users_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "ü\\n", "more": 1}\n')
    assert read_prompts(path) == ("a", "ü\n")
    assert prompt_set(str(path)).prompts == ("a", "ü\n")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}\n', "line 2 of .*mine.jsonl has no text"),
        ('{"prompt": "a"}\n{"prompt": " "}\n', "line 2"),
        ('{"question": "a"}\n', "line 1"),
        ('{"prompt": "a"}\n\n["b"]\n', "line 3 of .* is no JSON object"),
        ("{prompt}\n", "line 1 of .* is not JSON"),
        ("\n", "has no prompt"),
        ("", "has no prompt"),
    ],
)
def test_a_bad_line_of_a_users_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=named):
        prompt_set(str(path))


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not text in UTF-8"):
        prompt_set(str(tmp_path / "a.jsonl"))
    with pytest.raises(InputError, match="not a regular file"):
        prompt_set(str(tmp_path))
    with pytest.raises(InputError, match="cannot be read: No such file"):
        prompt_set(str(tmp_path / "b.jsonl"))


@pytest.mark.parametrize(
    "name", ["speed-bench", "speed-bench:", "speed-bench:/nowhere", "sharegpt", "sharegpt:/nowhere"]
)
def test_a_data_set_that_is_not_there_says_how_to_name_it(name: str) -> None:
    with pytest.raises(InputError, match=r"write (speed-bench:FOLDER|sharegpt:FILE), with"):
        prompt_set(name)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"question": "a", "answer": "#### 1"}\n' * 5, "has 5 questions: the first 5 are the examples"),
        ('{"question": "a"}\n', 'line 1 of .* has no text as "question" and "answer"'),
        ('{"question": "a", "answer": ""}\n', "line 1"),
    ],
)
def test_bad_questions_are_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=named):
        check_questions(path)
