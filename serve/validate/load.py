"""One cell of the sweep: vLLM's own `vllm bench serve` as a process, and its detailed result as a record.

Every answer has a forced length, so one that ends early was cut off and counts as failed: the tool itself takes an
error that arrives within a stream for the end of the answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.validate.children import child, complaint, exit_code, program
from serve.validate.endpoint import Endpoint, growth
from serve.validate.plan import Cell, requests_of
from serve.validate.prompts import PromptSet, written
from serve.validate.results import Load, Protocol

WARMUP_CONCURRENCY = 32
"""As the seeds' runs had it, or less where the sweep has less."""
LONGEST_MESSAGE = 200


class LoadError(Exception):
    """The tool did not deliver a result; the message is one line."""


@dataclass(frozen=True)
class Target:
    """Whom the load is sent to.

    Attributes:
        endpoint: The server.
        chats: Whether chat requests are sent.
        tokenizer: Words of `vllm bench serve` that choose the tokenizer.
        environment: Of the tool; holds the key.
    """

    endpoint: Endpoint
    chats: bool
    tokenizer: tuple[str, ...]
    environment: Mapping[str, str]


def measure(target: Target, protocol: Protocol, prompts: PromptSet, cell: Cell, directory: Path) -> Load:
    """Load the server, which is already in the cell's mode.

    Args:
        target: The server.
        protocol: How many requests, how long, how random.
        prompts: What is asked.
        cell: Which cell this is.
        directory: The run's.

    Raises:
        LoadError: the tool failed as a whole. Requests that failed are in the record.
        EndpointError: the server does not say what its model is called.
    """
    requests = requests_of(protocol, cell.concurrency)
    name = Path(cell.record).name
    salt = f"dspark-{name}"
    before = target.endpoint.drafts()
    raw = directory / "raw" / f"{name}.json"
    words = _words(target, protocol, prompts, cell.concurrency, requests, protocol.output_tokens, salt, raw)
    command = _run(target, words, directory / "logs" / f"{name}.log", raw)
    drafts = growth(before, target.endpoint.drafts())
    return Load(
        round=cell.round,
        arm=cell.arm,
        concurrency=cell.concurrency,
        drafts=drafts,
        raw=str(raw.relative_to(directory)),
        command=tuple(command),
        **counted(json.loads(raw.read_text()), protocol.output_tokens),
    )


def warm_up(target: Target, protocol: Protocol, prompts: PromptSet, name: str, directory: Path) -> None:
    """Send the requests before an arm's first cell on a server. Nothing of them is counted.

    Raises:
        LoadError: the tool failed, or every request did.
    """
    if not protocol.warmup_requests:
        return
    raw = directory / "raw" / f"warm-up-{name}.json"
    concurrency = min(WARMUP_CONCURRENCY, max(protocol.concurrencies))
    tokens = min(256, protocol.output_tokens)
    salt = f"dspark-warm-up-{name}"
    words = _words(target, protocol, prompts, concurrency, protocol.warmup_requests, tokens, salt, raw)
    _run(target, words, directory / "logs" / f"warm-up-{name}.log", raw)
    result = counted(json.loads(raw.read_text()), tokens)
    if not result["completed"]:
        raise LoadError(f"every request of the warm-up failed: {next(iter(result['errors']), 'no request was sent')}")


def counted(result: Mapping[str, Any], forced_tokens: int) -> dict[str, Any]:
    """The counts and times of a detailed result, every request in them.

    Args:
        result: What `vllm bench serve --save-detailed` wrote.
        forced_tokens: The length that every answer was to have.

    Returns:
        Fields of `Load`; `requested == completed + failed`.
    """
    columns = (result[name] for name in ("output_lens", "input_lens", "ttfts", "itls", "errors"))
    answers = [_Answer(*row) for row in zip(*columns, strict=True)]
    whole = [answer for answer in answers if answer.problem(forced_tokens) is None]
    problems = [problem for answer in answers if (problem := answer.problem(forced_tokens)) is not None]
    output_tokens = sum(answer.tokens for answer in whole)
    duration = float(result["duration"])
    return {
        "requested": len(answers),
        "completed": len(whole),
        "failed": len(problems),
        "errors": dict(Counter(problems).most_common()),
        "duration_s": duration,
        "input_tokens": sum(answer.prompt_tokens for answer in whole),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / duration if duration else 0.0,
        "ttft_ms": _median_and_99th([1000 * answer.ttft for answer in whole]),
        "tpot_ms": _median_and_99th([1000 * sum(a.itls) / (a.tokens - 1) for a in whole if a.tokens > 1]),
    }


@dataclass(frozen=True)
class _Answer:
    """One request as the tool saw it; times in seconds."""

    tokens: int
    prompt_tokens: int
    ttft: float
    itls: Sequence[float]
    error: str

    def problem(self, forced_tokens: int) -> str | None:
        """One line that says why it failed, of a traceback the last one; None for a whole answer."""
        lines = [line.strip() for line in self.error.splitlines() if line.strip()]
        if lines:
            return lines[-1][:LONGEST_MESSAGE]
        if self.tokens < forced_tokens:
            return f"the answer ended after fewer than {forced_tokens} tokens"
        return f"the answer went on after {forced_tokens} tokens" if self.tokens > forced_tokens else None


def _words(
    target: Target,
    protocol: Protocol,
    prompts: PromptSet,
    concurrency: int,
    requests: int,
    tokens: int,
    salt: str,
    raw: Path,
) -> list[str]:
    """Arguments of `vllm bench serve`."""
    dataset = prompts.path
    if dataset is None:
        dataset = raw.with_suffix(".jsonl")
        dataset.write_text(written(prompts.prompts, requests))
    length = "--speed-bench-output-len" if prompts.dataset == "speed_bench" else f"--{prompts.dataset}-output-len"
    return [
        *("--backend", "openai-chat" if target.chats else "openai"),
        *("--base-url", target.endpoint.url),
        *("--endpoint", "/v1/chat/completions" if target.chats else "/v1/completions"),
        *("--model", target.endpoint.model.name),
        *target.tokenizer,
        *("--dataset-name", prompts.dataset),
        *("--dataset-path", str(dataset)),
        *(("--speed-bench-dataset-subset", "qualitative") if prompts.dataset == "speed_bench" else ()),
        "--skip-chat-template",
        "--disable-shuffle",
        "--no-oversample",
        *("--temperature", str(protocol.temperature)),
        "--ignore-eos",
        *(length, str(tokens)),
        *("--num-prompts", str(requests)),
        *("--max-concurrency", str(concurrency)),
        *("--request-rate", "inf"),
        *("--seed", str(protocol.seed)),
        *("--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--metric-percentiles", "50,99"),
        *("--extra-body", json.dumps({"cache_salt": salt})),
        *("--ready-check-timeout-sec", "0"),
        "--disable-tqdm",
        "--save-result",
        "--save-detailed",
        *("--result-dir", str(raw.parent)),
        *("--result-filename", raw.name),
    ]


def _run(target: Target, words: Sequence[str], log: Path, raw: Path) -> list[str]:
    """Run the tool; returns what was run."""
    raw.unlink(missing_ok=True)
    command = [program("vllm"), "bench", "serve", *words]
    with child(command, log, target.environment) as process:
        code = exit_code(process)
    if code or not raw.exists():
        raise LoadError(f"vllm bench serve ended with {code}: {complaint(log)} (see {log})")
    return command


def _median_and_99th(values: Sequence[float]) -> tuple[float, float] | None:
    import numpy

    if not values:
        return None
    median, high = numpy.percentile(values, [50, 99])
    return float(median), float(high)
