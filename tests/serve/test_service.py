"""One whole server around an engine that does what no real one does on demand."""

import asyncio
import io
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import serve.server
from patches.calibration.mode import CalibrationMode
from patches.install import survey
from serve.engine import DeathBell, Engine
from serve.errors import ExitCode
from serve.lifecycle import State
from serve.limits import Limits
from serve.metrics import Identity
from serve.preflight.report import Report
from serve.profile import Verification
from serve.server import Service, Settings
from serve.stall import Progress, Stall


class Hanging(Engine):
    """An engine that completes no step, whether it has requests or none."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        super().__init__(SimpleNamespace(engine_core=SimpleNamespace(engine_ranks_managed=())), None, {})
        self.killed = False

    async def open(self, death_bell: DeathBell, patch_digest: str) -> None:
        self.bell = death_bell

    @property
    def model_names(self) -> list[str]:
        return ["hanging"]

    @property
    def computes_on_cpu(self) -> bool:
        return False

    @property
    def death(self) -> str | None:
        return "it was killed" if self.killed else None

    def progress(self) -> list[Progress]:
        return [Progress(0, 7, running=1, waiting=0, requests=self.requests, core=None)]

    def shutdown(self) -> None:
        pass

    def die(self) -> None:
        self.killed = True
        self.bell.should_exit = True


def settings(directory: Path, sock: socket.socket) -> Settings:
    patches = survey(release="0.32.0", hardware_name="cpu", vllm_root=None)
    return Settings(
        profile_name="hanging",
        command_line=[],
        sock=sock,
        url="",
        identity=Identity("1.2.3", Verification.ADAPTIVE, CalibrationMode.SHADOW, patches),
        preflight=Report("hanging", "adaptive", "cpu", "0.32.0", 0.0, (), patches),
        counter_directory=directory,
        keys=[],
        metrics_key=False,
        limits=Limits(),
        stall_seconds=0.4,
        drain_seconds=0.0,
        access_log=False,
    )


def die(engine: Hanging) -> None:
    engine.die()


def terminate(engine: Hanging) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("meanwhile", [die, terminate])
def test_a_stall_is_recorded_whatever_happens_while_its_record_is_made(
    meanwhile: Callable[[Hanging], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Hanging(requests=1)
    monkeypatch.setattr(serve.server, "start_engine", lambda *_: engine)
    monkeypatch.setattr(serve.server, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(serve.server, "FAILED_SECONDS", 0.05)
    record = Service._stall_record

    def slow_record(service: Service, stall: Stall) -> dict[str, Any]:
        loop.call_soon_threadsafe(meanwhile, engine)
        time.sleep(1)
        return record(service, stall)

    monkeypatch.setattr(Service, "_stall_record", slow_record)

    async def scenario() -> ExitCode:
        nonlocal loop
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(Service(settings(tmp_path / "counters", sock)).run(), 30)

    loop: asyncio.AbstractEventLoop
    with socket.create_server(("127.0.0.1", 0)) as sock, caplog.at_level(logging.INFO, "dspark-serve"):
        assert asyncio.run(scenario()) is ExitCode.ENGINE_STALLED
    (told,) = [line for line in caplog.messages if line.startswith("stall: ")]
    assert '"last_step": 7' in told
    assert caplog.messages[-1].startswith("exit code 4: engine 0 stalled")


def test_a_server_that_cannot_say_that_it_is_ready_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output goes to a full disk."""
    monkeypatch.setattr(serve.server, "start_engine", lambda *_: Hanging(requests=0))

    async def scenario() -> ExitCode:
        service = Service(settings(tmp_path / "counters", sock))
        ends = asyncio.create_task(service.run())
        while service.lifecycle.state is State.STARTING:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert service.lifecycle.state is State.READY
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(ends, 30)

    # Unbuffered, since closing the file would try again.
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    monkeypatch.setattr("sys.stdout", full)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert asyncio.run(scenario()) is ExitCode.OK
