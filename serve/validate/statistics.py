"""The statistics of a validation report: pure functions over numbers that were measured in rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from statistics import NormalDist, fmean, median, stdev

from scipy.special import stdtrit

from serve.validate.results import Drafts, Record, Score

CONFIDENCE = 0.95
"""Of every interval."""
STANDARD_ERRORS = 1.2
"""Scores that differ by at most so many combined standard errors count as alike, as in vllm#58151."""
DIFFERENT = 0.01
"""Outputs are taken for differently distributed where the corrected probability is below this."""
NORMAL = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""Half of such an interval in standard errors, about 1.96."""
MOST = 700.0
"""Logarithm of about the largest float."""


class Spread(Record):
    """One number of several rounds.

    Attributes:
        value: Their median; of draft counts the quotient of the rounds' sums.
        low, high: The lowest and the highest round.
    """

    value: float
    low: float
    high: float


class Ratio(Record):
    """How many times as fast one arm was as another.

    Attributes:
        value: Geometric mean over the paired rounds.
        low, high: Its 95 % confidence interval; None with one round, which says nothing of its own error.
        rounds: Pairs.
    """

    value: float
    low: float | None
    high: float | None
    rounds: int


class Standing(StrEnum):
    """What an interval says of an arm against another."""

    FASTER = "faster"
    SLOWER = "slower"
    UNDECIDED = "cannot tell"
    UNMEASURED = "not measured"


class Agreement(StrEnum):
    """What a score says of an arm against another."""

    ALIKE = "alike"
    HIGHER = "higher"
    LOWER = "lower"
    UNKNOWN = "cannot tell"


class Difference(Record):
    """One score less another.

    Attributes:
        value: The difference.
        standard_error: Of the difference; None where a score has none.
        low, high: 95 % confidence interval, by the normal approximation.
        in_standard_errors: Absolute difference over its standard error; None where that is unknown.
        agreement: Whether it is within `STANDARD_ERRORS`.
    """

    value: float
    standard_error: float | None
    low: float | None
    high: float | None
    in_standard_errors: float | None
    agreement: Agreement


def spread(values: Iterable[float]) -> Spread | None:
    """Median and range; None of nothing."""
    held = sorted(values)
    return Spread(value=median(held), low=held[0], high=held[-1]) if held else None


def ratio(of: Mapping[int, float], to: Mapping[int, float]) -> Ratio | None:
    """Divide one arm by another, round by round.

    What drifts over a run (heat, clocks, neighbours) drifts for both arms of a round, so the logarithm of the quotient
    is taken in each round that both have, and Student's t gives the interval of its mean.

    Args:
        of: Round -> positive number.
        to: The same, of the other arm.

    Returns:
        None where no round has both.
    """
    logs = [math.log(of[number]) - math.log(to[number]) for number in sorted(of.keys() & to.keys())]
    if not logs:
        return None
    mean, half = fmean(logs), half_width(logs)
    return Ratio(
        value=math.exp(mean),
        low=None if half is None else math.exp(mean - half),
        # Two rounds that agree in nothing have an interval beyond what a float holds.
        high=None if half is None else math.exp(min(mean + half, MOST)),
        rounds=len(logs),
    )


def half_width(values: list[float]) -> float | None:
    """Half of the 95 % confidence interval of a mean, by Student's t; None of fewer than two values."""
    if len(values) < 2:
        return None
    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return quantile * stdev(values) / math.sqrt(len(values))


def standing(found: Ratio | None) -> Standing:
    """Faster or slower only where the interval leaves equality out."""
    if found is None:
        return Standing.UNMEASURED
    if found.low is not None and found.low > 1:
        return Standing.FASTER
    if found.high is not None and found.high < 1:
        return Standing.SLOWER
    return Standing.UNDECIDED


def difference(of: Score, to: Score, of_samples: int, to_samples: int) -> Difference:
    """Compare two scores of independent runs: the standard errors combine to `sqrt(a^2 + b^2)`.

    Args:
        of, to: The first less the second.
        of_samples, to_samples: Questions behind each.
    """
    value = of.value - to.value
    of_error, to_error = standard_error(of, of_samples), standard_error(to, to_samples)
    if of_error is None or to_error is None:
        return Difference(
            value=value, standard_error=None, low=None, high=None, in_standard_errors=None, agreement=Agreement.UNKNOWN
        )
    error = math.hypot(of_error, to_error)
    half = NORMAL * error
    if abs(value) <= STANDARD_ERRORS * error:
        agreement = Agreement.ALIKE
    else:
        agreement = Agreement.HIGHER if value > 0 else Agreement.LOWER
    return Difference(
        value=value,
        standard_error=error,
        low=value - half,
        high=value + half,
        in_standard_errors=abs(value) / error,
        agreement=agreement,
    )


def standard_error(score: Score, samples: int) -> float | None:
    """The standard error of a score; None where it is not known.

    Where every question went alike it is printed as 0, as if two questions told as much as a thousand. There it is that
    of Agresti and Coull's proportion, with z^2 / 2 right and wrong answers more (The American Statistician 52, 1998).
    """
    if score.standard_error != 0:
        return score.standard_error
    if score.value not in (0, 1) or samples < 1:
        return None
    more = samples + NORMAL**2
    share = (score.value * samples + NORMAL**2 / 2) / more
    return math.sqrt(share * (1 - share) / more)


def added(drafts: Iterable[Drafts]) -> Drafts | None:
    """The sum of several rounds' counts; None of nothing."""
    held = list(drafts)
    if not held:
        return None
    return Drafts(**{name: sum(getattr(each, name) for each in held) for name in Drafts.model_fields})


def corrected(p_values: Iterable[float]) -> float | None:
    """The smallest probability after Bonferroni's correction for looking at several positions; None of nothing."""
    held = list(p_values)
    return min(1.0, min(held) * len(held)) if held else None
