from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patches import consensus
from patches.consensus import admit_best_drafts
from patches.install import vllm_release


@st.composite
def batches(draw):
    requests, steps = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    quarters = st.lists(st.integers(0, 4), min_size=steps, max_size=steps)
    estimates = np.array([draw(quarters) for _ in range(requests)], dtype=np.float32) / 4
    capacities = [draw(st.integers(0, steps)) for _ in range(requests)]
    return estimates, capacities, draw(st.integers(0, sum(capacities)))


@given(batches())
def test_admits_the_best_and_breaks_ties_by_request_then_position(batch):
    estimates, capacities, budget = batch
    requests, steps = estimates.shape
    survival = np.cumprod(estimates, axis=1)
    ranked = sorted((-survival[r, s], r, s) for r in range(requests) for s in range(steps) if s < capacities[r])
    expected = np.bincount([r for _, r, _ in ranked[:budget]], minlength=requests)

    slots = np.random.default_rng(0).permutation(requests + 3)[:requests]
    by_slot = torch.full((requests + 3, steps), 1.0)
    by_slot[slots] = torch.from_numpy(estimates)
    admitted = torch.tensor(capacities, dtype=torch.int32)
    admit_best_drafts(by_slot, torch.from_numpy(slots), admitted, budget, steps)
    assert admitted.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["_assign_draft_token_budget", "_assign_draft_token_budget_compiled"])
@pytest.mark.parametrize(("ranks", "whose"), [(1, "upstream's"), (2, "ours")])
def test_only_several_ranks_pay_for_the_order(name, ranks, whose, monkeypatch):
    called = []
    upstream = SimpleNamespace(
        _assign_draft_token_budget=lambda *_: called.append("upstream's"),
        _assign_draft_token_budget_compiled=lambda *_: called.append("upstream's"),
    )
    monkeypatch.setattr(consensus, "admit_best_drafts", lambda *_: called.append("ours"))
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: SimpleNamespace(world_size=ranks))
    (hook,) = consensus.HOOKS.values()
    hook(upstream)
    getattr(upstream, name)(None, None, None, 3, 5)
    assert called == [whose]


def test_two_ranks_with_different_estimates_choose_the_same_plan(plans_of_two_ranks):
    # An interpreted kernel would take minutes for as many steps; see below.
    first, second = plans_of_two_ranks(vllm_release(), steps=10_000, estimates="shared", off=("fused-ranking",))
    assert len(first) == 10_000
    assert (first == second).all()
    budgets = first[:, 1]
    assert np.unique(budgets).size > 10, "the steps must not all be alike"


def test_two_ranks_choose_the_same_plan_while_one_calibrates(plans_of_two_ranks, monkeypatch):
    monkeypatch.setenv("DSPARK_CALIBRATION", "on")
    first, second = plans_of_two_ranks(vllm_release(), steps=1_000, estimates="shared")
    assert (first == second).all()
    assert np.unique(first[:, 1]).size > 10, "the steps must not all be alike"


def test_one_kernel_and_no_ranking_at_all_plan_the_same(plans_of_two_ranks):
    slow = ("fused-ranking", "unbound-budget-shortcut")
    expected, _ = plans_of_two_ranks(vllm_release(), steps=150, estimates="shared", off=slow)
    for off in ((), slow[1:]):
        for rank in plans_of_two_ranks(vllm_release(), steps=150, estimates="shared", off=off):
            assert (rank == expected).all(), off


def test_two_ranks_that_keep_their_own_estimates_do_not(plans_of_two_ranks):
    first, second = plans_of_two_ranks(vllm_release(), steps=2_000, estimates="own", off=("fused-ranking",))
    agreeing = (first == second).all(axis=1)
    assert 0 < agreeing.sum() < 2_000
