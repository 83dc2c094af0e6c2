"""What a profile says of a step, worked out by hand and recovered from steps of known costs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches import step_costs
from patches.budget import CostTables, choose_budget, survival_probabilities
from tests.patches.test_budget import SLOTS, STEPS, make_manager

WIDTH = STEPS + 1
CAPTURED = [1, 2, 4, *range(8, 97, 8)]
BEYOND = (144, 192)
CONTEXT, LONGEST = 8192, 1200
"""Upstream's context, and what requests of the model can have."""
CONTEXT_MS, TOKEN_MS, EAGER_MS = 0.5, 0.01, 6.0
"""What a request's context adds, what a token adds, and what a step without a graph adds."""


def true_ms(tokens: int, contexts: float) -> float:
    return 5.0 + CONTEXT_MS * contexts + TOKEN_MS * tokens + EAGER_MS * (tokens > CAPTURED[-1])


def upstreams_batches():
    return [{"num_tokens": tokens, "context_len": CONTEXT} for tokens in (*CAPTURED, *BEYOND) for _ in range(5)]


def run(batch: dict) -> SimpleNamespace:
    """A sample as upstream's `_dummy_run` makes it: as many requests as tokens, contexts no longer than can be."""
    tokens, context = batch["num_tokens"], min(batch["context_len"], LONGEST)
    requests = min(tokens, SLOTS)
    return SimpleNamespace(
        num_target_tokens=tokens,
        num_reqs=requests,
        forward_ms=true_ms(tokens, requests * context / LONGEST),
        drafter_ms=1.0 + 0.05 * requests * context / LONGEST,
        full_cudagraph=tokens <= CAPTURED[-1],
    )


def profile(*, shares_context: bool = True):
    batches = list(
        step_costs.profiled_batches(
            upstreams_batches(), CAPTURED, width=WIDTH, longest_context=LONGEST, shares_context=shares_context
        )
    )
    return batches, step_costs.cost_curves(map(run, batches), batches, CAPTURED)


def test_captured_sizes_run_with_both_contexts_and_the_rest_with_upstreams():
    batches, _ = profile()
    long = {b["num_tokens"] for b in batches if b["context_len"] == LONGEST}
    short = {b["num_tokens"] for b in batches if b["context_len"] == LONGEST // WIDTH}
    assert {1, 2, 4, 8, 96, *BEYOND} <= long <= {*CAPTURED, *BEYOND}
    assert short == long - set(BEYOND)
    assert all(b <= a * 9 / 8 for a, b in itertools.pairwise(sorted(short)) if a >= 64)
    assert {b["context_len"] for b in batches} == {LONGEST, LONGEST // WIDTH}
    assert len(batches) < len(upstreams_batches()) * 1.2


def test_costs_of_any_step_are_recovered():
    """Also of sizes between those that were profiled."""
    _, (draft, verify) = profile()
    by_requests, by_tokens = dict(draft), dict(verify)
    assert sorted(by_tokens) == [*CAPTURED, *BEYOND]
    for tokens, requests in ((16, 16), (96, 16), (40, 8), (88, 16), (24, 4), (192, 16)):
        assert by_requests[requests] + by_tokens[tokens] == pytest.approx(
            1.0 + 0.05 * requests + true_ms(tokens, requests)
        )


def test_where_every_token_reads_a_context_upstreams_batches_stay():
    batches, (_, verify) = profile(shares_context=False)
    assert {b["context_len"] for b in batches} == {LONGEST}
    assert dict(verify)[8] == pytest.approx(true_ms(8, 8))


REQUESTS, CONFIDENCE = 4, 0.4


def padded(tokens: int) -> int:
    return next(size for size in CAPTURED if size >= tokens)


def budget(costs: CostTables) -> int:
    """Of a batch of `REQUESTS`, all drafts equally good."""
    return choose_budget(
        survival_probabilities(np.full((REQUESTS, STEPS), CONFIDENCE)),
        np.full(REQUESTS, STEPS),
        sampling_requests=REQUESTS,
        other_tokens=REQUESTS,
        max_budget=1000,
        costs=costs,
    )


def priced_manager(monkeypatch):
    """The real manager, with the patch."""
    manager = make_manager(monkeypatch)
    manager.req_states.max_model_len = LONGEST + WIDTH
    manager._prices_requests = True
    alone = SimpleNamespace(world_size=1, broadcast_object=lambda value, **_from: value)
    monkeypatch.setattr("vllm.distributed.parallel_state._TP", alone)
    return manager


def test_upstreams_profile_prices_contexts_where_there_are_only_drafts(monkeypatch):
    """The real manager profiles, builds its tables and plans, with the patch and without."""
    manager = priced_manager(monkeypatch)
    manager._shares_context = True
    budgets = {}
    for priced in (False, True):
        manager._prices_requests = priced
        manager.set_initial_cost_curves([run(batch) for batch in manager.batches_to_profile(CAPTURED)])
        budgets[priced] = budget(CostTables(*manager.cost_tables))
    drafting = np.array([1.0 + 0.05 * requests for requests in range(SLOTS + 1)])
    verifying = np.array([true_ms(padded(tokens), REQUESTS) for tokens in range(97)])
    assert budgets[True] == budget(CostTables(drafting, verifying)) == REQUESTS * STEPS
    assert budgets[False] == REQUESTS, "one draft each"


def test_a_profile_without_graphs_prices_no_drafting():
    """Upstream's `set_cost_curves` says then what to do."""
    batch = {"num_tokens": 144, "context_len": 9}
    assert step_costs.cost_curves([run(batch)], [batch], []) == ([], [(144, run(batch).forward_ms)])
    assert step_costs.cost_curves([], [], []) == ([], [])


def test_a_profile_that_timed_nothing_ends_with_upstreams_own_message(monkeypatch):
    manager = priced_manager(monkeypatch)
    assert list(manager.batches_to_profile(CAPTURED))
    with pytest.raises(RuntimeError, match="could not profile step costs"):
        manager.set_initial_cost_curves([])


def test_samples_of_other_batches_are_refused():
    batch = {"num_tokens": 144, "context_len": 9}
    with pytest.raises(ValueError, match="longer"):
        step_costs.cost_curves([run(batch)], [batch, batch], [])


@pytest.mark.parametrize(
    ("text_config", "shares"), [(SimpleNamespace(), True), (SimpleNamespace(index_topk=2048), False), (None, False)]
)
def test_contexts_are_shared_where_the_model_is_known_to_have_no_sparse_indexer(monkeypatch, text_config, shares):
    """Nothing is claimed of a model that is not known."""
    config = text_config and SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text_config))
    monkeypatch.setattr("patches.manager.get_current_vllm_config_or_none", lambda: config)
    manager = priced_manager(monkeypatch)
    contexts = {batch["context_len"] for batch in manager.batches_to_profile(CAPTURED)}
    assert contexts == ({LONGEST, LONGEST // WIDTH} if shares else {LONGEST})


def test_what_a_context_adds_is_the_middle_of_what_sizes_say():
    sizes = [[(1, 5.0), (8, 5.7)], [(2, 5.0), (16, 6.4)], [(4, 5.0), (32, 90.0)], [(7, 5.0)]]
    assert step_costs.added_by_a_context(sizes[:2]) == pytest.approx(0.1)
    assert step_costs.added_by_a_context([*sizes[:2], [(4, 5.0), (16, 6.2)], sizes[2]]) < 1, "a disturbed size"
    assert step_costs.added_by_a_context([[(1, 5.0), (8, 4.0)]]) == 0, "a context costs nothing less"
    assert step_costs.added_by_a_context([[(7, 5.0)]]) == 0


def test_a_disturbed_point_prices_nothing_but_itself():
    """As recorded on an H200 at 1,312 to 1,424 tokens; a running maximum says 22.1 from 1,344 on."""
    recorded = [19.5, 19.6, 22.1, 20.0, 20.6, 20.4, 22.1, 20.8]
    risen = step_costs.rising(recorded)
    assert risen == pytest.approx([19.5, 19.6, 20.5, 20.5, 20.5, 20.5, 21.45, 21.45])


@given(st.lists(st.floats(0, 100), max_size=30))
def test_pooled_points_never_fall_and_rising_ones_stay(values):
    risen = step_costs.rising(values)
    assert len(risen) == len(values)
    assert risen == sorted(risen)
    assert step_costs.rising(sorted(values)) == sorted(values)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_no_other_rising_points_are_closer(values):
    """Least absolute distance has a solution among the values themselves: all of them are tried."""

    def distance(candidate) -> float:
        return sum(abs(a - b) for a, b in zip(values, candidate, strict=True))

    best = min(map(distance, itertools.combinations_with_replacement(sorted(set(values)), len(values))))
    assert distance(step_costs.rising(values)) == pytest.approx(best)
