"""vLLM's engine and vLLM's own FastAPI app, started inside this process.

The only module here that touches vLLM's private modules (`vllm.entrypoints.launchers`, `vllm.v1.engine`). It does
what `build_async_engine_client` and `build_and_serve` do, in two steps that never block the event loop: upstream's
client is asynchronous in name only and would freeze `/livez` for the whole load.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from starlette.types import ASGIApp

from serve.errors import InputError
from serve.handshake import WORKER_EXTENSION, PatchMismatchError, confirm_patches
from serve.lifecycle import Phase
from serve.stall import Progress


class EngineStartError(Exception):
    """The engine could not be started with a configuration that was accepted."""


def one_line(error: BaseException) -> str:
    """An exception's message without line breaks, or its name where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass
class StepLog:
    """What vLLM's statistics of one engine say, step by step.

    A custom stat logger of `AsyncLLM`: called for every step whose outcome reaches the server, with or without
    speculation, however the engine is spread over processes.

    Attributes:
        steps: Steps so far.
        running: Requests in the batch after the last one.
        waiting: Requests that waited then.
    """

    steps: int = 0
    running: int = 0
    waiting: int = 0

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        """Called by vLLM after a step."""
        if scheduler_stats is not None:
            self.steps += 1
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs

    def log_engine_initialized(self) -> None:
        """Called by vLLM once."""

    def log(self) -> None:
        """Called by vLLM every few seconds."""

    def record_sleep_state(self, *_: Any) -> None:
        """Called by vLLM when an engine sleeps or wakes."""


class DeathBell:
    """Stands where vLLM's handlers expect a uvicorn server: they set `should_exit` once they see a dead engine."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring

    @property
    def should_exit(self) -> bool:
        """Nothing is ended from here."""
        return False

    @should_exit.setter
    def should_exit(self, asked: bool) -> None:
        if asked:
            self._ring()


class Engine:
    """A running engine and the app that serves it.

    Attributes:
        client: vLLM's `AsyncLLM`.
        app: vLLM's FastAPI app, or None before `open`.
    """

    def __init__(self, client: Any, arguments: Any, step_logs: dict[int, StepLog]) -> None:
        self.client = client
        self._step_logs = step_logs
        self.app: ASGIApp | None = None
        self._arguments = arguments
        self._lifespan: contextlib.AsyncExitStack | None = None

    @property
    def config(self) -> Any:
        """vLLM's `VllmConfig`."""
        return self.client.vllm_config

    @property
    def model_names(self) -> list[str]:
        """The names that clients may ask for, the first one in metrics."""
        return served_names(self._arguments)

    @property
    def death(self) -> str | None:
        """Why the engine is dead, or None while it lives."""
        if not self.client.errored:
            return None
        return one_line(self.client.dead_error)

    @property
    def computes_on_cpu(self) -> bool:
        """Whether the model runs on the CPU."""
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())

    def progress(self) -> list[Progress]:
        """How far every engine is."""
        core_client = self.client.engine_core
        manager = core_client.resources.engine_manager
        cores = [process.pid for process in getattr(manager, "processes", ())]
        ranks = list(core_client.engine_ranks_managed)
        requests = self._requests_by_engine(ranks)
        # The engines of this host come first, in both lists (`launch_core_engines`).
        core_of = dict(zip(ranks, cores, strict=False))
        progress = []
        for rank in ranks:
            log = self._step_logs.get(rank, StepLog())
            progress.append(Progress(rank, log.steps, log.running, log.waiting, requests[rank], core_of.get(rank)))
        return progress

    def _requests_by_engine(self, ranks: list[int]) -> dict[int, int]:
        """Requests that each engine owes an answer; one whose client is still to speak is owed nothing."""
        core_client = self.client.engine_core
        assigned = getattr(core_client, "reqs_in_flight", {})
        rank_of = dict(zip(core_client.core_engines, ranks, strict=False))
        counts = dict.fromkeys(ranks, 0)
        for request, state in self.client.output_processor.request_states.items():
            if not getattr(state, "streaming_input", False):
                counts[rank_of.get(assigned.get(request), ranks[0])] += 1
        return counts

    async def open(self, death_bell: DeathBell, patch_digest: str) -> None:
        """Build vLLM's app, run its start-up and take requests.

        Args:
            death_bell: What vLLM's handlers ask to end when the engine is dead.
            patch_digest: What every process of the engine must have applied.

        Raises:
            EngineStartError: a process of the engine has other patches, or none.
        """
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        try:
            await confirm_patches(self.client, patch_digest)
        except PatchMismatchError as error:
            raise EngineStartError(str(error)) from error
        await self.client.reset_mm_cache()
        tasks = await self.client.get_supported_tasks()
        app = build_app(self._arguments, tasks, self.client.model_config)
        await init_app_state(self.client, app.state, self._arguments, tasks)
        app.state.server = death_bell
        self._lifespan = contextlib.AsyncExitStack()
        await self._lifespan.enter_async_context(app.router.lifespan_context(app))
        self.app = app

    async def close(self) -> None:
        """End vLLM's app. The engine itself is ended by `shutdown`."""
        # vLLM ends its engine first and its reader of outputs after that, and the reader calls it a crash.
        if (reader := self.client.output_handler) is not None:
            reader.cancel()
            await asyncio.wait([reader])
        if self._lifespan is not None:
            await self._lifespan.aclose()
            self._lifespan = None

    def shutdown(self) -> None:
        """End the engine processes. Blocks until they are gone."""
        self.client.shutdown(timeout=0)


class HeadlessEngine:
    """This node's ranks of an engine whose server is on another node: vLLM's own `serve --headless`, as a child.

    Attributes:
        config: vLLM's `VllmConfig`.
        app: None, for there is no API here.
    """

    def __init__(self, process: subprocess.Popen[bytes], config: Any, arguments: Any) -> None:
        self.config = config
        self.app: ASGIApp | None = None
        self._process = process
        self._arguments = arguments

    @property
    def model_names(self) -> list[str]:
        """The model's names, the first one in metrics."""
        return served_names(self._arguments)

    @property
    def death(self) -> str | None:
        """How the ranks ended, or None while they run."""
        code = self._process.poll()
        return None if code is None else f"vLLM's headless process ended with code {code}"

    async def open(self, death_bell: DeathBell, patch_digest: str) -> None:
        """Nothing: the server of the other node confirms the patches of every rank."""

    async def close(self) -> None:
        """Nothing: there is no app."""

    def shutdown(self) -> None:
        """End the ranks. Blocks until vLLM has ended them."""
        self._process.terminate()
        self._process.wait()


def served_names(arguments: Any) -> list[str]:
    """The names that parsed arguments serve the model under."""
    return list(arguments.served_model_name or [arguments.model])


def start_engine(command_line: list[str], begin: Callable[[Phase], None]) -> Engine:
    """Start an engine. Blocks for the whole load: call it from a thread.

    Args:
        command_line: The arguments of `vllm serve`.
        begin: Told each step as it begins.

    Raises:
        InputError: vLLM refuses an argument or their combination.
        EngineStartError: the engine failed while it was started.
    """
    _shield_engine_from_ctrl_c()
    begin(Phase.IMPORTING)
    _import_vllm()
    begin(Phase.CONFIGURING)
    arguments = _parse(command_line)
    arguments.worker_extension_cls = WORKER_EXTENSION
    config = _configure(arguments)
    # The gateway asks for the key, so a key that only vLLM knew would guard little (four of its own prefixes).
    if arguments.api_key:
        raise InputError("--api-key shows the key to whoever lists processes: set DSPARK_API_KEY or --api-key-file")
    begin(Phase.LOADING)
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    step_logs: dict[int, StepLog] = {}

    def step_log(_config: Any, engine: int = 0) -> StepLog:
        return step_logs.setdefault(engine, StepLog())

    try:
        client = AsyncLLM.from_vllm_config(
            vllm_config=config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[step_log],
            enable_log_requests=arguments.enable_log_requests,
            aggregate_engine_logging=arguments.aggregate_engine_logging,
            disable_log_stats=arguments.disable_log_stats,
        )
    except Exception as error:
        raise EngineStartError(one_line(error)) from error
    begin(Phase.BUILDING)
    _import_app()
    return Engine(client, arguments, step_logs)


def start_headless(command_line: list[str], begin: Callable[[Phase], None]) -> HeadlessEngine:
    """Start this node's ranks. Returns once vLLM runs: only the other node's server can tell when they are loaded.

    Args:
        command_line: The arguments of `vllm serve`, among them which node this is.
        begin: Told each step as it begins.

    Raises:
        InputError: vLLM refuses an argument or their combination.
    """
    _shield_engine_from_ctrl_c()
    begin(Phase.IMPORTING)
    _import_vllm()
    begin(Phase.CONFIGURING)
    arguments = _parse(command_line)
    config = _configure(arguments, headless=True)
    begin(Phase.LOADING)
    words = [*command_line, "--headless", "--worker-extension-cls", WORKER_EXTENSION]
    process = subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *words])
    return HeadlessEngine(process, config, arguments)


def _shield_engine_from_ctrl_c() -> None:
    """Ctrl-C in a terminal reaches every process of the group; requests under way still need their engine.

    The engine's processes inherit this thread's signal mask. multiprocessing's resource tracker is started first,
    since its start unblocks the signal again.
    """
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _import_vllm() -> None:
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    import vllm.v1.engine.async_llm  # noqa: F401


def _import_app() -> None:
    """Import here, in the start's thread, what `open` would otherwise import on the event loop."""
    import vllm.entrypoints.launchers.api_server.app_state
    import vllm.entrypoints.launchers.app  # noqa: F401


def _parse(command_line: list[str]) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        """vLLM's parser, with an exception in the place of usage text and exit."""

        def error(self, message: str) -> None:
            """Refuse the command line."""
            raise InputError(f"vLLM refuses the engine arguments: {message}; see 'vllm serve --help=all'")

    parser = make_arg_parser(Parser(prog="vllm serve"))
    arguments = parser.parse_args(command_line)
    if getattr(arguments, "model_tag", None):
        arguments.model = arguments.model_tag
    try:
        validate_parsed_serve_args(arguments)
    except (TypeError, ValueError) as error:
        raise InputError(f"vLLM refuses the engine arguments: {one_line(error)}") from error
    return arguments


def _configure(arguments: Any, *, headless: bool = False) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    try:
        return AsyncEngineArgs.from_cli_args(arguments).create_engine_config(
            usage_context=UsageContext.OPENAI_API_SERVER, headless=headless
        )
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        raise InputError(f"vLLM refuses this configuration: {one_line(error)}") from error
