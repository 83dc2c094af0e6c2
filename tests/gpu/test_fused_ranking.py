"""The ranking kernel on a Hopper GPU, in both its ways of being launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.patches.ranking_reference import best, ends, random_batch, random_confidences, survivals


def on_the_device(size: int) -> Callable[[Any], Any]:
    """Copied to the device before the launch."""
    import torch

    return lambda batch: torch.from_numpy(batch).cuda()


def where_the_host_wrote(size: int) -> Callable[[Any], Any]:
    """Read through upstream's `UvaBufferPool`, as the manager has it."""
    import torch

    buffers = pytest.importorskip("vllm.v1.worker.gpu.buffer_utils", reason="vLLM is not on the path")
    return buffers.UvaBufferPool(size, torch.int32).copy_to_uva


@pytest.mark.parametrize("way", [on_the_device, where_the_host_wrote])
@pytest.mark.parametrize(("slots", "steps"), [(1, 1), (16, 7), (70, 5), (256, 7), (1024, 16)])
def test_it_admits_and_adds_up_as_the_reference_does(slots, steps, way):
    import torch

    from patches.ranking import Ranking

    rng = np.random.default_rng(slots)
    table = torch.empty(slots, steps, device="cuda")
    logit_ends = torch.full((slots + 1,), 77, dtype=torch.int32, device="cuda")
    token_ends = torch.full((slots + 1,), 77, dtype=torch.int32, device="cuda")
    ranking = Ranking(table, logit_ends, token_ends)
    bring = way(3 * slots)
    for _ in range(400 if slots < 1000 else 40):
        requests = int(rng.integers(1, slots + 1))
        confidences = random_confidences(rng, slots, steps)
        table.copy_(torch.from_numpy(confidences))
        batch = random_batch(rng, slots, steps, requests)
        where, drafts, others = batch
        budget = int(rng.integers(0, drafts.sum() + 1))
        ranking.allot(bring(batch.reshape(-1)), budget=budget, bonus_tokens=1)
        expected = best(survivals(confidences[where]), drafts, budget)
        assert ranking.admitted[:requests].tolist() == expected.tolist()
        assert logit_ends[: requests + 1].tolist() == ends(expected + 1)
        tokens = ends(expected + others)
        assert token_ends.tolist() == tokens + [tokens[-1]] * (slots - requests)
