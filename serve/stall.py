"""Tells an engine that hangs from one that is busy.

An engine has stalled when it has requests and for `seconds` completed no step, while nothing that a long step does was
seen at the end of that time. What acquits it, looked for again every few seconds:

- where the model computes on the CPU: every process that computes used the CPU. A step that takes long does;
- anywhere: a compiler at work, in a process that the engine started and that used the CPU, or in the Python stacks of
  an engine process that did;
- anywhere: an adapter that is loaded, in the Python stacks of an engine process. It may come over a network, so no CPU
  is asked for. Requests wait for it, and a load of the model itself is not judged either.

Engines whose experts are spread over their ranks step together, so one that compiles holds up all: an engine that works
acquits the others, unless it has gone on without them. Nothing acquits an engine with a stopped process.

A GPU's worker that waits may use the CPU as much as one that works, so that proves nothing there; chunked prefill
bounds a step at `max_num_batched_tokens`, far below a minute's work. Time in which this server itself did not run is
not counted against the engine. What processes on other hosts do is not seen.
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
LEAD_STEPS = 8
"""Engines that step together are never so many steps apart, with several batches under way."""
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
_LOADING = re.compile(r'File "[^"]*/vllm/lora/worker_manager\.py", line \d+ in _load_adapter')
"""The frame of a LoRA adapter's load (`LRUCacheWorkerLoRAManager`), its download included."""


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
        seconds: How long it had requests and completed no step, all acquittals included.
    """

    progress: Progress
    seconds: float


@dataclass
class _Watched:
    """One engine since its last step.

    Attributes:
        steps: Its steps so far.
        seconds: How long it had requests since then.
        counted: How much of that counts against it: an acquittal takes some back.
        others: Steps of every engine once it had requests, to tell which went on without it.
    """

    steps: int = -1
    seconds: float = 0.0
    counted: float = 0.0
    others: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Look:
    """What every engine here had done when a look at them began."""

    at: float
    activities: dict[int, Activity]


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
    _before: _Look | None = field(default=None, init=False)
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
            self._count(progress, engines, passed)
        # A round early rather than a round late.
        deadline = self.seconds - self.round_seconds
        suspected = deadline - min(LOOK_SECONDS, self.seconds / 2)
        if not self._counted(engines, suspected):
            self._before = None
            return None
        if self._before is None:
            self._begin_to_look(now, engines)
            return None
        overdue = self._counted(engines, deadline)
        if not overdue:
            return None
        stall = self._judge(self._before, now, overdue, engines)
        if stall is None:
            for watched in self._engines.values():
                watched.counted = min(watched.counted, suspected)
            self._begin_to_look(now, engines)
        return stall

    def _count(self, progress: Progress, engines: Sequence[Progress], passed: float) -> None:
        watched = self._engines.setdefault(progress.engine, _Watched())
        if progress.requests == 0 or progress.steps != watched.steps:
            self._engines[progress.engine] = _Watched(progress.steps)
            return
        watched.seconds += passed
        watched.counted += passed
        # Not a round earlier: others may have gone on before it had a request.
        if not watched.others:
            watched.others = {other.engine: other.steps for other in engines}

    def _counted(self, engines: Sequence[Progress], seconds: float) -> list[Progress]:
        return [progress for progress in engines if self._engines[progress.engine].counted >= seconds]

    def _begin_to_look(self, now: float, engines: Sequence[Progress]) -> None:
        self._before = _Look(now, self._activities(engines))
        ask_for_stacks(self.directory, [pid for seen in self._before.activities.values() for pid in seen.computing])

    def _activities(self, engines: Sequence[Progress]) -> dict[int, Activity]:
        return {progress.engine: self.look(progress.core) for progress in engines if progress.core is not None}

    def _judge(
        self, before: _Look, now: float, overdue: Sequence[Progress], engines: Sequence[Progress]
    ) -> Stall | None:
        after = self._activities(engines)
        working = [
            progress
            for progress in engines
            if progress.engine in before.activities
            and progress.engine in after
            and self._works(before.activities[progress.engine], after[progress.engine], now - before.at)
        ]
        for progress in overdue:
            watched = self._engines[progress.engine]
            is_stopped = progress.engine in after and after[progress.engine].stopped
            if is_stopped or not any(_may_hold_up(watched, other) for other in working):
                return Stall(progress, watched.seconds)
        return None

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
        if any(_LOADING.search(text) for text in stacks.values()):
            return True
        return any(cpu >= enough and _COMPILING.search(stacks.get(pid, "")) for pid, cpu in used.items())


def _may_hold_up(watched: _Watched, other: Progress) -> bool:
    """Whether an engine may be what another waits for, or is that engine itself."""
    return other.steps - watched.others.get(other.engine, other.steps) < LEAD_STEPS


def activity(core: int) -> Activity:
    """Measure the processes of an engine, from its core's process id."""
    family = engine_processes(core)
    computing, others = family[1:] or family[:1], []
    with contextlib.suppress(psutil.Error):
        others = [p for p in psutil.Process(core).children(recursive=True) if p not in family]
    # A process that ends leaves its seconds to its parent, which may be a build tool that still runs.
    helpers = sum(_cpu_seconds(p) for p in others) + sum(_ended_cpu_seconds(p) for p in [*family, *others])
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
