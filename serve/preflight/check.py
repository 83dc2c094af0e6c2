"""A check: one row of a table, and what it can find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from serve.preflight.facts import Facts
from serve.preflight.plan import Plan


class Severity(StrEnum):
    """What a failed check means."""

    ERROR = "error"
    """It would not start, or would serve wrongly: nothing is started."""
    WARNING = "warning"
    """It would start, and not do what was probably meant."""


@dataclass(frozen=True)
class Problem:
    """What a check found wrong.

    Attributes:
        found: What is so, with its values.
        remedy: What to change here; empty where the row's remedy says it.
    """

    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Unknown:
    """A fact that a check needs is not known."""

    missing: str


Finding = Problem | Unknown | None
"""None: nothing is wrong."""


@dataclass(frozen=True)
class Check:
    """One row.

    Attributes:
        id: Stable name, for `--skip` and machines.
        what: What has to be so.
        how: Where the answer comes from.
        remedy: What to change.
        run: The finding, from facts and plan alone.
        severity: What its failure means.
    """

    id: str
    what: str
    how: str
    remedy: str
    run: Callable[[Facts, Plan], Finding]
    severity: Severity = Severity.ERROR
