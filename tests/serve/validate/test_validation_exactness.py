"""The exactness check's arithmetic: equal is equal, the first difference is named, and a difference is found."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency

from serve.validate.exactness import Outputs, compare, homogeneity
from serve.validate.results import Arm


def outputs(arm: Arm, greedy: tuple[tuple[int, ...], ...], sampled: tuple[tuple[int, ...], ...] = ((1,),)) -> Outputs:
    return Outputs(arm=arm, prompts=tuple(map(str, greedy)), greedy=greedy, sampled_prompt="", sampled=sampled, seed=0)


def test_the_first_token_that_differs_is_named() -> None:
    reference = outputs(Arm.OFF, ((1, 2, 3), (4, 5, 6), (7, 8), (9,)))
    found = compare(reference, outputs(Arm.FIXED, ((1, 2, 3), (4, 0, 6), (7, 8, 9), (9,))), "raw/x.json")
    assert (found.greedy_prompts, found.greedy_equal, found.greedy_tokens) == (4, 2, 10)
    assert found.first_difference == {1: 1, 2: 2}


def test_it_is_the_chi_square_test_where_nothing_is_rare() -> None:
    ours, theirs = [1] * 40 + [2] * 60, [1] * 55 + [2] * 45
    expected = chi2_contingency([[40, 60], [55, 45]], correction=False).pvalue
    assert homogeneity(ours, theirs) == pytest.approx(expected)


def test_rare_tokens_are_counted_as_one() -> None:
    ours = [1] * 50 + list(range(100, 110))
    theirs = [1] * 40 + list(range(200, 220))
    expected = chi2_contingency([[50, 10], [40, 20]], correction=False).pvalue
    assert homogeneity(ours, theirs) == pytest.approx(expected)


@given(st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 5), max_size=40))
def test_it_is_a_probability_whatever_was_sampled(ours: list[int], theirs: list[int]) -> None:
    assert 0 <= homogeneity(ours, theirs) <= 1
    assert homogeneity(ours, ours) == pytest.approx(1)


def test_one_distribution_is_rarely_taken_for_two_and_two_often() -> None:
    draws = random.Random(3)
    weights = [1 / rank for rank in range(1, 60)]
    shifted = [weight * (2 if rank < 3 else 1) for rank, weight in enumerate(weights)]

    def sample(of: list[float]) -> list[int]:
        return draws.choices(range(len(of)), of, k=512)

    same = [homogeneity(sample(weights), sample(weights)) for _ in range(300)]
    assert 0.01 < Counter(p < 0.05 for p in same)[True] / 300 < 0.1
    assert 0.4 < sum(same) / 300 < 0.6
    assert sum(homogeneity(sample(weights), sample(shifted)) < 0.05 for _ in range(50)) > 35
