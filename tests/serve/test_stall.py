"""Which engines are taken for stalled: the rule over a made-up clock, and real processes measured."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from patches.stacks import stacks_file
from serve.stall import Activity, Progress, StallWatch, activity, engine_processes, stacks_of

CORE = 77
LIMIT = 60.0


class Engine:
    """One engine as the watch sees it, on a clock that the test turns."""

    def __init__(self, directory: Path, *, on_cpu: bool) -> None:
        self.now = 1000.0
        self.steps = 5
        self.requests = 3
        self.core: int | None = CORE
        self.busy: dict[int, float] = {78: 0.0, 79: 0.0}
        self.helpers = 0.0
        self.stopped = False
        self.began = self.now
        self.watch = StallWatch(LIMIT, on_cpu, directory, 1.0, look=self.look)

    def look(self, core: int) -> Activity:
        assert core == CORE
        passed = self.now - self.began
        return Activity({pid: share * passed for pid, share in self.busy.items()}, self.helpers * passed, self.stopped)

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> float | None:
        """Seconds until the verdict, or None."""
        start = self.now
        while self.now - start < seconds:
            each()
            if self.watch.observe(self.now, [self.progress()]) is not None:
                return self.now - start
            self.now += 1.0
        return None

    def progress(self) -> Progress:
        return Progress(0, self.steps, running=3, waiting=0, requests=self.requests, core=self.core)

    def step(self) -> None:
        self.steps += 1


@pytest.fixture
def on_gpu(tmp_path: Path) -> Engine:
    return Engine(tmp_path, on_cpu=False)


@pytest.fixture
def on_cpu(tmp_path: Path) -> Engine:
    return Engine(tmp_path, on_cpu=True)


@pytest.mark.parametrize("kind", ["on_gpu", "on_cpu"])
def test_a_hang_is_noticed_within_the_limit(kind: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue(kind)
    assert 50 < (engine.run(300) or 0) <= LIMIT


def test_an_idle_engine_never_stalls(on_gpu: Engine) -> None:
    on_gpu.requests = 0
    assert on_gpu.run(600) is None


def test_the_time_before_the_first_request_does_not_count(on_gpu: Engine) -> None:
    on_gpu.requests = 0
    on_gpu.run(600)
    on_gpu.requests = 1
    assert 50 < (on_gpu.run(300) or 0) <= LIMIT


def test_one_step_in_fifty_seconds_is_progress(on_gpu: Engine) -> None:
    def sometimes() -> None:
        if int(on_gpu.now) % 50 == 0:
            on_gpu.step()

    assert on_gpu.run(1000, sometimes) is None


def test_a_long_step_on_the_cpu_is_no_stall_while_every_process_computes(on_cpu: Engine) -> None:
    on_cpu.busy = {78: 0.9, 79: 0.2}
    assert on_cpu.run(1000) is None
    on_cpu.busy = {78: 0.9, 79: 0.0}  # the other rank waits for one that does nothing
    assert on_cpu.run(100) is not None


def test_a_gpus_worker_that_spins_proves_nothing(on_gpu: Engine) -> None:
    on_gpu.busy = {78: 1.0, 79: 1.0}
    assert 50 < (on_gpu.run(300) or 0) <= LIMIT


@pytest.mark.parametrize("kind", ["on_gpu", "on_cpu"])
def test_a_compiler_that_the_engine_started_is_no_stall(kind: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue(kind)
    engine.helpers = 0.8
    assert engine.run(1000) is None
    engine.helpers = 0.0
    assert engine.run(100) is not None


COMPILING = {
    "triton": '  File "/site/triton/compiler/compiler.py", line 300 in make_llir\n',
    "inductor": '  File "/site/torch/_inductor/codecache.py", line 9 in load\n',
    "dynamo": '  File "/site/torch/_dynamo/convert_frame.py", line 9 in compile_inner\n',
    "aiter": '  File "/site/aiter/jit/core.py", line 9 in build_module\n',
}
LAUNCHING = {
    "triton": '  File "/site/triton/compiler/compiler.py", line 480 in _init_handles\n',
    "inductor": '  File "/site/torch/_inductor/output_code.py", line 9 in __call__\n',
    "dynamo": '  File "/site/torch/_dynamo/eval_frame.py", line 9 in compile_wrapper\n',
    "ours": '  File "/site/patches/compiler.py", line 9 in compile\n',
}


@pytest.mark.parametrize("stacks", COMPILING.values(), ids=COMPILING)
def test_a_compiler_in_the_stacks_is_no_stall_while_it_uses_the_cpu(
    on_gpu: Engine, tmp_path: Path, stacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.stall.ask_for_stacks", lambda _directory, _pids: None)
    stacks_file(tmp_path, 78).write_text("Current thread 0x1:\n" + stacks)
    on_gpu.busy = {78: 1.0, 79: 0.0}
    assert on_gpu.run(1000) is None
    on_gpu.busy = {78: 0.0, 79: 1.0}
    assert on_gpu.run(100) is not None


@pytest.mark.parametrize("stacks", LAUNCHING.values(), ids=LAUNCHING)
def test_launching_what_is_compiled_is_no_compiler(
    on_gpu: Engine, tmp_path: Path, stacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.stall.ask_for_stacks", lambda _directory, _pids: None)
    stacks_file(tmp_path, 78).write_text(stacks)
    on_gpu.busy = {78: 1.0, 79: 1.0}
    assert on_gpu.run(300) is not None


def test_a_stopped_process_acquits_nothing(on_cpu: Engine) -> None:
    on_cpu.busy, on_cpu.helpers, on_cpu.stopped = {78: 1.0}, 1.0, True
    assert 50 < (on_cpu.run(300) or 0) <= LIMIT


def test_time_in_which_the_server_did_not_run_does_not_count(on_gpu: Engine) -> None:
    """A server that was stopped for an hour wakes before it has read the steps of that hour."""

    def held_up() -> None:
        on_gpu.now += 3600.0

    on_gpu.run(5)
    held_up()
    assert on_gpu.run(5) is None
    on_gpu.step()
    assert 50 < (on_gpu.run(300) or 0) <= LIMIT


def test_an_engine_elsewhere_is_judged_by_its_steps(on_gpu: Engine) -> None:
    on_gpu.core = None
    assert 50 < (on_gpu.run(300) or 0) <= LIMIT


def test_the_one_engine_of_several_that_hangs_is_named(tmp_path: Path) -> None:
    hanging, well = Engine(tmp_path, on_cpu=False), Engine(tmp_path, on_cpu=False)
    for _ in range(100):
        well.step()
        hanging.now += 1.0
        engines = [well.progress(), Progress(1, 9, 2, 1, 3, CORE)]
        if (stall := hanging.watch.observe(hanging.now, engines)) is not None:
            assert stall.progress.engine == 1
            return
    pytest.fail("no verdict")


BUSY = "while True: pass"


@pytest.fixture
def core(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child called as vLLM calls its workers, which computes, and a helper, which does too."""
    worker = f"exec -a VLLM::Worker {sys.executable} -c '{BUSY}'"
    script = f"(bash -c \"{worker}\" & {sys.executable} -c '{BUSY}' & wait)"
    with subprocess.Popen(["bash", "-c", script], start_new_session=True) as process:
        yield process
        for member in [*psutil.Process(process.pid).children(recursive=True), process]:
            member.kill()


def test_real_processes_are_told_apart_and_measured(core: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while len(engine_processes(core.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    worker = engine_processes(core.pid)[1]
    before = activity(core.pid)
    while time.monotonic() < deadline:
        after = activity(core.pid)
        if after.computing[worker.pid] > before.computing[worker.pid] and after.helpers > before.helpers:
            break
        time.sleep(0.1)
    assert list(after.computing) == [worker.pid]
    assert after.computing[worker.pid] > before.computing[worker.pid]
    assert after.helpers > before.helpers
    assert not after.stopped
    worker.send_signal(signal.SIGSTOP)
    while not activity(core.pid).stopped and time.monotonic() < deadline:
        time.sleep(0.05)
    assert activity(core.pid).stopped


def test_a_process_that_is_gone_has_done_nothing() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert engine_processes(process.pid) == []
    assert activity(process.pid) == Activity({}, 0.0, False)


def test_a_process_in_a_loop_tells_where_and_a_stopped_one_is_not_waited_for(tmp_path: Path) -> None:
    code = (
        "from patches.stacks import answer_with_stacks\nanswer_with_stacks()\ndef lost():\n  while True: pass\nlost()"
    )
    environment = {"DSPARK_TELEMETRY_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
        try:
            deadline = time.monotonic() + 30
            while not stacks_file(tmp_path, process.pid).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.3)
            assert "in lost" in stacks_of(tmp_path, [process.pid])[process.pid]
            assert "in lost" in stacks_of(tmp_path, [process.pid])[process.pid]
            process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            assert stacks_of(tmp_path, [process.pid])[process.pid] == ""
            assert time.monotonic() - began < 10
        finally:
            process.kill()


def test_a_process_without_our_handler_is_never_signalled(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert stacks_of(tmp_path, [process.pid]) == {process.pid: ""}
            assert process.poll() is None
        finally:
            process.kill()
