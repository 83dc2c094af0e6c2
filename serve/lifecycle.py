"""The states of the server, as one value that everything else reads.

`starting(phase, progress)` -> `ready` -> `draining` -> `stopped`, or `failed(reason)` from anywhere. A state only
moves forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from serve.errors import ExitCode


class State(StrEnum):
    """What the server is doing."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Phase(StrEnum):
    """The steps of a start, in order."""

    IMPORTING = "importing vLLM"
    CONFIGURING = "checking the configuration"
    LOADING = "starting the engine and loading weights"
    BUILDING = "building the API"
    READY = "ready"

    @property
    def progress(self) -> float:
        """Share of the start's steps that are done, 0 to 1. Steps, not seconds: loading takes most of the time."""
        phases = list(Phase)
        return phases.index(self) / (len(phases) - 1)


_NEXT: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.READY, State.DRAINING, State.FAILED}),
    State.READY: frozenset({State.DRAINING, State.FAILED}),
    State.DRAINING: frozenset({State.STOPPED, State.FAILED}),
    State.STOPPED: frozenset(),
    State.FAILED: frozenset(),
}


@dataclass
class Lifecycle:
    """The current state, since when, and why.

    Attributes:
        state: The state.
        phase: The step of the start that is under way, or was when it failed.
        reason: Why the server failed, in one line.
        exit_code: What the process will end with.
        entered: When the state was entered, on `clock`.
    """

    clock: Callable[[], float] = time.monotonic
    state: State = State.STARTING
    phase: Phase = Phase.IMPORTING
    reason: str = ""
    exit_code: ExitCode = ExitCode.OK
    entered: float = field(init=False)

    def __post_init__(self) -> None:
        self.entered = self.clock()

    @property
    def seconds(self) -> float:
        """How long the current state has lasted."""
        return self.clock() - self.entered

    def begin(self, phase: Phase) -> None:
        """Enter a step of the start; no effect once the start is over."""
        if self.state is State.STARTING:
            self.phase = phase

    def ready(self) -> None:
        """The model answers."""
        if self._enter(State.READY):
            self.phase = Phase.READY

    def drain(self) -> None:
        """No new work is taken."""
        self._enter(State.DRAINING)

    def stop(self) -> None:
        """Everything has ended as asked."""
        self._enter(State.STOPPED)

    def fail(self, reason: str, exit_code: ExitCode) -> None:
        """The first failure counts: what follows it is its consequence."""
        if self._enter(State.FAILED):
            self.reason = reason
            self.exit_code = exit_code

    def _enter(self, state: State) -> bool:
        if state not in _NEXT[self.state]:
            return False
        self.state = state
        self.entered = self.clock()
        return True
