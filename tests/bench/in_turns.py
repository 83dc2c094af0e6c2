"""Milliseconds a token of one engine with a stage on and off, in turns: nothing else differs between the two."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.arms import Engine
from tests.bench.never_slower_report import token_ms

REPEATS = 3
"""Measurements of a turn; their median counts."""

Times = dict[str, list[float]]
"""`on` and `off` -> [rounds] milliseconds a token."""


@dataclass(frozen=True)
class Cell:
    """What is measured.

    Attributes:
        requests: At once.
        tokens: Of each.
        seconds: What one measurement may take.
    """

    requests: int
    tokens: int
    seconds: float

    def token_ms(self, engine: Engine, repeats: int) -> list[float]:
        """[repeats] milliseconds a token.

        Raises:
            EngineError: the engine failed, or took too long.
        """
        found = engine.measure(self.seconds, requests=self.requests, tokens=self.tokens, repeats=repeats)
        return token_ms(self.requests, found)


def in_turns(engine: Engine, switch: Callable[[bool], object], cell: Cell, rounds: int) -> Times:
    """Measure on and off, then off and on, and so forth; the stage is left on.

    Args:
        engine: The engine.
        switch: Switches the stage on or off.
        cell: What is measured; once more at first, only to warm up.
        rounds: How often each of the two is measured.
    """
    times: Times = {"on": [], "off": []}
    cell.token_ms(engine, 1)
    for number in range(rounds):
        for name in ("on", "off") if number % 2 == 0 else ("off", "on"):
            switch(name == "on")
            times[name].append(statistics.median(cell.token_ms(engine, REPEATS)))
    switch(True)
    return times


def ratios(times: Times) -> list[float]:
    """[rounds] on divided by off."""
    return [on / off for on, off in zip(times["on"], times["off"], strict=True)]


def median_and_range(values: list[float], digits: int = 3) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
