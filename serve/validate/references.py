"""The tables of the two upstream changes that this project grew from, to lay beside one's own.

`reference/` has one JSON file a pull request: its tables as printed, its protocol, and the percentages that it quotes.
`check` recomputes each quoted percentage from the printed cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from decimal import Decimal
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from serve.errors import InputError
from serve.validate.results import Arm, Record, Score
from serve.validate.statistics import difference

FOLDER = Path(__file__).with_name("reference")
HALF_A_DIGIT = 0.05
"""Tokens a second. The tables print one decimal, so a cell stands for anything within half of its last digit."""


class ReferenceScore(Record):
    """One printed score; what upstream did not print is None."""

    arm: Arm
    task: str
    metric: str
    value: float
    standard_error: float | None
    samples: int
    acceptance_length: float | None = None


class ReferenceStart(Record):
    """What capturing graphs took."""

    graph_s: float
    graph_gib: float


class ReferenceTable(Record):
    """One configuration.

    Attributes:
        setting: What sets it apart from the source's other tables.
        requests, failed: Of every throughput cell; None where upstream does not say.
        throughput: Arm -> concurrency -> output tokens a second.
    """

    name: str
    setting: str
    requests: int | None = None
    failed: int | None = None
    throughput: dict[Arm, dict[int, float]]
    accuracy: tuple[ReferenceScore, ...]
    starts: dict[Arm, ReferenceStart] | None = None


class Measured(Record):
    """A pair of numbers that the source prints outside its tables."""

    what: str
    unit: str
    before: float
    after: float
    quoted_percent: str | None


class DeltaClaim(Record):
    """A quoted percentage: the least or the greatest delta of an arm over some concurrencies."""

    kind: Literal["delta"]
    arm: Arm
    against: Arm
    table: str
    against_table: str | None = None
    concurrencies: tuple[int, ...]
    which: Literal["least", "greatest"]
    quoted_percent: str


class FasterClaim(Record):
    """An arm is said to be faster at every concurrency of a table."""

    kind: Literal["faster"]
    arm: Arm
    against: Arm
    table: str


class ScoresClaim(Record):
    """Scores of one table, and of one arm over tables, are said to be within so many combined standard errors."""

    kind: Literal["scores"]
    tables: tuple[str, ...]
    standard_errors: float


class CompleteClaim(Record):
    """So many cells are said to have no failed request."""

    kind: Literal["complete"]
    tables: tuple[str, ...]
    cells: int


Claim = Annotated[DeltaClaim | FasterClaim | ScoresClaim | CompleteClaim, Field(discriminator="kind")]


class Reference(Record):
    """One file of `reference/`."""

    source: str
    title: str
    model: str
    hardware: str
    hardware_class: str
    versions: dict[str, str]
    protocol: tuple[str, ...]
    tables: tuple[ReferenceTable, ...]
    measured: tuple[Measured, ...] = ()
    claims: tuple[Claim, ...]
    notes: tuple[str, ...] = ()


class Agrees(StrEnum):
    """Whether a quoted number follows from the printed cells."""

    YES = "recomputes"
    ROUNDING = "within the cells' rounding"
    NO = "does not recompute"


class Checked(Record):
    """A claim beside what the printed cells give."""

    claim: str
    quoted: str
    recomputed: str
    agrees: Agrees


@cache
def references() -> tuple[Reference, ...]:
    """Everything that is bundled, by name of its file."""
    return tuple(Reference.model_validate_json(path.read_bytes()) for path in sorted(FOLDER.glob("*.json")))


def table_names() -> list[str]:
    """What can be laid beside a run."""
    return [table.name for reference in references() for table in reference.tables]


def find(name: str) -> tuple[Reference, ReferenceTable]:
    """A table and the file that it is in.

    Raises:
        InputError: there is none of that name.
    """
    for reference in references():
        for table in reference.tables:
            if table.name == name:
                return reference, table
    raise InputError(f"no reference table '{name}': use one of {', '.join(table_names())}")


def delta_percent(table: ReferenceTable, arm: Arm, against: Arm, concurrency: int) -> float | None:
    """Percent by which an arm's printed throughput exceeds another's; None where one of them is not printed."""
    of = table.throughput.get(arm, {}).get(concurrency)
    to = table.throughput.get(against, {}).get(concurrency)
    return None if of is None or to is None else percent(of / to)


def percent(ratio: float) -> float:
    """A ratio as a percentage of change."""
    return 100 * (ratio - 1)


def check(reference: Reference) -> tuple[Checked, ...]:
    """Every number that the source quotes, recomputed from what it prints."""
    tables = {table.name: table for table in reference.tables}
    checked = [_change(each) for each in reference.measured if each.quoted_percent is not None]
    for claim in reference.claims:
        if isinstance(claim, DeltaClaim):
            checked.append(_delta(claim, tables))
        elif isinstance(claim, FasterClaim):
            checked.append(_faster(claim, tables[claim.table]))
        elif isinstance(claim, ScoresClaim):
            checked.append(_scores(claim, [tables[name] for name in claim.tables]))
        else:
            checked.append(_complete(claim, [tables[name] for name in claim.tables]))
    return tuple(checked)


def _change(measured: Measured) -> Checked:
    quoted = measured.quoted_percent or ""
    return Checked(
        claim=measured.what,
        quoted=f"{quoted} %",
        recomputed=_percent_text(percent(measured.after / measured.before), quoted),
        agrees=_agreement(quoted, *_bounds(measured.after, measured.before)),
    )


def _delta(claim: DeltaClaim, tables: Mapping[str, ReferenceTable]) -> Checked:
    of = tables[claim.table].throughput[claim.arm]
    to = tables[claim.against_table or claim.table].throughput[claim.against]
    pick = min if claim.which == "least" else max
    values = zip(*(_bounds(of[number], to[number]) for number in claim.concurrencies), strict=True)
    low, value, high = (pick(each) for each in values)
    where = f"C{claim.concurrencies[0]}"
    if len(claim.concurrencies) > 1:
        where = f"{claim.which} of {where} to C{claim.concurrencies[-1]}"
    other = f"{claim.against} of {claim.against_table}" if claim.against_table else str(claim.against)
    return Checked(
        claim=f"{claim.table}: {claim.arm} against {other}, {where}",
        quoted=f"{claim.quoted_percent} %",
        recomputed=_percent_text(value, claim.quoted_percent),
        agrees=_agreement(claim.quoted_percent, low, value, high),
    )


def _bounds(of: float, to: float) -> tuple[float, float, float]:
    """Percent of change between two printed cells: the least that their rounding allows, as printed, the most."""
    return (
        percent((of - HALF_A_DIGIT) / (to + HALF_A_DIGIT)),
        percent(of / to),
        percent((of + HALF_A_DIGIT) / (to - HALF_A_DIGIT)),
    )


def _agreement(quoted: str, low: float, value: float, high: float) -> Agrees:
    digits = _digits(quoted)
    if Decimal(f"{value:.{digits}f}") == Decimal(quoted):
        return Agrees.YES
    half = 0.5 * 10**-digits
    return Agrees.ROUNDING if low <= float(quoted) + half and high >= float(quoted) - half else Agrees.NO


def _percent_text(value: float, quoted: str) -> str:
    """One digit more than was quoted, to show which way it was rounded."""
    return f"{value:+.{_digits(quoted) + 1}f} %"


def _digits(quoted: str) -> int:
    return len(quoted.partition(".")[2])


def _faster(claim: FasterClaim, table: ReferenceTable) -> Checked:
    of, to = table.throughput[claim.arm], table.throughput[claim.against]
    faster = sum(of[concurrency] > to[concurrency] for concurrency in of)
    return Checked(
        claim=f"{table.name}: {claim.arm} faster than {claim.against}",
        quoted="at every concurrency",
        recomputed=f"at {faster} of {len(of)}",
        agrees=Agrees.YES if faster == len(of) else Agrees.NO,
    )


def _scores(claim: ScoresClaim, tables: Sequence[ReferenceTable]) -> Checked:
    pairs = [pair for table in tables for pair in itertools.combinations(table.accuracy, 2)]
    pairs += [
        (one, other) for a, b in itertools.combinations(tables, 2) for one in a.accuracy for other in b.accuracy
        if one.arm == other.arm
    ]  # fmt: skip
    found = [
        difference(_score(one), _score(other), one.samples, other.samples).in_standard_errors
        for one, other in pairs
        if (one.task, one.metric) == (other.task, other.metric)
    ]
    known = [each for each in found if each is not None]
    largest = max(known)
    return Checked(
        claim="every difference of scores within a configuration, and of one arm between configurations",
        quoted=f"within {claim.standard_errors} combined standard errors",
        recomputed=f"largest of {len(known)}: {largest:.2f}",
        agrees=Agrees.YES if largest <= claim.standard_errors else Agrees.NO,
    )


def _score(printed: ReferenceScore) -> Score:
    return Score(value=printed.value, standard_error=printed.standard_error)


def _complete(claim: CompleteClaim, tables: Sequence[ReferenceTable]) -> Checked:
    cells = [table.failed for table in tables for arm in table.throughput.values() for _ in arm]
    without = sum(failed == 0 for failed in cells)
    return Checked(
        claim="cells without a failed request",
        quoted=str(claim.cells),
        recomputed=f"{without} of {len(cells)} printed",
        agrees=Agrees.YES if without == len(cells) == claim.cells else Agrees.NO,
    )
