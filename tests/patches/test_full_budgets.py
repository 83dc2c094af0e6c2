"""Which budgets may exceed the sampler's chunk, by the real manager; that sampling is right, the engine shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patches.budget import CostTables, choose_budget, full_budget, survival_probabilities
from patches.full_budgets import can_be_chunked, write_ends
from patches.modes import Mode
from tests.patches.test_budget import PREFILL, SLOTS, STEPS, make_manager

REQUESTS, FRESH = 8, 2
"""Requests of the batch, and how many of them enter decoding with placeholder drafts."""
FLAT = (np.ones(SLOTS + 1), np.ones(513))
"""Verifying is free, so that every draft is wanted."""


@pytest.fixture(params=[True, False], ids=["on", "off"])
def manager(request, monkeypatch):
    made = make_manager(monkeypatch)
    made._chunks_full_budgets = request.param
    made._max_total_logits = 20
    made.cost_tables = FLAT
    made.req_states.num_computed_tokens_np[:] = PREFILL
    made.req_states.num_computed_tokens_np[:FRESH] = PREFILL - 1
    return made


def prepared(manager):
    """The batch's order, and where the host and the device say that its logits end; drafts as they were scheduled."""
    ids = [str(slot) for slot in range(REQUESTS)]
    drafts = {i: [-1 if int(i) < FRESH else 7] * STEPS for i in ids}
    manager.get_num_tokens(dict.fromkeys(ids, STEPS + 1), drafts)
    order = ids[::-1]
    scheduled = np.full(REQUESTS, STEPS, dtype=np.int32)
    ends = np.arange(REQUESTS + 1, dtype=np.int32) * (STEPS + 1)
    _, ends = manager.compact_batch(scheduled, scheduled + 1, ends)
    device, *_ = manager.reallocate_drafts(order, torch.arange(REQUESTS).flip(0))
    return ends, device


@pytest.mark.parametrize("mode", Mode)
def test_a_full_budget_exceeds_the_chunk_and_the_host_knows_its_ends(manager, mode):
    manager.mode = mode
    ends, device = prepared(manager)
    everything = (REQUESTS - FRESH) * STEPS
    if manager._chunks_full_budgets:
        assert manager.plan.budget == everything
        assert ends.tolist() == device.tolist() == [0, 6, 12, 18, 24, 30, 36, 37, 38]
        assert can_be_chunked(rows=everything + REQUESTS, ends=ends, limit=20)
    else:
        assert manager.plan.budget == 20 - REQUESTS


def test_a_budget_of_none_keeps_its_ends(manager):
    """More requests than a chunk has rows: upstream then verifies nothing, and the plain sampler samples."""
    manager._max_total_logits = 4
    manager.cost_tables = (np.ones(SLOTS + 1), np.where(np.arange(513) > REQUESTS, 1e9, 1.0))
    ends, device = prepared(manager)
    assert manager.plan.budget == 0
    assert ends.tolist() == device.tolist() == list(range(REQUESTS + 1))


def test_only_an_untrimmed_batch_of_several_chunks_is_cut():
    ends = np.array([0, 6, 12, 18], dtype=np.int32)
    assert can_be_chunked(rows=18, ends=ends, limit=17)
    assert not can_be_chunked(rows=18, ends=ends, limit=18), "one chunk holds it"
    assert not can_be_chunked(rows=17, ends=ends, limit=12), "trimmed: the host does not know where"


def test_ends_are_written_in_place():
    ends = np.full(4, 9, dtype=np.int32)
    write_ends(np.array([1, 6, 3], dtype=np.int32), ends)
    assert ends.tolist() == [0, 1, 7, 10]


def test_what_lies_between_the_chunk_and_everything_is_never_chosen():
    """Steep costs, drafts that survive ever less: the best of the two ranges, found by trying all."""
    random = np.random.default_rng(0)
    chosen = set()
    for _ in range(2000):
        requests = int(random.integers(1, 9))
        eligible = random.integers(0, STEPS + 1, requests)
        survival = survival_probabilities(random.uniform(0.3, 1, (requests, STEPS)))
        limit = int(random.integers(0, requests * STEPS + 1))
        costs = CostTables(np.ones(9), 1 + np.cumsum(random.uniform(0, 0.3, 60)))
        facts = {"sampling_requests": requests, "other_tokens": requests, "max_budget": limit, "costs": costs}
        budget = choose_budget(survival, eligible, full_is_allowed=True, **facts)
        scores = sorted((survival[r, s] for r in range(requests) for s in range(eligible[r])), reverse=True)
        allowed = {*range(full_budget(eligible, limit) + 1), full_budget(eligible, None)}
        rates = {k: (requests + sum(scores[:k])) / (1 + costs.verify_ms[requests + k]) for k in allowed}
        assert budget in allowed
        assert rates[budget] >= max(rates.values()) - 1e-9
        chosen.add((budget > limit) + (budget == limit) * 2)
    assert chosen == {0, 1, 2}
