"""The servers of a run: started from a profile one after the other, or one that runs already."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from serve.keys import KEY_VARIABLES
from serve.listening import listen
from serve.profile import Profile, resolve_model
from serve.validate.children import child, complaint, program, tool_environment
from serve.validate.endpoint import Endpoint, EndpointError
from serve.validate.load import Target
from serve.validate.plan import Serving
from serve.validate.prompts import PromptSet
from serve.validate.results import Arm, Protocol, Start
from serve.validate.session import Session
from serve.validate.stopping import StoppedError, go_on
from serve.validate.store import Store

logger = logging.getLogger("dspark-serve")

HOST = "127.0.0.1"
"""Nobody but the run asks its servers, whatever DSPARK_HOST says."""
POLL_SECONDS = 0.25
DRAIN_SECONDS = 2
"""When a server is ended nothing of the run is under way on it."""

# `vllm/v1/worker/gpu/model_runner.py` and `gpu_model_runner.py`, `capture_model`, the same in 0.28.0 to 0.33.0. The
# encoder's line begins with another word.
_CAPTURED = re.compile(r"\bGraph capturing finished in (\d+) secs, took (\d+\.\d+) GiB")


class ServerError(Exception):
    """A server did not start; the message is one line."""


class ProfileServers:
    """Starts `dspark-serve up PROFILE` for every serving.

    Args:
        recipe: The profile, `--set` applied.
        protocol: What is measured.
        prompts: Of the load.
        store: Gets the starts.
        environment: This process's; the key of the servers is in it, if any.
        key: That key.
    """

    def __init__(
        self,
        recipe: Profile,
        protocol: Protocol,
        prompts: PromptSet,
        store: Store,
        environment: Mapping[str, str],
        key: str | None,
    ) -> None:
        self._recipe = recipe
        self._protocol = protocol
        self._prompts = prompts
        self._store = store
        # The run knows no key but the environment's own: servers that asked for another would refuse it.
        self._environment = {name: value for name, value in environment.items() if name != "DSPARK_API_KEY_FILE"}
        self._key = key

    @contextlib.contextmanager
    def serving(self, serving: Serving) -> Iterator[Session]:
        """A server with the serving's arms, until the block ends.

        Raises:
            ServerError: it ended before its model answered.
        """
        with listen(HOST, 0) as free:
            port = free.getsockname()[1]
        command = self._command(serving, port)
        log = self._store.directory / "logs" / f"{serving.name}.log"
        log.unlink(missing_ok=True)
        endpoint = Endpoint(f"http://{HOST}:{port}", self._key)
        began = time.monotonic()
        with contextlib.closing(endpoint), child(command, log, self._environment) as process:
            while not endpoint.ready():
                if process.poll() is not None:
                    raise ServerError(f"dspark-serve up ended with {process.returncode}: {complaint(log)} (see {log})")
                go_on()
                time.sleep(POLL_SECONDS)
            self._record(serving, time.monotonic() - began, log, command)
            with _watched(process):
                tools = tool_environment(self._environment, self._key)
                target = Target(endpoint, endpoint.chats(), tokenizer_words(self._recipe), tools)
                yield Session(target, self._protocol, self._prompts, serving, self._store.directory)

    def _command(self, serving: Serving, port: int) -> list[str]:
        protocol = self._protocol
        sets = list(protocol.sets)
        if serving.max_model_len is not None:
            sets.append(f"max_model_len={serving.max_model_len}")
        assert protocol.profile is not None
        return [
            program("dspark-serve"),
            "up",
            protocol.profile,
            *(word for assignment in sets for word in ("--set", assignment)),
            *("--host", HOST, "--port", str(port)),
            *("--verification", serving.verification.value),
            *("--drain-seconds", str(DRAIN_SECONDS)),
            *(("--", *protocol.extra) if protocol.extra else ()),
        ]

    def _record(self, serving: Serving, seconds: float, log: Path, command: Sequence[str]) -> None:
        """Keep what the start took: the first one's where a run was interrupted, and none with another context."""
        name = f"starts/{serving.name}"
        if serving.max_model_len is not None or self._store.has(name):
            return
        graph_s, graph_gib = captured(log.read_text(errors="replace"))
        own = {**self._recipe.environment, **self._environment}
        environment = {name: own[name] for name in self._recipe.environment if name not in KEY_VARIABLES}
        start = Start(
            round=serving.round,
            arms=serving.arms,
            ready_s=seconds,
            graph_s=graph_s,
            graph_gib=graph_gib,
            command=tuple(command),
            environment=environment,
        )
        self._store.write(name, start)


class RunningServer:
    """A server that somebody else started; its mode is put back afterwards.

    Args:
        target: The server.
        protocol: What is measured.
        prompts: Of the load.
        directory: The run's.
    """

    def __init__(self, target: Target, protocol: Protocol, prompts: PromptSet, directory: Path) -> None:
        self._target = target
        self._protocol = protocol
        self._prompts = prompts
        self._directory = directory

    @contextlib.contextmanager
    def serving(self, serving: Serving) -> Iterator[Session]:
        """The server, until the block ends.

        Raises:
            EndpointError: it does not answer.
        """
        mode = self._target.endpoint.mode()
        try:
            yield Session(self._target, self._protocol, self._prompts, serving, self._directory)
        finally:
            if mode is not None and len(serving.arms) > 1:
                self._put_back(mode)

    def _put_back(self, mode: Arm) -> None:
        try:
            self._target.endpoint.put_back(mode)
        except EndpointError as error:
            logger.warning("the mode was %s and could not be put back: %s", mode, error)


def captured(log: str) -> tuple[float | None, float | None]:
    """Seconds that capturing graphs took and GiB that they hold, as vLLM logs it; the slowest and largest rank's.

    Returns:
        None twice where no graph was captured.
    """
    found = [(float(seconds), float(gib)) for seconds, gib in _CAPTURED.findall(log)]
    return (max(s for s, _ in found), max(g for _, g in found)) if found else (None, None)


def tokenizer_words(recipe: Profile) -> tuple[str, ...]:
    """How `vllm bench serve` is told the tokenizer that the profile's server has."""
    arguments = recipe.engine_args
    words = ["--tokenizer", resolve_model(str(arguments.get("tokenizer") or recipe.model))]
    if mode := arguments.get("tokenizer_mode"):
        words += ["--tokenizer-mode", str(mode)]
    if arguments.get("trust_remote_code") is True:
        words.append("--trust-remote-code")
    return tuple(words)


@contextlib.contextmanager
def _watched(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Say which exit code a server had that ended while it was measured."""
    try:
        yield
    except Exception as error:
        code = process.poll()
        if code is None or isinstance(error, ServerError | StoppedError):
            raise
        what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise ServerError(f"the server ended with {what} while it was measured: {error}") from error
