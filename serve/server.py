"""One server from start to end: listen at once, start the engine behind, serve, drain, stop.

Read `Service.run` top to bottom.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvicorn
import uvloop
from prometheus_client import REGISTRY

from patches.telemetry.counters import read_all
from serve.access import Access
from serve.activity import activity_line
from serve.app import Gateway, build_own_app
from serve.connection import BoundedConnection
from serve.engine import (
    DeathBell,
    Engine,
    EngineStartError,
    HeadlessEngine,
    one_line,
    start_engine,
    start_headless,
)
from serve.errors import ExitCode, InputError
from serve.exchange import CLOSE, RETRY, Ending, Exchanges
from serve.history import EVERY_SECONDS, History
from serve.lifecycle import Lifecycle, State
from serve.limits import Limits
from serve.metrics import Combined, Identity, RecentAcceptance, ServerCollector, VerificationCollector
from serve.modes import ModeSwitch
from serve.preflight.report import Report
from serve.stall import Stall, StallWatch, engine_processes, stacks_of
from serve.status import effective_configuration, patch_rows, verification_counts, version_facts
from serve.totals import totals

logger = logging.getLogger("dspark-serve")

T = TypeVar("T")

WATCH_SECONDS = 1.0
NOTE_EVERY = 5
"""Acceptance totals are noted every so many watch rounds."""
LOG_EVERY = 10
"""While busy, what was verified is logged every so many watch rounds."""
HISTORY_EVERY = round(EVERY_SECONDS / WATCH_SECONDS)
"""A point of the history is noted every so many."""
ENGINE_END_SECONDS = 15
"""What vLLM gets to end its own processes in, before they are ended for it."""
CLOSE_SECONDS = 5
"""What connections get to end in, once nothing is under way any more."""
TELL_SECONDS = 4.0
"""What requests that are ended get to end in, their clients told."""
HURRY_SECONDS = 0.5
"""What they get when a second signal asks for haste."""
FAILED_SECONDS = 1.0
"""How long `/livez` says that the engine is not running before the process ends."""
STOPPING = Ending(
    503, "service_unavailable", "the server is stopping and the request was not done in time", (RETRY, CLOSE)
)


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
        keys: What clients must send one of; empty for no key.
        metrics_key: Whether `/metrics` asks for one too.
        limits: What clients may cost.
        stall_seconds: How long an engine may have requests and complete no step.
        drain_seconds: What requests under way get to finish in.
        access_log: Whether each request is logged.
        headless: Run this node's ranks for the server of another node.
    """

    profile_name: str
    command_line: list[str]
    sock: socket.socket
    url: str
    identity: Identity
    preflight: Report
    counter_directory: Path
    keys: list[str] = field(repr=False)
    metrics_key: bool
    limits: Limits
    stall_seconds: float
    drain_seconds: float
    access_log: bool
    headless: bool = False


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


def check_trace_file(path: str | None) -> None:
    """Refuse a trace that could not be written: the workers, which write it, could only log that.

    Raises:
        InputError: the file cannot be opened for writing.
    """
    if not path:
        return
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise InputError(
            f"no trace can be written to {path}: {error.strerror}; set DSPARK_TRACE_FILE to a file in a folder that "
            "exists and can be written, or unset it"
        ) from error


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: ours are in force from before it starts until after it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers alone."""
        yield

    def stop_now(self) -> None:
        """Drop what is still open."""
        self.force_exit = self.should_exit = True


class Service:
    """The parts of a running server and the order they live and end in."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lifecycle = Lifecycle()
        self.engine: Engine | HeadlessEngine | None = None
        self.recent = RecentAcceptance()
        self.history = History()
        self.modes = ModeSwitch(self.lifecycle, settings.identity.verification, told=not settings.headless)
        metrics = Combined(
            REGISTRY,
            ServerCollector(self.lifecycle, settings.identity, self.modes),
            VerificationCollector(settings.counter_directory, self._model_name),
        )
        version = version_facts(settings.identity)
        own_app = build_own_app(self.lifecycle, metrics, self.status, version, self.modes)
        self.exchanges = Exchanges(settings.limits)
        access = Access(settings.keys, metrics_need_one=settings.metrics_key)
        self.gateway = Gateway(self.lifecycle, access, self.exchanges, own_app)
        self._drain_asked = asyncio.Event()
        self._given_up = asyncio.Event()
        self._stall_watch: StallWatch | None = None
        self._hurry = asyncio.Event()

    async def run(self) -> ExitCode:
        """Serve until asked to stop or until the engine is dead; returns the process's exit code."""
        config = uvicorn.Config(
            self.gateway,
            log_level="info" if self.settings.access_log else "warning",
            access_log=self.settings.access_log,
            lifespan="off",
            http=BoundedConnection,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        server = Server(config)
        self._handle_signals(server)
        background = [asyncio.create_task(part) for part in self._parts(server)]
        for task in background:
            task.add_done_callback(self._note_fault)
        try:
            await server.serve(sockets=[self.settings.sock])
            self._notice_death()
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

    def _parts(self, server: Server) -> list[Coroutine[Any, Any, None]]:
        """What goes on beside the HTTP server."""
        return [self._start(), self._watch(), self._drain(server), self._finish_failed(server)]

    def status(self) -> dict[str, Any]:
        """The body of `/dspark/status` beside the state."""
        identity = self.settings.identity
        body: dict[str, Any] = {
            "profile": self.settings.profile_name,
            "mode": self.modes.as_json(),
            "calibration": identity.calibration.value,
            "version": identity.version,
            "vllm_version": identity.patches.release,
            "hardware": identity.patches.hardware,
            "patches": patch_rows(identity.patches),
            "last_minute": self.recent.summary(),
            "history": self.history.as_json(asyncio.get_running_loop().time()),
            **verification_counts(list(read_all(self.settings.counter_directory))),
            "requests_under_way": self.exchanges.under_way,
            "preflight": self.settings.preflight.as_json(),
        }
        if self.engine is not None:
            body["models"] = self.engine.model_names
            body["engine"] = effective_configuration(self.engine.config)
        return body

    def _handle_signals(self, server: Server) -> None:
        """The first SIGTERM or SIGINT drains, any further one stops at once; none ends the process by itself."""

        def handle(which: signal.Signals) -> None:
            if self._drain_asked.is_set():
                logger.warning("%s again: stopping now", which.name)
                self._hurry.set()
                self.exchanges.end(STOPPING)
                asyncio.get_running_loop().call_later(HURRY_SECONDS, server.stop_now)
            else:
                logger.info("%s: draining", which.name)
                self._drain_asked.set()

        for which in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(which, handle, which)

    def _note_fault(self, task: asyncio.Task[None]) -> None:
        """A part of the service that ended by a fault of its own takes the server with it, seen."""
        if not task.cancelled() and (fault := task.exception()) is not None:
            logger.error("a part of the server failed", exc_info=fault)
            self._give_up(f"the server failed: {one_line(fault)}", ExitCode.START_FAILED)

    async def _start(self) -> None:
        try:
            start = start_headless if self.settings.headless else start_engine
            self.engine = await self._in_thread(lambda: start(self.settings.command_line, self.lifecycle.begin))
            engine = self.engine
            await engine.open(DeathBell(self._notice_death), self.settings.identity.patches.digest)
            if isinstance(engine, Engine):
                await self.modes.attach(engine.client)
        except InputError as error:
            self._give_up(str(error), ExitCode.BAD_INPUT)
        except EngineStartError as error:
            self._give_up(f"the engine did not start: {error}", ExitCode.START_FAILED)
        else:
            self.gateway.inner = engine.app
            self.lifecycle.ready()
            if self.lifecycle.state is State.READY:
                self._announce(engine)

    async def _watch(self) -> None:
        """Notice an engine that died or stalled, note acceptance totals, and log what was verified."""
        rounds, counters = 0, self.settings.counter_directory
        logged = totals((), asyncio.get_running_loop().time())
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = asyncio.get_running_loop().time()
            self._notice_death()
            await self._notice_stall(now)
            if rounds % NOTE_EVERY == 0:  # the other periods are multiples of this one
                noted = totals(read_all(counters), now)
                self.recent.note(noted)
                if rounds % HISTORY_EVERY == 0:
                    self.history.note(noted, self.modes.current)
                if rounds % LOG_EVERY == 0:
                    before, logged = logged, noted
                    if (line := activity_line(before, logged)) is not None:
                        logger.info("%s", line)
            rounds += 1

    def _notice_death(self) -> None:
        if self.engine is None or (death := self.engine.death) is None:
            return
        if self.lifecycle.state is State.FAILED:
            return  # its consequence: a stall's record may still be being written, and ends the server when it is
        if self.settings.headless and self.lifecycle.state is State.DRAINING:
            return  # the other node's server has ended its ranks, which this drain waited for
        starting = self.lifecycle.state is State.STARTING
        code = ExitCode.START_FAILED if starting else ExitCode.ENGINE_DIED
        self._give_up(f"the engine died{' while it was started' if starting else ''}: {death}", code)

    async def _notice_stall(self, now: float) -> None:
        if not isinstance(self.engine, Engine) or self.lifecycle.state not in (State.READY, State.DRAINING):
            return
        if self._stall_watch is None:
            self._stall_watch = StallWatch(
                seconds=self.settings.stall_seconds,
                computes_on_cpu=self.engine.computes_on_cpu,
                directory=self.settings.counter_directory,
                round_seconds=WATCH_SECONDS,
            )
        stall = self._stall_watch.observe(now, self.engine.progress())
        if stall is None:
            return
        at = stall.progress
        reason = f"engine {at.engine} stalled: no step for {stall.seconds:.0f} s with {at.requests} requests"
        self._fail(reason, ExitCode.ENGINE_STALLED)
        logger.error("stall: %s", json.dumps(await asyncio.to_thread(self._stall_record, stall)))
        self._given_up.set()

    def _stall_record(self, stall: Stall) -> dict[str, Any]:
        """All that is known of a stall. Blocks until the stacks are there."""
        at = stall.progress
        processes = [] if at.core is None else engine_processes(at.core)
        names = {process.pid: "worker" for process in processes} | {at.core: "engine core", os.getpid(): "server"}
        stacks = stacks_of(self.settings.counter_directory, [os.getpid(), *(process.pid for process in processes)])
        counters = {snapshot.engine: snapshot for snapshot in read_all(self.settings.counter_directory)}
        return {
            "engine": at.engine,
            "seconds_without_a_step": round(stall.seconds, 1),
            "last_step": at.steps,
            "running": at.running,
            "waiting": at.waiting,
            "requests": at.requests,
            "mode": self.modes.current,
            "last_budgets": counters[at.engine].last_budgets if at.engine in counters else None,
            "stacks": [
                {"process": names[pid], "pid": pid, "stacks": text or "no answer: the process may be stopped"}
                for pid, text in stacks.items()
            ],
        }

    async def _drain(self, server: Server) -> None:
        """Once asked: take no new requests, let those under way finish in time, then end the server.

        A headless node knows of no request, so it keeps its ranks for as long as the other node's may be under way.
        """
        await self._drain_asked.wait()
        self.lifecycle.drain()
        self.exchanges.end(STOPPING, only_arriving=True)
        deadline = asyncio.get_running_loop().time() + self.settings.drain_seconds
        while (self.exchanges.under_way or self._keeps_ranks) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        if self.exchanges.under_way:
            logger.warning("%d requests were not done in time and were told so", self.exchanges.under_way)
            self.exchanges.end(STOPPING)
            await self.exchanges.ended(TELL_SECONDS)
        if self.lifecycle.state is not State.FAILED:  # a failed one has things to say before it ends
            server.should_exit = True

    @property
    def _keeps_ranks(self) -> bool:
        """Whether this is a headless node whose ranks still run."""
        return isinstance(self.engine, HeadlessEngine) and self.engine.death is None

    def _give_up(self, reason: str, exit_code: ExitCode) -> None:
        self._fail(reason, exit_code)
        self._given_up.set()

    def _fail(self, reason: str, exit_code: ExitCode) -> None:
        self.lifecycle.fail(reason, exit_code)
        self.exchanges.end(Ending(500, "server_error", f"the engine is not running: {reason}", (CLOSE,)))

    async def _finish_failed(self, server: Server) -> None:
        """Once the engine is given up: let clients be told, then end the server."""
        await self._given_up.wait()
        await asyncio.sleep(FAILED_SECONDS)
        await self.exchanges.ended(TELL_SECONDS)
        server.should_exit = True

    async def _end_engine(self) -> None:
        """End the engine's processes, whatever state they are in."""
        if self.engine is not None and not self._hurry.is_set():
            for part in (self.engine.close(), self._in_thread(self.engine.shutdown)):
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(part, ENGINE_END_SECONDS)
        # Whatever is left: a start that was cut short may still be launching processes.
        while children := psutil.Process().children(recursive=True):
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.terminate()
            _, alive = await asyncio.to_thread(psutil.wait_procs, children, 0 if self._hurry.is_set() else 3)
            for child in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            await asyncio.to_thread(psutil.wait_procs, alive, 3)

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

    def _model_name(self) -> str | None:
        return None if self.engine is None else self.engine.model_names[0]

    def _announce(self, engine: Engine | HeadlessEngine) -> None:
        if self.settings.headless:
            logger.info("this node's ranks run; the server of node 0 tells when the model answers")
            return
        model, url = engine.model_names[0], self.settings.url
        body = json.dumps({"model": model, "prompt": "def fibonacci(n):", "max_tokens": 64}, ensure_ascii=False)
        key = '-H "Authorization: Bearer $DSPARK_API_KEY" ' if self.settings.keys else ""
        text = (
            f"\ndspark-serve is ready: {model} at {url} ({self.settings.identity.verification.value} verification)\n\n"
            f"  curl {url}/v1/completions {key}-H 'Content-Type: application/json' \\\n"
            f"    -d {shlex.quote(body)}\n\n"
            + ("  DSPARK_API_KEY stands for one of the server's keys\n\n" if key else "")
            + f"  metrics {url}/metrics   status {url}/dspark/\n"
        )
        with contextlib.suppress(OSError):  # a full disk, or a reader that has left, is no reason to stop
            print(text, flush=True)


def run(settings: Settings) -> ExitCode:
    """Run a server in a new event loop; returns its exit code."""

    async def serve() -> ExitCode:
        return await Service(settings).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())
