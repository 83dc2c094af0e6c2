"""Acceptance over the last 15 minutes, kept by the server so that a page opened now shows it at once."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import NamedTuple

from serve.totals import Totals, acceptance_length

SPAN_SECONDS = 900.0
"""How far back it reaches."""
EVERY_SECONDS = 15.0
"""How far apart totals are noted."""


class _Note(NamedTuple):
    totals: Totals
    mode: str | None


class History:
    """A ring of totals: what comes after the last point pushes the first one out."""

    def __init__(self) -> None:
        self._notes: deque[_Note] = deque(maxlen=int(SPAN_SECONDS / EVERY_SECONDS) + 1)

    def note(self, totals: Totals, mode: str | None) -> None:
        """Remember totals and the verification mode in force; called every `EVERY_SECONDS`."""
        self._notes.append(_Note(totals, mode))

    def as_json(self, now: float) -> list[dict[str, float | str | None]]:
        """One point for every two notes, the oldest first.

        Args:
            now: On the clock of the totals.

        Returns:
            `seconds_ago` (when the point ended), `acceptance_length` (None while nothing was verified) and `mode`.
        """
        return [
            {
                "seconds_ago": round(now - after.totals.at, 1),
                "acceptance_length": acceptance_length(before.totals, after.totals),
                "mode": after.mode,
            }
            for before, after in pairwise(self._notes)
        ]
