"""The protocol that options ask for: defaults that repeat vllm#58151's runs, smaller ones for the CPU engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from serve.errors import InputError
from serve.profile import Profile
from serve.validate.accuracy import GSM8K, SHORTEST_NEEDLE, known_task
from serve.validate.prompts import BUILT_IN_NAME
from serve.validate.results import Arm, Protocol

CONCURRENCIES = (4, 16, 32, 64, 128, 256)
TASKS = (GSM8K, "niah-16384", "niah-65536")
CPU = "cpu"

T = TypeVar("T")


@dataclass(frozen=True)
class Size:
    """How much is measured where no option says it."""

    concurrencies: tuple[int, ...]
    rounds: int
    requests: int
    warmup_requests: int
    output_tokens: int
    tasks: tuple[str, ...]
    questions: int | None


FULL = Size(CONCURRENCIES, rounds=3, requests=880, warmup_requests=64, output_tokens=512, tasks=TASKS, questions=None)
"""The cells of vllm#58151, in three rounds as vllm#52795 had them, and the tasks that were asked for there."""

SMALL = Size((1, 4, 16), rounds=2, requests=8, warmup_requests=4, output_tokens=32, tasks=(), questions=8)
"""For two CPU cores: 6,144 output tokens in 18 cells."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says; None where it says nothing."""

    arms: str | None = None
    concurrencies: str | None = None
    rounds: int | None = None
    prompts: str | None = None
    requests: int | None = None
    requests_per_stream: int = 1
    warmup_requests: int | None = None
    output_tokens: int | None = None
    temperature: float = 1.0
    seed: int = 42


def profile_protocol(
    recipe: Profile,
    given: str,
    sets: Sequence[str],
    extra: Sequence[str],
    options: Options,
    *,
    tasks: str | None,
    gsm8k: Path | None,
    questions: int | None,
    exactness: bool,
    server_per_arm: bool = False,
) -> Protocol:
    """The protocol of `dspark-serve validate`.

    Args:
        recipe: The profile, `--set` applied.
        given: The profile as it was given.
        sets: `--set` words.
        extra: Arguments of vllm serve.
        options: Of the sweep.
        tasks: Accuracy tasks, separated by commas; empty for none.
        gsm8k: The user's own questions.
        questions: Of a task, at most.
        exactness: Whether outputs are compared.
        server_per_arm: Whether `fixed` has servers of its own.

    Raises:
        InputError: a list with something that is not one of its kind, twice the same, or nothing in it.
    """
    small = recipe.hardware == CPU
    size = SMALL if small else FULL
    if gsm8k is not None and small:
        size = replace(size, tasks=(GSM8K,))
    chosen = size.tasks if tasks is None else _listed("--tasks", tasks, _task, may_be_empty=True)
    if gsm8k is not None and GSM8K not in chosen:
        raise InputError("--gsm8k is given, and --tasks leaves gsm8k out: leave one of them out")
    fitting = tuple(c for c in size.concurrencies if c <= (recipe.concurrency or c)) or size.concurrencies[:1]
    return Protocol(
        profile=given,
        sets=tuple(sets),
        extra=tuple(extra),
        arms=tuple(Arm) if options.arms is None else arms_of(options.arms),
        tasks=chosen,
        gsm8k=None if gsm8k is None else str(gsm8k.absolute()),
        questions=questions if questions is not None or not chosen else size.questions,
        exactness=exactness,
        server_per_arm=server_per_arm,
        **_sweep(options, size, fitting),
    )


def url_protocol(url: str, arms: tuple[Arm, ...], options: Options) -> Protocol:
    """The protocol of `dspark-serve bench`: the sweep alone.

    Raises:
        InputError: as `profile_protocol`.
    """
    return Protocol(profile=None, url=url, arms=arms, exactness=False, **_sweep(options, FULL, FULL.concurrencies))


def arms_of(text: str) -> tuple[Arm, ...]:
    """Arms, separated by commas, in the order of the report.

    Raises:
        InputError: one that is none, or twice the same.
    """
    return tuple(sorted(_listed("--arms", text, _arm), key=list(Arm).index))


def _sweep(options: Options, size: Size, concurrencies: tuple[int, ...]) -> dict[str, Any]:
    listed = options.concurrencies
    if listed is not None:
        concurrencies = tuple(sorted(_listed("--concurrencies", listed, _concurrency)))
    return {
        "concurrencies": concurrencies,
        "rounds": options.rounds or size.rounds,
        "prompts": _absolute(options.prompts or BUILT_IN_NAME),
        "requests": options.requests or size.requests,
        "requests_per_stream": options.requests_per_stream,
        "warmup_requests": size.warmup_requests if options.warmup_requests is None else options.warmup_requests,
        "output_tokens": options.output_tokens or size.output_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
    }


def _absolute(prompts: str) -> str:
    """A prompt set whose path does not depend on where a run is resumed."""
    if prompts == BUILT_IN_NAME:
        return prompts
    kind, colon, place = prompts.rpartition(":")
    return f"{kind}{colon}{Path(place).absolute()}"


def _listed(option: str, text: str, read: Callable[[str], T | None], may_be_empty: bool = False) -> tuple[T, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    found = []
    for word in words:
        value = read(word)
        if value is None:
            raise InputError(f"{option} {word}: {_EXPECTED[option]}")
        if value in found:
            raise InputError(f"{option} {text}: {word} is there twice")
        found.append(value)
    if not found and not may_be_empty:
        raise InputError(f"{option} is empty: {_EXPECTED[option]}")
    return tuple(found)


_EXPECTED = {
    "--arms": "use off, fixed and adaptive, separated by commas",
    "--concurrencies": "use whole numbers from 1 to 65536, separated by commas",
    "--tasks": f"use gsm8k and niah-LENGTH, LENGTH tokens of at least {SHORTEST_NEEDLE}, separated by commas",
}


def _arm(word: str) -> Arm | None:
    return next((arm for arm in Arm if arm.value == word), None)


def _concurrency(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and 1 <= int(word) <= 65536 else None


def _task(word: str) -> str | None:
    return word if known_task(word) else None
