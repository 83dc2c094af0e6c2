"""Which engines are taken for stalled: the rule over a made-up clock, and real processes measured."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from patches.stacks import stacks_file
from serve.engine import Engine as VllmEngine
from serve.stall import Activity, Progress, Stall, StallWatch, activity, engine_processes, stacks_of

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


LOADING = '  File "/site/vllm/lora/worker_manager.py", line 106 in _load_adapter\n'


def test_an_adapter_that_is_loaded_is_no_stall_though_it_may_wait_for_a_network(
    on_gpu: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.stall.ask_for_stacks", lambda _directory, _pids: None)
    stacks_file(tmp_path, 78).write_text(LOADING)
    assert on_gpu.run(1000) is None
    stacks_file(tmp_path, 78).write_text("")
    assert on_gpu.run(100) is not None


def test_vllm_loads_adapters_there() -> None:
    (vllm,) = find_spec("vllm").submodule_search_locations
    path, _, function = re.fullmatch(r'.* File "/site/vllm/(.*)", line (\d+) in (.*)\n', LOADING).groups()
    assert f"    def {function}(" in Path(vllm, path).read_text()


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


class Engines:
    """Data-parallel engines of one server, of which engine 0 completes no step."""

    def __init__(self, directory: Path, *, on_cpu: bool = False, cores: tuple[int | None, ...] = (70, 71)) -> None:
        self.now = 1000.0
        self.cores = cores
        self.steps = [5] * len(cores)
        self.requests = [1, *[0] * (len(cores) - 1)]
        self.compiling: set[int] = set()
        self.computing: set[int] = set()
        self.stopped: set[int] = set()
        self.helpers = dict.fromkeys(range(len(cores)), 0.0)
        self.workers = dict.fromkeys(range(len(cores)), 0.0)
        self.watch = StallWatch(LIMIT, on_cpu, directory, 1.0, look=self.look)

    def look(self, core: int) -> Activity:
        i = self.cores.index(core)
        return Activity({1000 + core: self.workers[i]}, self.helpers[i], i in self.stopped)

    def run(self, seconds: int, each: Callable[[], None] = lambda: None) -> Stall | None:
        for _ in range(seconds):
            each()
            engines = [Progress(i, self.steps[i], 1, 0, self.requests[i], core) for i, core in enumerate(self.cores)]
            if (stall := self.watch.observe(self.now, engines)) is not None:
                return stall
            self.now += 1.0
            for i in self.compiling:
                self.helpers[i] += 0.8
            for i in self.computing:
                self.workers[i] += 0.8
        return None

    def step_others(self) -> None:
        self.steps[1:] = [steps + 1 for steps in self.steps[1:]]


@pytest.mark.parametrize("requests", [0, 1])
@pytest.mark.parametrize("cores", [(70, 71), (70, 71, None), (None, 71)], ids=["local", "one-remote", "judged-remote"])
def test_an_engine_that_waits_for_another_ones_compiler_is_no_stall(
    tmp_path: Path, cores: tuple[int | None, ...], requests: int
) -> None:
    """Also while that engine has no request and only keeps step."""
    engines = Engines(tmp_path, cores=cores)
    engines.requests[1] = requests
    engines.compiling = {1}
    assert engines.run(600) is None
    engines.compiling = set()
    stall = engines.run(30)
    assert stall is not None
    assert stall.progress.engine == 0


def test_an_engine_that_ends_one_compile_and_begins_the_next_may_still_hold_up_the_other(tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    engines.requests[1], engines.compiling = 1, {1}
    assert engines.run(55) is None
    engines.step_others()
    assert engines.run(300) is None


@pytest.mark.parametrize("work", ["compiling", "computing"])
def test_an_engine_that_goes_on_without_the_other_does_not_acquit_it(tmp_path: Path, work: str) -> None:
    engines = Engines(tmp_path, on_cpu=True)
    engines.requests[1] = 1
    setattr(engines, work, {1})
    stall = engines.run(100, engines.step_others)
    assert stall is not None
    assert stall.progress.engine == 0
    assert 50 < stall.seconds <= LIMIT


def test_steps_of_others_before_the_first_request_are_no_lead(tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    engines.requests = [0, 1]
    assert engines.run(60, engines.step_others) is None
    engines.requests = [1, 1]
    engines.steps[1] += 100  # within the round in which the request came
    engines.compiling = {1}
    assert engines.run(300) is None


def test_nothing_acquits_an_engine_with_a_stopped_process(tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    engines.compiling, engines.stopped = {1}, {0}
    stall = engines.run(100)
    assert stall is not None
    assert 50 < stall.seconds <= LIMIT


def test_a_stall_after_acquittals_tells_the_whole_time_without_a_step(tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    began = engines.now
    engines.compiling = {0}
    assert engines.run(600) is None
    engines.compiling = set()
    stall = engines.run(30)
    assert stall is not None
    assert stall.seconds == engines.now - began
    assert stall.seconds > 600


@pytest.mark.parametrize(
    ("local", "cores"), [(0, [None, None, None]), (1, [70, None, None]), (2, [70, 71, None]), (3, [70, 71, 72])]
)
def test_engines_of_this_host_have_a_core_and_those_elsewhere_have_none(local: int, cores: list[int | None]) -> None:
    """vLLM starts the lowest ranks that it manages on this host, in order; without any it has no manager."""
    manager = SimpleNamespace(processes=[SimpleNamespace(pid=70 + i) for i in range(local)]) if local else None
    core_client = SimpleNamespace(
        resources=SimpleNamespace(engine_manager=manager),
        engine_ranks_managed=[4, 5, 6],
        core_engines=[b"4", b"5", b"6"],
    )
    client = SimpleNamespace(engine_core=core_client, output_processor=SimpleNamespace(request_states={}))
    progress = VllmEngine(client, None, {}).progress()
    assert [at.engine for at in progress] == [4, 5, 6]
    assert [at.core for at in progress] == cores


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


def test_cpu_seconds_of_a_compiler_that_ended_stay_while_the_build_tool_lives() -> None:
    """As ninja, nvcc and cicc do: the engine core starts a shell, which starts a process that burns and ends."""
    build = f"{sys.executable} -c '{BUSY}'; sleep 60"
    with subprocess.Popen(["bash", "-c", f'bash -c "{build}" & wait'], start_new_session=True) as core:
        process = psutil.Process(core.pid)
        try:
            deadline = time.monotonic() + 30
            while activity(core.pid).helpers < 0.5 and time.monotonic() < deadline:
                time.sleep(0.05)
            (shell,) = process.children()
            (compiler,) = shell.children()
            before = activity(core.pid).helpers
            assert before >= 0.5
            compiler.kill()
            while compiler.is_running() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not compiler.is_running()
            assert shell.is_running()
            assert activity(core.pid).helpers >= before
        finally:
            for member in [*process.children(recursive=True), process]:
                member.kill()


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
