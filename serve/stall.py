"""Tells an engine that hangs from one that is busy.

An engine has stalled when it has requests and for `seconds` completed no step, while nothing that a long step does was
seen at the end of that time. What acquits it, looked for again every few seconds:

- where the model computes on the CPU: every process that computes used the CPU. A step that takes long does;
- anywhere: a compiler at work, in a process that the engine started and that used the CPU, or in the Python stacks of
  an engine process that did.

A GPU's worker that waits may use the CPU as much as one that works, so that proves nothing there; chunked prefill
bounds a step at `max_num_batched_tokens`, far below a minute's work. A process that is stopped acquits nothing. Time in
which this server itself did not run is not counted against the engine.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from patches.stacks import ask_for_stacks, read_stacks

LOOK_SECONDS = 10.0
"""How long an engine is looked at before it is judged; at most half of what it gets."""
BUSY_SHARE = 0.02
"""Of one core. A worker that waits was seen to use 0.9 %, one that was starved by other work still 5 %."""
STACKS_SECONDS = 2.0
"""What processes get to write their stacks in."""

_COMPILING = re.compile(
    r"""File\ "[^"]*(
        /triton/compiler/compiler\.py",\ line\ \d+\ in\ (compile|make_\w+)
      | /triton/runtime/(build|autotuner)\.py"
      | /torch/_dynamo/(convert_frame|symbolic_convert|output_graph)\.py"
      | /torch/_inductor/(compile_fx|graph|scheduler|codecache|async_compile|autotune_process|codegen/\w+)\.py"
      | /torch/utils/cpp_extension\.py"
      | /(flashinfer|aiter|tilelang)/jit/
    )""",
    re.VERBOSE,
)
"""A frame of a compiler in the output of `faulthandler`. Launching what is compiled passes through none of these."""


@dataclass(frozen=True)
class Progress:
    """How far one engine is.

    Attributes:
        engine: Data-parallel rank.
        steps: Steps whose outcome has reached the server.
        running: Requests in the engine's batch after the last of them.
        waiting: Requests that waited then.
        requests: Requests that it has now and that are not waiting for their client's input.
        core: Process id of the engine core; None where it is not a child of this process.
    """

    engine: int
    steps: int
    running: int
    waiting: int
    requests: int
    core: int | None


@dataclass(frozen=True)
class Activity:
    """What the processes of one engine had done at one moment.

    Attributes:
        computing: Process id -> CPU seconds, of the workers, or of the engine core where that runs the model itself.
        helpers: CPU seconds of everything else that the engine started, ended processes included.
        stopped: Whether any process of the engine is stopped.
    """

    computing: dict[int, float]
    helpers: float
    stopped: bool


@dataclass(frozen=True)
class Stall:
    """A verdict.

    Attributes:
        progress: The engine's.
        seconds: How long no step was completed.
    """

    progress: Progress
    seconds: float


@dataclass
class _Watched:
    steps: int = -1
    idle: float = 0.0
    before: Activity | None = None
    before_at: float = 0.0


@dataclass
class StallWatch:
    """Watches every engine.

    Attributes:
        seconds: How long an engine may have requests and complete no step.
        computes_on_cpu: Whether the model runs on the CPU.
        directory: Where processes write their stacks.
        round_seconds: Time between two calls of `observe`.
        look: Measures an engine's processes, by the process id of its core.
    """

    seconds: float
    computes_on_cpu: bool
    directory: Path
    round_seconds: float
    look: Callable[[int], Activity] = field(default_factory=lambda: activity)
    _engines: dict[int, _Watched] = field(default_factory=dict, init=False)
    _observed_at: float | None = field(default=None, init=False)

    def observe(self, now: float, engines: Sequence[Progress]) -> Stall | None:
        """The first engine that has stalled, or None. Call it about every `round_seconds`.

        Args:
            now: A clock that no adjustment of the time moves.
            engines: Every engine.
        """
        since = 0.0 if self._observed_at is None else now - self._observed_at
        self._observed_at = now
        # Longer than that and this process was held up, so that steps may be waiting to be read.
        passed = min(since, 2 * self.round_seconds)
        for progress in engines:
            watched = self._engines.setdefault(progress.engine, _Watched())
            if progress.requests == 0 or progress.steps != watched.steps:
                self._engines[progress.engine] = _Watched(progress.steps)
            elif self._has_stalled(watched, progress, now, passed):
                return Stall(progress, watched.idle)
        return None

    def _has_stalled(self, watched: _Watched, progress: Progress, now: float, passed: float) -> bool:
        watched.idle += passed
        looking = min(LOOK_SECONDS, self.seconds / 2)
        # A round early rather than a round late.
        deadline = self.seconds - self.round_seconds
        if progress.core is None:
            return watched.idle >= deadline
        if watched.before is None:
            if watched.idle >= deadline - looking:
                self._begin_to_look(watched, progress.core, now)
            return False
        if watched.idle < deadline:
            return False
        after = self.look(progress.core)
        if not self._works(watched.before, after, now - watched.before_at):
            return True
        watched.idle = deadline - looking
        self._begin_to_look(watched, progress.core, now)
        return False

    def _begin_to_look(self, watched: _Watched, core: int, now: float) -> None:
        watched.before = self.look(core)
        watched.before_at = now
        ask_for_stacks(self.directory, watched.before.computing)

    def _works(self, before: Activity, after: Activity, seconds: float) -> bool:
        if after.stopped:
            return False
        enough = BUSY_SHARE * seconds
        used = {pid: cpu - before.computing.get(pid, 0.0) for pid, cpu in after.computing.items()}
        if self.computes_on_cpu and used and min(used.values()) >= enough:
            return True
        if after.helpers - before.helpers >= enough:
            return True
        stacks = read_stacks(self.directory, before.computing, 0)
        return any(cpu >= enough and _COMPILING.search(stacks.get(pid, "")) for pid, cpu in used.items())


def activity(core: int) -> Activity:
    """Measure the processes of an engine, from its core's process id."""
    family = engine_processes(core)
    computing, others = family[1:] or family[:1], []
    with contextlib.suppress(psutil.Error):
        others = [p for p in psutil.Process(core).children(recursive=True) if p not in family]
    helpers = sum(_cpu_seconds(process) for process in others) + sum(_ended_cpu_seconds(p) for p in family)
    return Activity(
        computing={process.pid: _cpu_seconds(process) for process in computing},
        helpers=helpers,
        stopped=any(_is_stopped(process) for process in family),
    )


def engine_processes(core: int) -> list[psutil.Process]:
    """The engine core and then its workers, which vLLM names so; empty once it is gone."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(core)
        return [process, *(child for child in process.children(recursive=True) if _is_worker(child))]
    return []


def stacks_of(directory: Path, pids: Sequence[int]) -> dict[int, str]:
    """The Python stacks of processes, now. Blocks for `STACKS_SECONDS` where one does not answer."""
    ask_for_stacks(directory, pids)
    return read_stacks(directory, pids, STACKS_SECONDS)


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "::Worker" in "".join(process.cmdline()[:1])
    return False


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _cpu_seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _ended_cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process's children that have ended."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.children_user + times.children_system)
    return 0.0
