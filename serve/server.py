"""One server from start to end: listen at once, start the engine behind, serve, drain, stop.

Read `Service.run` top to bottom.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil
import uvicorn
import uvloop
from prometheus_client import REGISTRY

from serve.app import Gateway, build_own_app
from serve.engine import Engine, EngineStartError, start_engine
from serve.errors import ExitCode, InputError
from serve.lifecycle import Lifecycle, State
from serve.metrics import Combined, Identity, RecentAcceptance, ServerCollector, VerificationCollector, totals
from serve.preflight.report import Report
from serve.status import effective_configuration, patch_rows

logger = logging.getLogger("dspark-serve")

T = TypeVar("T")

WATCH_SECONDS = 1.0
NOTE_EVERY = 5
"""Acceptance totals are noted every so many watch rounds."""
CLOSE_SECONDS = 5
"""What connections get to end in, once nothing is under way any more."""


@dataclass(frozen=True)
class Settings:
    """What one server was asked to do.

    Attributes:
        profile_name: For the status.
        command_line: The arguments of `vllm serve`.
        sock: The bound socket to listen on.
        url: What to print.
        identity: Versions, hardware, patches, mode.
        preflight: What preflight found.
        counter_directory: Where workers write counters.
        drain_seconds: What requests under way get to finish in.
        access_log: Whether each request is logged.
    """

    profile_name: str
    command_line: list[str]
    sock: socket.socket
    url: str
    identity: Identity
    preflight: Report
    counter_directory: Path
    drain_seconds: float
    access_log: bool


def make_counter_directory(base: str | None) -> Path:
    """A new, empty directory for counters under `base` (or the system's), removed by `Service.run` at the end.

    Raises:
        InputError: nothing can be created there.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="dspark-", dir=base))
    except OSError as error:
        raise InputError(
            f"no directory for counters can be made under {base or tempfile.gettempdir()}: {error.strerror}; "
            "set DSPARK_TELEMETRY_DIR to a writable local directory"
        ) from error


class SignalledServer(uvicorn.Server):
    """uvicorn's server, with our answer to SIGINT and SIGTERM: the first drains, the second forces the exit."""

    def __init__(self, config: uvicorn.Config, on_first: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_first = on_first
        self._asked = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called in signal context by the handlers that uvicorn installs."""
        if self._asked:
            logger.warning("%s again: stopping now", signal.Signals(sig).name)
            self.force_exit = self.should_exit = True
            return
        self._asked = True
        logger.info("%s: draining", signal.Signals(sig).name)
        self._on_first()


class Service:
    """The parts of a running server and the order they live and end in."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lifecycle = Lifecycle()
        self.engine: Engine | None = None
        self.recent = RecentAcceptance()
        metrics = Combined(
            REGISTRY,
            ServerCollector(self.lifecycle, settings.identity),
            VerificationCollector(settings.counter_directory, self._model_name),
        )
        self.gateway = Gateway(self.lifecycle, build_own_app(self.lifecycle, metrics, self.status))
        self._drain_asked = asyncio.Event()

    async def run(self) -> ExitCode:
        """Serve until asked to stop or until the engine is dead; returns the process's exit code."""
        loop = asyncio.get_running_loop()
        config = uvicorn.Config(
            self.gateway,
            log_level="info" if self.settings.access_log else "warning",
            access_log=self.settings.access_log,
            lifespan="off",
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )

        def ask_to_drain() -> None:
            loop.call_soon_threadsafe(self._drain_asked.set)

        server = SignalledServer(config, ask_to_drain)
        background = [
            asyncio.create_task(self._start(server)),
            asyncio.create_task(self._watch(server)),
            asyncio.create_task(self._drain(server)),
        ]
        try:
            await server.serve(sockets=[self.settings.sock])
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._end_engine()
            self._remove_counters()
        if self.lifecycle.state is State.FAILED:
            logger.error("exit code %d: %s", self.lifecycle.exit_code, self.lifecycle.reason)
        else:
            self.lifecycle.drain()
            self.lifecycle.stop()
            logger.info("stopped")
        return self.lifecycle.exit_code

    def status(self) -> dict[str, Any]:
        """The body of `/dspark/status` beside the state."""
        identity = self.settings.identity
        body: dict[str, Any] = {
            "profile": self.settings.profile_name,
            "verification": identity.verification.value,
            "version": identity.version,
            "vllm_version": identity.vllm_version,
            "hardware": identity.hardware,
            "patches": patch_rows(identity.patches),
            "last_minute": self.recent.summary(),
            "requests_under_way": self.gateway.in_flight,
            "preflight": self.settings.preflight.as_json(),
        }
        if self.engine is not None:
            body["models"] = self.engine.model_names
            body["engine"] = effective_configuration(self.engine.config)
        return body

    async def _start(self, server: SignalledServer) -> None:
        try:
            engine = await self._in_thread(lambda: start_engine(self.settings.command_line, self.lifecycle.begin))
            self.engine = engine
            await engine.open(server, self.settings.identity.patches.digest)
        except InputError as error:
            self._give_up(server, str(error), ExitCode.BAD_INPUT)
        except EngineStartError as error:
            self._give_up(server, f"the engine did not start: {error}", ExitCode.START_FAILED)
        except Exception as error:
            logger.exception("unexpected failure while starting")
            self._give_up(server, f"the server did not start: {error}", ExitCode.START_FAILED)
        else:
            self.gateway.inner = engine.app
            self.lifecycle.ready()
            if self.lifecycle.state is State.READY:
                self._announce(engine)

    async def _watch(self, server: SignalledServer) -> None:
        """Notice a dead engine, and note acceptance totals."""
        rounds = 0
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self.engine is not None and self.lifecycle.state in (State.READY, State.DRAINING):
                death = self.engine.death
                if death is not None:
                    self._give_up(server, f"the engine died: {death}", ExitCode.ENGINE_DIED)
            if rounds % NOTE_EVERY == 0:
                now = asyncio.get_running_loop().time()
                self.recent.note(totals(self.settings.counter_directory, now))
            rounds += 1

    async def _drain(self, server: SignalledServer) -> None:
        """Once asked: take no new requests, let those under way finish in time, then end the server."""
        await self._drain_asked.wait()
        self.lifecycle.drain()
        deadline = asyncio.get_running_loop().time() + self.settings.drain_seconds
        while self.gateway.in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        if self.gateway.in_flight:
            logger.warning("%d requests were not done in time", self.gateway.in_flight)
        server.should_exit = True

    def _give_up(self, server: SignalledServer, reason: str, exit_code: ExitCode) -> None:
        self.lifecycle.fail(reason, exit_code)
        server.should_exit = True

    async def _end_engine(self) -> None:
        """End the engine's processes, whatever state they are in."""
        if self.engine is not None:
            with contextlib.suppress(Exception):
                await self.engine.close()
            with contextlib.suppress(Exception):
                await self._in_thread(self.engine.shutdown)
        children = psutil.Process().children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 3)
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking work in a daemon thread: unlike an executor's, it cannot hold up the end of the process."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def body() -> None:
            result, failure = None, None
            try:
                result = work()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(finish, result, failure)

        threading.Thread(target=body, name="dspark-engine", daemon=True).start()
        return await done

    def _remove_counters(self) -> None:
        for path in self.settings.counter_directory.glob("*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.settings.counter_directory.rmdir()

    def _model_name(self) -> str:
        return self.engine.model_names[0] if self.engine is not None else ""

    def _announce(self, engine: Engine) -> None:
        model, url = engine.model_names[0], self.settings.url
        print(
            f"\ndspark-serve is ready: {model} at {url} ({self.settings.identity.verification.value} verification)\n\n"
            f"  curl {url}/v1/completions -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"model": "{model}", "prompt": "def fibonacci(n):", "max_tokens": 64}}\'\n\n'
            f"  metrics {url}/metrics   status {url}/dspark/status\n",
            flush=True,
        )


def run(settings: Settings) -> ExitCode:
    """Run a server in a new event loop; returns its exit code."""

    async def serve() -> ExitCode:
        return await Service(settings).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())
