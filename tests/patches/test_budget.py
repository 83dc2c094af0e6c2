"""Our manager's budget against upstream's own class, on the same random batches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  (makes the GPU runner's modules importable on a CPU)

from patches.manager import AdaptiveManager

UPSTREAM = AdaptiveManager.__base__
SLOTS, STEPS, PREFILL = 16, 5, 8
BATCHES = 5_000


def make_manager(monkeypatch) -> AdaptiveManager:
    monkeypatch.setattr("patches.manager.get_tp_group", lambda: SimpleNamespace(world_size=1))
    states = SimpleNamespace(
        num_speculative_steps=STEPS,
        device=torch.device("cpu"),
        max_num_reqs=SLOTS,
        max_model_len=4096,
        max_num_batched_tokens=512,
        req_id_to_index={str(slot): slot for slot in range(SLOTS)},
        num_computed_tokens_np=np.zeros(SLOTS, dtype=np.int32),
        prefill_len=SimpleNamespace(np=np.full(SLOTS, PREFILL, dtype=np.int32)),
    )
    boundaries = torch.zeros(SLOTS + 1, dtype=torch.int32)
    return AdaptiveManager(states, boundaries, num_bonus_tokens=1, max_total_logits=1000)


def randomise(manager: AdaptiveManager, random: np.random.Generator) -> list[int]:
    """Draw confidences, costs, limits and request states; returns the slots of the batch."""
    manager._stale_confidences[manager._stale_idx].np[:] = random.choice(
        [0.0, 0.5, 0.9, 1.0, random.random()], (SLOTS, STEPS)
    )
    draft = np.sort(random.random(SLOTS + 1) * 5)
    verify = np.sort(random.random(513) * random.choice([0.1, 10, 100])) + 1
    manager.cost_tables = (draft, verify)
    manager._max_total_logits = int(random.choice([1000, 20, 4]))
    manager.req_states.num_computed_tokens_np[:] = random.integers(0, 2 * PREFILL, SLOTS)
    return random.permutation(SLOTS)[: random.integers(1, SLOTS + 1)].tolist()


def decide(method, manager, tokens, drafts):
    return method(manager, tokens, drafts), manager._batch_budget


@pytest.fixture
def manager(monkeypatch):
    return make_manager(monkeypatch)


def test_equals_upstream_wherever_there_is_no_padding(manager):
    random = np.random.default_rng(0)
    budgets = set()
    for _ in range(BATCHES):
        slots = randomise(manager, random)
        tokens, drafts = {}, {}
        for slot in slots:
            computed = manager.req_states.num_computed_tokens_np[slot]
            decoding = computed >= PREFILL
            count = int(random.integers(0, STEPS + 1)) if decoding else 0
            tokens[str(slot)] = (1 if decoding else int(random.integers(1, 8))) + count
            if count:
                drafts[str(slot)] = [7] * count
        expected = decide(UPSTREAM.get_num_tokens, manager, tokens, drafts)
        assert decide(AdaptiveManager.get_num_tokens, manager, tokens, drafts) == expected
        budgets.add(expected[1][2])
    assert len(budgets) > 20, "the batches must not all be alike"


def test_padding_takes_none_of_the_budget(manager):
    """With padding, the budget is the one that upstream chooses for the batch without it."""
    random = np.random.default_rng(1)
    padded_batches = 0
    for _ in range(BATCHES):
        slots = randomise(manager, random)
        tokens, drafts, without = {}, {}, ({}, {})
        for slot in slots:
            count = int(random.integers(0, STEPS + 1))
            padded = manager.req_states.num_computed_tokens_np[slot] < PREFILL
            tokens[str(slot)] = 1 + count
            drafts[str(slot)] = [-1 if padded else 7] * count
            without[0][str(slot)] = 1 if padded else 1 + count
            without[1][str(slot)] = [] if padded else drafts[str(slot)]
            padded_batches += bool(padded and count)
        expected = decide(UPSTREAM.get_num_tokens, manager, *without)
        assert decide(AdaptiveManager.get_num_tokens, manager, tokens, drafts) == expected
    assert padded_batches > BATCHES
