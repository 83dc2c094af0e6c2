"""How far a run is: a bar with the time left on a terminal, else a line for everything that is done."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Reporting:
    """Says what is going on, on standard error.

    Args:
        total: Things to measure.
        console: Where to; standard error without.
    """

    def __init__(self, total: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=total, left="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def doing(self, what: str) -> None:
        """Something was begun."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)
        else:
            self._say(what)

    def done(self, what: str) -> None:
        """One of the things is measured."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, left=self._left())
            self._bar.console.print(what, markup=False)
        else:
            self._say(f"[{self._done}/{self._total}] {what}; {self._left()}")

    def failed(self, what: str) -> None:
        """Something could not be measured."""
        self._say(what)

    def _say(self, what: str) -> None:
        # Written whole, whatever the width: a log has no columns.
        self._console.print(what, markup=False, soft_wrap=True)

    def _left(self) -> str:
        """The time that the rest takes if it goes on at the mean pace so far, starts of servers included."""
        seconds = (time.monotonic() - self._began) / self._done * (self._total - self._done)
        minutes = round(seconds / 60)
        return f"about {minutes // 60} h {minutes % 60} min left" if minutes >= 60 else f"about {minutes} min left"
