"""What a validation run leaves on disk, one file a measured thing; the report is computed from these files alone.

    run.json                            `Run`: the protocol and where it runs
    starts/round-1-fixed.json           `Start`: what one start of a server took
    load/round-1-fixed-c16.json         `Load`: one cell of the throughput sweep
    accuracy/adaptive-gsm8k.json        `Accuracy`: one task on one arm
    exactness/adaptive.json             `Exactness`: one arm's outputs against no speculation
    raw/, logs/                         what the tools themselves wrote

A file is written whole or not at all, so that what is there is finished and a resumed run goes on with the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]

_SECRET_NAME = r"[\w.-]*(?:KEYS?|TOKEN|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?)(?![a-z])[\w.-]*"
SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)
"""Names of variables, settings and options whose values are not written down; tokenizers and counts of tokens are."""
_IN_MAPPING = re.compile(rf"""({_SECRET_NAME}["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s,}}\]]+)""", re.IGNORECASE)
WITHHELD = "(withheld)"


def withheld(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables as they may be written down."""
    return {name: WITHHELD if SECRET.fullmatch(name) else value for name, value in environment.items()}


def withheld_words(words: Iterable[str]) -> tuple[str, ...]:
    """Words of a command line as they may be written down.

    What follows the name of a secret is left out: `NAME=value`, `--name=value`, the words after `--name` as far as the
    next option, and the entry of a mapping in JSON or YAML.
    """
    found = []
    follows_secret = False
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            follows_secret = not equals and SECRET.fullmatch(word.lstrip("-")) is not None
        if follows_secret and not word.startswith("-"):
            found.append(WITHHELD)
        elif equals and SECRET.fullmatch(name.lstrip("-")):
            found.append(f"{name}={WITHHELD}")
        else:
            found.append(_IN_MAPPING.sub(rf"\1{WITHHELD}", word))
    return tuple(found)


Words = Annotated[tuple[str, ...], AfterValidator(withheld_words)]
"""A command line in a record."""
Environment = Annotated[dict[str, str], AfterValidator(withheld)]
"""Variables in a record."""


class Record(BaseModel):
    """Base of what is written: nothing unknown is read, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(StrEnum):
    """How drafts are verified while a cell is measured."""

    OFF = "off"
    FIXED = "fixed"
    ADAPTIVE = "adaptive"


class Protocol(Record):
    """What is measured. A run is resumed only with the protocol that it was started with.

    Attributes:
        profile: The profile that is served; None where a running server is asked.
        url: The running server that is asked; None where a profile is served.
        sets: `--set` of the profile, as given.
        extra: Arguments of vllm serve, as given.
        arms: In the order of the report.
        concurrencies: Requests at once, ascending.
        rounds: How often every (arm, concurrency) is measured.
        prompts: The prompt set: `built-in`, `speed-bench:FOLDER`, `sharegpt:FILE`, or the path of a JSONL file.
        requests: Requests of a cell: at least this many, and never fewer than `requests_per_stream` x concurrency.
        requests_per_stream: See `requests`.
        warmup_requests: Requests before an arm's first cell on a server, not counted.
        output_tokens: Forced length of every answer.
        temperature: Of the load.
        tasks: Accuracy tasks, as `gsm8k`, `niah-16384`.
        gsm8k: A JSONL file of questions and answers that is asked instead of the published data set.
        questions: Questions of a task, at most; None for all of them.
        exactness: Whether outputs are compared with no speculation.
        server_per_arm: Whether `fixed` has servers of its own, so that its start is measured too.
        seed: Of the load, the tasks and the samples.
    """

    profile: str | None
    url: str | None = None
    sets: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    arms: tuple[Arm, ...]
    concurrencies: tuple[int, ...]
    rounds: Annotated[int, Field(ge=1)]
    prompts: str
    requests: Annotated[int, Field(ge=1)]
    requests_per_stream: Annotated[int, Field(ge=1)]
    warmup_requests: Count
    output_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0)]
    tasks: tuple[str, ...] = ()
    gsm8k: str | None = None
    questions: Annotated[int, Field(ge=1)] | None = None
    exactness: bool = True
    server_per_arm: bool = False
    seed: int = 0


def recorded(protocol: Protocol) -> Protocol:
    """A protocol as it may be written down. Two that differ in a secret alone are the same run's."""
    return protocol.model_copy(update={"sets": withheld_words(protocol.sets), "extra": withheld_words(protocol.extra)})


class Skipped(Record):
    """Something of the protocol that cannot be measured here, with the reason and what to do about it."""

    what: str
    reason: str


class Run(Record):
    """`run.json`.

    Attributes:
        started: Time of the first start, ISO 8601, UTC.
        command: The command line as it was given, secrets withheld as everywhere in a record.
        versions: Package -> version, of this package, vLLM, PyTorch, Triton and the tools of the run.
        hardware: The hardware class, as `cuda-hopper`.
        machine: Words: cards, processor, memory.
        patches: Patch id -> status, as `dspark-serve patches` says.
        patch_set: Hash of the applied ledger.
    """

    started: str
    command: Words
    protocol: Annotated[Protocol, AfterValidator(recorded)]
    versions: dict[str, str]
    hardware: str
    machine: str
    patches: dict[str, str]
    patch_set: str
    skipped: tuple[Skipped, ...] = ()


class Start(Record):
    """One start of a server.

    Attributes:
        arms: The arms that are measured on it.
        ready_s: From the command to a model that answers.
        graph_s: What capturing graphs took, as vLLM logged it; None where none was captured.
        graph_gib: What the captured graphs hold.
        command: What was started.
        environment: The variables that were set for it, secrets withheld.
    """

    round: int
    arms: tuple[Arm, ...]
    ready_s: Seconds
    graph_s: Seconds | None
    graph_gib: Annotated[float, Field(ge=0)] | None
    command: Words
    environment: Environment


class Drafts(Record):
    """How drafts fared in a cell: the growth of the server's own counters.

    Attributes:
        proposed, verified, accepted, expected: Draft tokens; `expected` is a sum of survival probabilities.
        steps: (Request, verification step) pairs.
        emitted: Accepted drafts and bonus tokens of those steps; `emitted / steps` is the acceptance length.
        width: Verified tokens of those steps, the bonus token included.
    """

    proposed: float
    verified: float
    accepted: float
    expected: float
    steps: float
    emitted: float
    width: float


class Load(Record):
    """One cell: one arm at one concurrency in one round.

    Attributes:
        requested: Requests sent; `requested == completed + failed`.
        errors: Message -> how many requests failed with it.
        duration_s: From the first request to the last answer.
        input_tokens, output_tokens: Of the completed requests.
        output_tokens_per_s: `output_tokens / duration_s`.
        ttft_ms, tpot_ms: Median and 99th percentile of the time to the first token and a token after it.
        drafts: None without speculation, or where the server does not say, before the cell or after it.
        raw: The tool's own result, relative to the run's directory.
        command: What produced the load.
    """

    round: int
    arm: Arm
    concurrency: int
    requested: Count
    completed: Count
    failed: Count
    errors: dict[str, int]
    duration_s: Seconds
    input_tokens: Count
    output_tokens: Count
    output_tokens_per_s: Annotated[float, Field(ge=0)]
    ttft_ms: tuple[float, float] | None
    tpot_ms: tuple[float, float] | None
    drafts: Drafts | None
    raw: str
    command: Words


class Score(Record):
    """One metric of a task."""

    value: float
    standard_error: Annotated[float, Field(ge=0)] | None


class Accuracy(Record):
    """One task on one arm.

    Attributes:
        scores: Metric -> score, as `exact_match,strict-match`.
        samples: Questions asked; a failed one would have failed the task.
        acceptance_length: Tokens a verification step while the task ran; None without speculation.
    """

    arm: Arm
    task: str
    scores: dict[str, Score]
    samples: Count
    acceptance_length: float | None
    raw: str
    command: Words


class Exactness(Record):
    """One arm's outputs against those without speculation.

    Attributes:
        greedy_prompts: Prompts answered greedily by both.
        greedy_equal: Of these, those whose tokens are the same.
        greedy_tokens: Tokens compared.
        first_difference: Prompt number -> position of the first token that differs.
        sampled_tokens: Tokens of each arm in the distribution test.
        p_values: Position -> probability of a difference at least as large, if both arms sample from one distribution
            (chi-square of homogeneity).
    """

    arm: Arm
    greedy_prompts: Count
    greedy_equal: Count
    greedy_tokens: Count
    first_difference: dict[int, int]
    sampled_tokens: Count
    p_values: dict[int, float]
    raw: str
