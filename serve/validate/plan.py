"""What is measured, in order: a pure function of the protocol, so that a resumed run goes on with what is missing.

Servers take turns within a round, and the next round takes them in the opposite order (off, speculating | speculating,
off | ...): slow drift of the machine then falls on every arm alike, and neighbouring rounds share a start. The arms of
one server take turns at every concurrency, and which is first changes with the concurrency and the round. Fixed and
adaptive share a server, which is an adaptive one: what starting fixed takes is learned with a server an arm, or where
adaptive is no arm.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from serve.validate.results import Arm, Protocol

ROUNDS_OF_A_START = 2
"""Rounds that one start of a server serves at most, so that the spread holds what a new start changes."""

NEEDLE_TASK = re.compile(r"niah-(\d+)")
NEEDLE_EXTRA_TOKENS = 256
"""Tokens beside RULER's own length, which counts the answer but not the answer's beginning that it puts there."""


@dataclass(frozen=True)
class Cell:
    """One arm under load at one concurrency."""

    round: int
    arm: Arm
    concurrency: int

    @property
    def record(self) -> str:
        """The record's path without its ending."""
        return f"load/round-{self.round}-{self.arm}-c{self.concurrency}"

    def __str__(self) -> str:
        return f"round {self.round}, {self.arm} at concurrency {self.concurrency}"


@dataclass(frozen=True)
class Task:
    """One accuracy task on one arm."""

    arm: Arm
    task: str

    @property
    def record(self) -> str:
        """The record's path without its ending."""
        return f"accuracy/{self.arm}-{self.task}"

    def __str__(self) -> str:
        return f"{self.task}, {self.arm}"


@dataclass(frozen=True)
class Sampling:
    """One arm's own outputs, to be compared with those of no speculation."""

    arm: Arm

    @property
    def record(self) -> str:
        """The record's path without its ending."""
        return f"raw/exactness-{self.arm}"

    def __str__(self) -> str:
        return f"outputs for the exactness check, {self.arm}"


Work = Cell | Task | Sampling


@dataclass(frozen=True)
class Serving:
    """One start of a server and what is measured on it.

    Attributes:
        round: The first round that it serves.
        arms: The arms that it can serve.
        works: In order.
        max_model_len: What a task needs where the profile's own context is shorter; None for the profile's.
    """

    round: int
    arms: tuple[Arm, ...]
    works: tuple[Work, ...]
    max_model_len: int | None = None

    @property
    def verification(self) -> Arm:
        """What the server is started with: only an adaptive one can be switched."""
        return Arm.ADAPTIVE if Arm.ADAPTIVE in self.arms else self.arms[0]

    @property
    def name(self) -> str:
        """What its records and logs are called."""
        long = "" if self.max_model_len is None else f"-{self.max_model_len}"
        return f"round-{self.round}-{self.arms[0]}{long}"


def plan(protocol: Protocol, context: int | None = None, skipped: Container[str] = ()) -> tuple[Serving, ...]:
    """Every start with what is measured on it, in order.

    Args:
        protocol: What to measure.
        context: Tokens of the longest request that the profile takes; None where it is not known to be too short.
        skipped: Tasks that cannot be measured here.
    """
    groups = _groups(protocol)
    servings: list[Serving] = []
    for number in range(1, protocol.rounds + 1):
        for arms in groups if number % 2 else groups[::-1]:
            cells = _cells(protocol, number, arms)
            last = servings[-1] if servings else None
            if last is not None and last.arms == arms and (protocol.url or number - last.round < ROUNDS_OF_A_START):
                servings[-1] = replace(last, works=last.works + cells)
            else:
                servings.append(Serving(number, arms, cells))
    for arms in groups:
        first = next(index for index, serving in enumerate(servings) if serving.arms == arms)
        short, long, needed = _rest(protocol, arms, context, skipped)
        servings[first] = replace(servings[first], works=servings[first].works + short)
        if long:
            servings.append(Serving(1, arms, long, max_model_len=needed))
    return tuple(servings)


def remaining(servings: Sequence[Serving], done: Container[Work]) -> tuple[Serving, ...]:
    """The servings without what is done, and without those that have nothing left."""
    left = (replace(serving, works=tuple(w for w in serving.works if w not in done)) for serving in servings)
    return tuple(serving for serving in left if serving.works)


def works_of(servings: Sequence[Serving]) -> tuple[Work, ...]:
    """Everything that is measured, in order."""
    return tuple(work for serving in servings for work in serving.works)


def needed_context(task: str) -> int:
    """Tokens of the longest request of a task; 0 where the profiles' own contexts do."""
    found = NEEDLE_TASK.fullmatch(task)
    return int(found[1]) + NEEDLE_EXTRA_TOKENS if found else 0


def requests_of(protocol: Protocol, concurrency: int) -> int:
    """Requests of a cell."""
    return max(protocol.requests, protocol.requests_per_stream * concurrency)


def _groups(protocol: Protocol) -> list[tuple[Arm, ...]]:
    """The arms that share a server: no speculation needs one of its own, and a running server is the only one."""
    if protocol.url is not None:
        return [protocol.arms]
    if protocol.server_per_arm:
        return [(arm,) for arm in protocol.arms]
    off = tuple(arm for arm in protocol.arms if arm is Arm.OFF)
    speculating = tuple(arm for arm in protocol.arms if arm is not Arm.OFF)
    return [group for group in (off, speculating) if group]


def _cells(protocol: Protocol, number: int, arms: tuple[Arm, ...]) -> tuple[Cell, ...]:
    cells: list[Cell] = []
    for index, concurrency in enumerate(protocol.concurrencies):
        turn = (number - 1 + index) % len(arms)
        cells += [Cell(number, arm, concurrency) for arm in arms[turn:] + arms[:turn]]
    return tuple(cells)


def _rest(
    protocol: Protocol, arms: tuple[Arm, ...], context: int | None, skipped: Container[str]
) -> tuple[tuple[Work, ...], tuple[Work, ...], int]:
    """What is measured once an arm: on the profile's own server, on one with a longer context, and that context."""
    tasks = [task for task in protocol.tasks if task not in skipped]
    long = [task for task in tasks if context is not None and needed_context(task) > context]
    samplings = [Sampling(arm) for arm in arms] if protocol.exactness and "exactness" not in skipped else []
    short_works: list[Work] = [*samplings, *(Task(arm, task) for task in tasks if task not in long for arm in arms)]
    long_works: list[Work] = [Task(arm, task) for task in long for arm in arms]
    return tuple(short_works), tuple(long_works), max((needed_context(task) for task in long), default=0)
