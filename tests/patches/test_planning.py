"""Budget and admission against brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from patches.admission import eligible_drafts
from patches.budget import CostTables, choose_budget, full_budget, survival_probabilities

STEPS = 5


@st.composite
def batches(draw: st.DrawFn) -> tuple[NDArray, NDArray, int, int, int, CostTables]:
    requests = draw(st.integers(1, 8))
    confidences = np.array(
        draw(st.lists(st.lists(st.floats(0, 1), min_size=STEPS, max_size=STEPS), min_size=requests, max_size=requests))
    )
    eligible = np.array(draw(st.lists(st.integers(0, STEPS), min_size=requests, max_size=requests)))
    other_tokens = draw(st.integers(requests, 40))
    sampling = draw(st.integers(0, requests))
    max_budget = draw(st.integers(-3, requests * STEPS))
    rises = draw(st.lists(st.floats(0, 5), min_size=100, max_size=100))
    costs = CostTables(np.full(requests + 1, draw(st.floats(0.1, 10))), 1.0 + np.cumsum(rises))
    return survival_probabilities(confidences), eligible, sampling, other_tokens, max_budget, costs


@given(batches())
def test_no_other_budget_yields_more(batch: tuple) -> None:
    survival, eligible, sampling, other_tokens, max_budget, costs = batch
    budget = choose_budget(
        survival, eligible, sampling_requests=sampling, other_tokens=other_tokens, max_budget=max_budget, costs=costs
    )
    scores = sorted((survival[r, s] for r in range(len(eligible)) for s in range(eligible[r])), reverse=True)
    limit = min(len(scores), max(0, max_budget))
    rates = [
        (sampling + sum(scores[:k])) / (costs.draft_ms[len(eligible)] + costs.verify_ms[other_tokens + k])
        for k in range(limit + 1)
    ]
    assert 0 <= budget <= limit
    assert rates[budget] >= max(rates) - 1e-9


@pytest.mark.parametrize(
    ("eligible", "max_budget", "budget"), [([5, 0, 3], 100, 8), ([5, 0, 3], 8, 8), ([5, 5], 7, 7), ([5], -3, 0)]
)
def test_fixed_verifies_every_draft_that_the_sampler_takes(eligible: list[int], max_budget: int, budget: int) -> None:
    assert full_budget(np.array(eligible), max_budget) == budget


@given(st.lists(st.lists(st.floats(0, 1), min_size=STEPS, max_size=STEPS), min_size=1, max_size=8))
def test_survival_never_rises_along_a_request(confidences: list) -> None:
    given_confidences = np.array(confidences, dtype=np.float32)
    survival = survival_probabilities(given_confidences)
    assert (np.diff(survival, axis=1) <= 0).all()
    assert (survival[:, 0] == given_confidences[:, 0]).all()


def test_broken_confidences_admit_nothing_and_leave_the_others_alone() -> None:
    survival = survival_probabilities(np.array([[np.nan, 0.9], [1.5, 0.5], [-0.1, 1.0]]))
    assert survival.tolist() == [[0.0, 0.0], [1.0, 0.5], [0.0, 0.0]]


def test_drafts_of_a_step_that_starts_within_the_prefill_are_padding() -> None:
    rows = [
        # scheduled drafts, scheduled tokens, computed, prefill -> eligible
        (5, 6, 20, 21, 0),  # the last prompt token, padded with five drafts: cached prompt or one-token prompt
        (5, 6, 0, 1, 0),
        (5, 6, 21, 21, 5),  # first step after the prefill
        (3, 4, 40, 21, 3),
        (0, 7, 0, 7, 0),  # a prefill without drafts
    ]
    drafts, tokens, computed, prefill, expected = map(np.array, zip(*rows, strict=True))
    assert eligible_drafts(drafts, tokens, computed, prefill).tolist() == expected.tolist()


def test_padding_takes_no_budget_from_real_drafts() -> None:
    """Upstream ranks a fresh request's padding first, since its confidence is 1.0."""
    survival = survival_probabilities(np.array([[0.9] * STEPS, [1.0] * STEPS]))
    flat = CostTables(np.zeros(3), np.where(np.arange(100) <= 8, 1.0, 1e9))
    budget = choose_budget(survival, np.array([5, 0]), sampling_requests=2, other_tokens=2, max_budget=10, costs=flat)
    assert budget == 5
