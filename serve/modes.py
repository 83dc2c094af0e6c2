"""The verification mode of every engine, and the one way to change it while serving.

A switch reaches the engines of this server only, and a restart begins with the configured mode again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from patches.modes import Mode
from serve.engine_calls import call_workers, engine_numbers
from serve.lifecycle import Lifecycle, State
from serve.profile import Verification

logger = logging.getLogger("dspark-serve")

CONFIRM_SECONDS = 30.0
"""What an engine gets to confirm a switch in. One in a longer step still switches, and is noted when it answers."""


class SwitchRefusedError(Exception):
    """The mode cannot be switched now, or never on this server; the message says why and what to do."""


class SwitchUnconfirmedError(Exception):
    """Not every engine confirmed the switch; the message names those that did not."""


class ModeSwitch:
    """Knows what every engine does because the engine said so.

    Attributes:
        configured: What the server was started with.
        told: Whether this server is told what the engines do. A headless node's ranks answer to another server.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        configured: Verification,
        confirm_seconds: float = CONFIRM_SECONDS,
        *,
        told: bool = True,
    ) -> None:
        self.configured = configured
        self.told = told
        self._lifecycle = lifecycle
        self._confirm_seconds = confirm_seconds
        self._client: Any = None
        self._engines: dict[int, str | None] = {}
        self._started_adaptive = False
        self._one_at_a_time = asyncio.Lock()
        self._calls: set[asyncio.Task[str | None]] = set()

    async def attach(self, engine_client: Any) -> None:
        """Ask every engine of a started server for its mode, which may not be the configured one.

        Args:
            engine_client: vLLM's `AsyncLLM`, its engines started with `patches.worker_extension`.
        """
        self._client = engine_client
        engines = engine_numbers(engine_client)
        answers = await asyncio.gather(*(call_workers(engine_client, engine, "dspark_mode") for engine in engines))
        self._engines = {engine: agreed(answer) for engine, answer in zip(engines, answers, strict=True)}
        self._started_adaptive = self.current == Verification.ADAPTIVE
        if self.current != self.configured:
            logger.warning("asked for %s verification, and the engine does %s", self.configured, self.current)

    @property
    def current(self) -> str | None:
        """What every engine does; None where they differ, one has not confirmed what it was told, or nobody tells."""
        if not self.told:
            return None
        return agreed(list(self._engines.values())) if self._engines else self.configured.value

    @property
    def refusal(self) -> str | None:
        """Why the mode cannot be switched, or None where it can."""
        if self._lifecycle.state is not State.READY:
            return f"the server is {self._lifecycle.state.value}: the mode is switched while it is ready"
        if not self.told:
            return "this node runs ranks of an engine that another node serves: switch the mode there"
        if not self._started_adaptive and self.configured is Verification.ADAPTIVE:
            return f"adaptive verification was asked for and the engine does {self.current}: its log says why"
        if not self._started_adaptive:
            return (
                f"this server was started with --verification {self.configured.value} and does {self.current}: only "
                "one that was started with --verification adaptive can be switched, to fixed and back"
            )
        return None

    def as_json(self) -> dict[str, Any]:
        """What the status and `/dspark/mode` say."""
        return {
            "mode": self.current,
            "configured": self.configured.value,
            "switchable": self.refusal is None,
            "reason": self.refusal,
            "engines": [{"engine": engine, "mode": mode} for engine, mode in self._engines.items()],
        }

    async def switch(self, mode: Mode) -> None:
        """Return once every engine has confirmed that its next step is planned in this mode.

        Requests under way notice nothing but their speed. Switches are carried out one after the other.

        Raises:
            SwitchRefusedError: not now, or never on this server.
            SwitchUnconfirmedError: an engine failed to, or did not answer in time. It is not told to go back: its
                mode is unknown until it answers, and the answer is noted whenever it comes.
        """
        async with self._one_at_a_time:
            if self.refusal is not None:
                raise SwitchRefusedError(self.refusal)
            before = self.current
            calls = {engine: asyncio.create_task(self._switch_engine(engine, mode)) for engine in self._engines}
            for call in calls.values():
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            await asyncio.wait(calls.values(), timeout=self._confirm_seconds)
            problems = []
            for engine, call in calls.items():
                if not call.done():
                    self._engines[engine] = None
                    problems.append(f"engine {engine} did not answer within {self._confirm_seconds:g} s")
                elif (problem := call.result()) is not None:
                    problems.append(f"engine {engine}: {problem}")
            if problems:
                logger.error("the switch to %s is not confirmed: %s", mode, "; ".join(problems))
                raise SwitchUnconfirmedError(f"the switch to '{mode}' is not confirmed: {'; '.join(problems)}")
            if mode != before:
                logger.info("verification mode: %s", mode)

    async def _switch_engine(self, engine: int, mode: Mode) -> str | None:
        """Switch one engine and note what it answers; returns what went wrong."""
        try:
            answers = await call_workers(self._client, engine, "dspark_switch_mode", mode.value)
        except Exception as error:
            self._engines[engine] = None
            return " ".join(str(error).split()) or type(error).__name__
        self._engines[engine] = agreed(answers)
        return None if self._engines[engine] == mode else f"its workers answered {', '.join(map(str, answers))}"


def agreed(modes: list[str | None]) -> str | None:
    """The one mode that all have, or None."""
    return modes[0] if len(set(modes)) == 1 else None
