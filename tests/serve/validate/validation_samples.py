"""Protocols and records to test the runner's side of a validation with, and servers that measure nothing real."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st

from serve.validate.exactness import Outputs
from serve.validate.plan import Cell, Sampling, Serving, Task, Work
from serve.validate.results import Accuracy, Arm, Load, Protocol, Run, Score
from serve.validate.runner import Measured

LOAD_TEMPLATE: dict[str, Any] = {
    "requested": 4,
    "completed": 4,
    "failed": 0,
    "errors": {},
    "duration_s": 2.0,
    "input_tokens": 40,
    "output_tokens": 128,
    "output_tokens_per_s": 64.0,
    "ttft_ms": (10.0, 20.0),
    "tpot_ms": (1.0, 2.0),
    "drafts": None,
    "command": ("vllm", "bench", "serve"),
}


def protocol(**fields: Any) -> Protocol:
    """A small protocol with three arms."""
    usual: dict[str, Any] = {
        "profile": "tiny-cpu",
        "arms": tuple(Arm),
        "concurrencies": (1, 4),
        "rounds": 2,
        "prompts": "built-in",
        "requests": 4,
        "requests_per_stream": 1,
        "warmup_requests": 0,
        "output_tokens": 8,
        "temperature": 1.0,
        "tasks": ("gsm8k",),
    }
    return Protocol(**{**usual, **fields})


def protocols() -> st.SearchStrategy[Protocol]:
    """Any protocol of a profile."""
    return st.builds(
        protocol,
        arms=st.sets(st.sampled_from(Arm), min_size=1).map(lambda arms: tuple(sorted(arms, key=list(Arm).index))),
        concurrencies=st.sets(st.integers(1, 512), min_size=1, max_size=7).map(lambda found: tuple(sorted(found))),
        rounds=st.integers(1, 7),
        tasks=st.sampled_from([(), ("gsm8k",), ("gsm8k", "niah-16384"), ("niah-4096", "niah-65536")]),
        exactness=st.booleans(),
        server_per_arm=st.booleans(),
    )


def begun(**fields: Any) -> Run:
    """A run of `protocol(**fields)`."""
    return Run(
        started="2026-11-29T12:00:00+00:00",
        command=("dspark-serve", "validate", "tiny-cpu"),
        protocol=protocol(**fields),
        versions={"vllm": "0.32.0"},
        hardware="cpu",
        machine="2 cores",
        patches={"cpu-engine": "applied"},
        patch_set="abc",
    )


def record_of(work: Work) -> Measured:
    """A record as it would be measured, the same every time."""
    match work:
        case Cell():
            raw = f"raw/{work.record.partition('/')[2]}.json"
            return Load(round=work.round, arm=work.arm, concurrency=work.concurrency, raw=raw, **LOAD_TEMPLATE)
        case Task():
            return Accuracy(
                arm=work.arm,
                task=work.task,
                scores={"exact_match,strict-match": Score(value=0.5, standard_error=0.1)},
                samples=26,
                acceptance_length=None,
                raw="raw/results.json",
                command=("lm_eval",),
            )
        case Sampling():
            draws = random.Random(work.arm.value)
            sampled = tuple(tuple(draws.choice((1, 2, 3)) for _ in range(4)) for _ in range(100))
            return Outputs(
                arm=work.arm, prompts=("a", "b"), greedy=((1, 2), (3, 4)), sampled_prompt="c", sampled=sampled, seed=0
            )


class Imagined:
    """Servers that give the records of `record_of`.

    Args:
        before: Called before everything that is measured, and may raise.
        starting: Called before every start, and may raise.
    """

    def __init__(
        self, before: Callable[[Work], None] | None = None, starting: Callable[[Serving], None] | None = None
    ) -> None:
        self.measured: list[Work] = []
        self.started: list[Serving] = []
        self.open = 0
        self._before = before
        self._starting = starting

    @contextmanager
    def serving(self, serving: Serving) -> Iterator[Imagined]:
        if self._starting is not None:
            self._starting(serving)
        self.started.append(serving)
        self.open += 1
        try:
            yield self
        finally:
            self.open -= 1

    def measure(self, work: Work) -> Measured:
        if self._before is not None:
            self._before(work)
        self.measured.append(work)
        return record_of(work)
