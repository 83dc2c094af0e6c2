"""Accuracy tasks through `lm_eval`, as vllm#58151 ran GSM8K: 5-shot, greedy, over `/v1/completions`.

`gsm8k` asks the published data set, or a file of the user's whose first five questions are the examples. `niah-LENGTH`
is RULER's needle in a haystack at that many tokens: the three of its tasks that need no data set (`niah_single_1`,
`niah_multikey_2` and `niah_multikey_3`; the others hide their needles in essays that lm_eval downloads).
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from serve.errors import InputError
from serve.validate.children import child, complaint, exit_code, program
from serve.validate.drafts import acceptance_length
from serve.validate.endpoint import growth
from serve.validate.load import Target
from serve.validate.plan import NEEDLE_TASK, Task
from serve.validate.prompts import json_lines
from serve.validate.results import Accuracy, Protocol, Score

GSM8K = "gsm8k"
SHOTS = 5
CONCURRENCY = 16
NEEDLE_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3")
SHORTEST_NEEDLE = 512
PROBE_SECONDS = 300

_FILE_TASK = "gsm8k-file"


class AccuracyError(Exception):
    """A task did not end with a score; the message is one line."""


def known_task(task: str) -> bool:
    """Whether a task has a name that this module knows."""
    found = NEEDLE_TASK.fullmatch(task)
    return task == GSM8K or (found is not None and int(found[1]) >= SHORTEST_NEEDLE)


def check_questions(path: Path) -> None:
    """Look through a file of questions, as GSM8K's own JSONL files are.

    Raises:
        InputError: it cannot be read, a line has no question or answer (the first is named), or none is left to ask.
    """
    lines = json_lines(path, "--gsm8k")
    for number, line in lines:
        if not all(isinstance(line.get(key), str) and line[key] for key in ("question", "answer")):
            raise InputError(f'line {number} of {path} has no text as "question" and "answer", as GSM8K has them')
    if len(lines) <= SHOTS:
        raise InputError(f"{path} has {len(lines)} questions: the first {SHOTS} are the examples, so give more")


def missing_data(environment: Mapping[str, str]) -> str | None:
    """Why the published GSM8K cannot be had here, downloading it where it can; None where it is there."""
    program_text = "from datasets import load_dataset; load_dataset('openai/gsm8k', 'main')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program_text],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            env=dict(environment),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the data set openai/gsm8k did not arrive within {PROBE_SECONDS} s"
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return None if done.returncode == 0 else f"the data set openai/gsm8k cannot be had: {said[-1] if said else ''}"


def measure(target: Target, protocol: Protocol, task: Task, directory: Path) -> Accuracy:
    """Run one task against the server, which is already in the arm's mode.

    Raises:
        AccuracyError: lm_eval failed, as it does when a request does.
        EndpointError: the server does not say what its model is called.
    """
    name = Path(task.record).name
    output = directory / "raw" / name
    shutil.rmtree(output, ignore_errors=True)
    log = directory / "logs" / f"{name}.log"
    command = [program("lm_eval"), *_words(target, protocol, task.task, directory, output)]
    before = target.endpoint.drafts()
    with child(command, log, target.environment) as process:
        code = exit_code(process)
    written = sorted(output.rglob("results*.json"))
    if code or not written:
        raise AccuracyError(f"lm_eval ended with {code}: {complaint(log)} (see {log})")
    result = json.loads(written[-1].read_text())
    length = NEEDLE_TASK.fullmatch(task.task)
    return Accuracy(
        arm=task.arm,
        task=task.task,
        scores=needle_scores(result, length[1]) if length else exact_match_scores(result),
        samples=sum(counts["effective"] for counts in result["n-samples"].values()),
        acceptance_length=acceptance_length(growth(before, target.endpoint.drafts())),
        raw=str(written[-1].relative_to(directory)),
        command=tuple(command),
    )


def exact_match_scores(result: Mapping[str, Any]) -> dict[str, Score]:
    """GSM8K's scores: `exact_match,strict-match` and `exact_match,flexible-extract`.

    Args:
        result: What lm_eval wrote, with one task.
    """
    (row,) = result["results"].values()
    scores = {}
    for name, value in row.items():
        metric, comma, how = name.partition(",")
        if comma and not metric.endswith("_stderr"):
            error = row.get(f"{metric}_stderr,{how}")
            scores[name] = Score(value=value, standard_error=error if isinstance(error, int | float) else None)
    return scores


def needle_scores(result: Mapping[str, Any], length: str) -> dict[str, Score]:
    """RULER's scores at one length, by task. Every question has one needle, so a score is a share of questions.

    lm_eval knows no standard error for them: it is the sample's, as lm_eval's own for exact matches.
    """
    scores = {}
    for task, row in result["results"].items():
        value = row[f"{length},none"]
        count = result["n-samples"][task]["effective"]
        error = math.sqrt(value * (1 - value) / (count - 1)) if count > 1 else None
        scores[task] = Score(value=value, standard_error=error)
    return scores


def _words(target: Target, protocol: Protocol, task: str, directory: Path, output: Path) -> list[str]:
    """Arguments of `lm_eval`."""
    endpoint = target.endpoint
    model = (
        f"model={endpoint.model.name},base_url={endpoint.url}/v1/completions,num_concurrent={CONCURRENCY},"
        "tokenizer_backend=none,tokenized_requests=False"
    )
    words = ["--model", "local-completions", "--model_args", model]
    length = NEEDLE_TASK.fullmatch(task)
    if length:
        tokenizer = target.tokenizer[target.tokenizer.index("--tokenizer") + 1]
        metadata = json.dumps({"max_seq_lengths": [int(length[1])], "tokenizer": tokenizer})
        words += ["--tasks", ",".join(NEEDLE_TASKS), "--metadata", metadata]
    elif protocol.gsm8k is None:
        words += ["--tasks", GSM8K, "--num_fewshot", str(SHOTS)]
    else:
        folder = _file_task(Path(protocol.gsm8k), directory / "raw" / _FILE_TASK)
        words += ["--tasks", _FILE_TASK, "--include_path", str(folder), "--num_fewshot", str(SHOTS)]
    if protocol.questions is not None:
        words += ["--limit", str(protocol.questions)]
    words += ["--batch_size", "1", "--seed", str(protocol.seed), "--log_samples", "--output_path", str(output)]
    return words


def _file_task(questions: Path, folder: Path) -> Path:
    """A folder with lm_eval's own GSM8K task over the user's questions."""
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("lm_eval is not installed here: pip install '.[validate]' in dspark-serve's source folder")
    original = Path(next(iter(spec.submodule_search_locations))) / "tasks/gsm8k/gsm8k.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line) + "\n" for _, line in json_lines(questions, "--gsm8k")]
    (folder / "examples.jsonl").write_text("".join(lines[:SHOTS]))
    (folder / "questions.jsonl").write_text("".join(lines[SHOTS:]))
    files = {"train": str((folder / "examples.jsonl").resolve()), "test": str((folder / "questions.jsonl").resolve())}
    # JSON is YAML. Only where the questions come from differs from the published task.
    task = {
        "include": str(original),
        "task": _FILE_TASK,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
    }
    (folder / f"{_FILE_TASK}.yaml").write_text(json.dumps(task, indent=2) + "\n")
    return folder
