"""The statistics of a report: against SciPy, against simulated rounds, and at their edges."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from serve.validate.drafts import acceptance_length, verified_width
from serve.validate.results import Drafts, Score
from serve.validate.statistics import (
    Agreement,
    Standing,
    added,
    corrected,
    difference,
    ratio,
    spread,
    standard_error,
    standing,
)

SPEEDS = st.floats(1e-3, 1e7)


def test_a_spread_is_the_median_with_the_range() -> None:
    found = spread([3.0, 1.0, 10.0])
    assert found is not None
    assert (found.value, found.low, found.high) == (3.0, 1.0, 10.0)
    assert spread([1.0, 2.0]).value == 1.5  # type: ignore[union-attr]
    assert spread([]) is None


def test_a_ratio_pairs_rounds_and_has_the_interval_of_scipy() -> None:
    of, to = {1: 110.0, 2: 220.0, 3: 104.0, 5: 1.0}, {1: 100.0, 2: 200.0, 3: 100.0, 4: 9.0}
    found = ratio(of, to)
    assert found is not None
    logs = [math.log(1.1), math.log(1.1), math.log(1.04)]
    interval = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert found.rounds == 3
    assert found.value == pytest.approx(math.exp(sum(logs) / 3))
    assert (found.low, found.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))


def test_one_round_has_no_interval_and_none_has_no_ratio() -> None:
    found = ratio({1: 3.0, 2: 1.0}, {1: 2.0, 3: 1.0})
    assert found is not None
    assert (found.value, found.low, found.high, found.rounds) == (pytest.approx(1.5), None, None, 1)
    assert standing(found) is Standing.UNDECIDED
    assert ratio({1: 1.0}, {2: 1.0}) is None
    assert standing(None) is Standing.UNMEASURED


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    chance = random.Random(20261129)
    truth, runs = 1.05, 4000
    for rounds in (2, 3, 5):
        held = faster = 0
        for _ in range(runs):
            # What a whole round has in common, such as a warm machine, is far larger than the difference.
            drift = {number: chance.lognormvariate(0, 0.3) for number in range(rounds)}
            of = {number: 100 * truth * each * chance.lognormvariate(0, 0.02) for number, each in drift.items()}
            to = {number: 100 * each * chance.lognormvariate(0, 0.02) for number, each in drift.items()}
            found = ratio(of, to)
            assert found is not None
            assert found.low is not None
            assert found.high is not None
            held += found.low <= truth <= found.high
            faster += standing(found) is Standing.FASTER
        # Four standard errors of a share of 0.95 in so many runs.
        assert held / runs == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / runs)), rounds
        if rounds == 5:
            assert faster / runs > 0.6, "the drift must not hide the difference"


@given(st.dictionaries(st.integers(1, 6), st.tuples(SPEEDS, SPEEDS), min_size=1))
def test_a_ratio_lies_in_its_interval_and_turns_round(rounds: dict[int, tuple[float, float]]) -> None:
    of, to = {n: a for n, (a, _) in rounds.items()}, {n: b for n, (_, b) in rounds.items()}
    found, back = ratio(of, to), ratio(to, of)
    assert found is not None
    assert back is not None
    assert found.value * back.value == pytest.approx(1)
    if found.low is not None and found.high is not None:
        assert found.low <= found.value * (1 + 1e-9)
        assert found.value <= found.high * (1 + 1e-9)
        assert math.isfinite(found.high)
    turned = {Standing.FASTER: Standing.SLOWER, Standing.SLOWER: Standing.FASTER}
    assert standing(back) is turned.get(standing(found), standing(found))


def test_scores_are_alike_within_one_and_a_fifth_combined_standard_errors() -> None:
    found = difference(Score(value=0.9219, standard_error=0.0074), Score(value=0.9325, standard_error=0.0069), 9, 9)
    assert found.standard_error == pytest.approx(math.sqrt(0.0074**2 + 0.0069**2))
    assert found.in_standard_errors == pytest.approx(1.0477, abs=1e-4)
    assert found.agreement is Agreement.ALIKE
    assert (found.low, found.high) == pytest.approx(
        stats.norm.interval(0.95, found.value, found.standard_error), abs=1e-12
    )


@pytest.mark.parametrize(
    ("of", "to", "agreement"),
    [
        ((0.90, 0.007), (0.93, 0.007), Agreement.LOWER),
        ((0.93, 0.007), (0.90, 0.007), Agreement.HIGHER),
        ((0.90, None), (0.93, 0.007), Agreement.UNKNOWN),
        ((1.0, 0.0), (1.0, 0.0), Agreement.ALIKE),
        ((0.9, 0.0), (1.0, 0.0), Agreement.UNKNOWN),
        ((0.9, 0.007), (1.0, 0.0), Agreement.LOWER),
    ],
)
def test_what_a_score_says(of: tuple[float, float], to: tuple[float, float], agreement: Agreement) -> None:
    scores = (Score(value=each[0], standard_error=each[1]) for each in (of, to))
    assert difference(*scores, 1000, 1000).agreement is agreement


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_two_questions_that_went_alike_say_less_than_a_thousand(value: float) -> None:
    score = Score(value=value, standard_error=0.0)
    few, many = difference(score, score, 2, 2), difference(score, score, 1000, 1000)
    assert few.high == pytest.approx(0.54, abs=0.01)
    assert many.high == pytest.approx(0.0038, abs=0.0001)
    assert {few.agreement, many.agreement} == {Agreement.ALIKE}
    # SciPy has Wilson's interval, whose middle Agresti and Coull's proportion is.
    wilson = stats.binomtest(round(2 * value), 2).proportion_ci(0.95, "wilson")
    middle = (wilson.low + wilson.high) / 2
    assert standard_error(score, 2) == pytest.approx(
        math.sqrt(middle * (1 - middle) / (2 + stats.norm.ppf(0.975) ** 2))
    )


def test_lengths_come_from_counts_and_rounds_are_added_before_dividing() -> None:
    one = Drafts(proposed=50, verified=40, accepted=20, expected=21, steps=10, emitted=30, width=50)
    other = Drafts(proposed=10, verified=10, accepted=0, expected=1, steps=2, emitted=2, width=12)
    both = added([one, other])
    assert both is not None
    assert acceptance_length(both) == pytest.approx(32 / 12)
    assert verified_width(both) == pytest.approx(62 / 12)
    assert added([]) is None
    assert acceptance_length(Drafts(**dict.fromkeys(Drafts.model_fields, 0.0))) is None


def test_the_smallest_probability_is_corrected_for_the_number_of_looks() -> None:
    assert corrected([0.5, 0.02, 0.3]) == pytest.approx(0.06)
    assert corrected([0.5, 0.9]) == 1.0
    assert corrected([]) is None
