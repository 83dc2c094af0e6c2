"""`python -m tests.bench.micro_ranking`: ranking, `reallocate_drafts` and planning, by upstream's code and by ours.

Both managers of the installed vLLM, with a budget of half the drafts, take turns in one process. Prints a JSON line a
batch size: microseconds until the device is done, until the host may go on, and of device time alone. Before that it
compares what they admit where no two drafts tie.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")
if not ON_GPU:
    import vllm.v1.worker.cpu.shm  # noqa: F401 (stands in for streams and events)

from vllm.distributed import parallel_state  # noqa: E402
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as upstream  # noqa: E402

from tests.bench.alternating import microseconds  # noqa: E402

BATCHES = ((1, 7), (4, 7), (16, 7), (64, 7), (256, 7), (1024, 7), (1024, 16)) if ON_GPU else ((16, 7),)
"""(requests, drafts of each)"""
REPEATS = 300 if ON_GPU else 2
synchronize: Callable[[], None] = torch.cuda.synchronize if ON_GPU else lambda: None


def managers(requests: int, steps: int) -> tuple[Any, Any]:
    """Upstream's manager and ours over the same confidences."""
    from patches.manager import AdaptiveManager

    states = SimpleNamespace(
        num_speculative_steps=steps,
        device=DEVICE,
        max_num_reqs=requests,
        max_num_batched_tokens=requests * (steps + 1),
        req_id_to_index={f"r{slot}": slot for slot in range(requests)},
        num_computed_tokens_np=np.full(requests, 8, dtype=np.int32),
        prefill_len=SimpleNamespace(np=np.full(requests, 8, dtype=np.int32)),
    )
    confidences = torch.rand(requests, steps, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    both = []
    for kind in (AdaptiveManager.__mro__[1], AdaptiveManager):
        boundaries = torch.zeros(requests + 1, dtype=torch.int32, device=DEVICE)
        manager = kind(states, boundaries, num_bonus_tokens=1, max_total_logits=1 << 30)
        manager._confidence_probs.copy_(confidences)
        manager.set_cost_curves([(1, 1.0)], [(1, 1.0), (requests * (steps + 1), 1.0)])
        both.append(manager)
    return both[0], both[1]


def device_us(call: Callable[[], object]) -> float | None:
    """Time of the kernels and copies of one call."""
    if not ON_GPU:
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(50):
            call()
        synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    spent = sum(e.time_range.elapsed_us() for e in profiler.events() if e.device_type == cuda)
    return round(spent / 50, 2)


def costs(calls: dict[str, Callable[[], object]]) -> dict[str, dict[str, float | None]]:
    timed = microseconds(calls, REPEATS, synchronize)
    return {name: {**timed[name], "device_us": device_us(call)} for name, call in calls.items()}


def compare(requests: int, steps: int, plain_ranking: Callable[..., None]) -> dict[str, Any]:
    theirs, ours = managers(requests, steps)
    budget = requests * steps // 2
    ids = [f"r{slot}" for slot in range(requests)]
    slots = torch.arange(requests, device=DEVICE)
    tokens = dict.fromkeys(ids, steps + 1)
    drafts = dict.fromkeys(ids, steps)
    drafted = {i: [7] * steps for i in ids}
    ours.get_num_tokens(tokens, drafted)
    binding = replace(ours.plan, budget=budget)
    unbound = replace(ours.plan, budget=requests * steps)

    def reallocate_theirs(chosen: int) -> Any:
        theirs._batch_budget = (drafts, dict.fromkeys(ids, 1), chosen)
        return theirs.reallocate_drafts(ids, slots)

    def reallocate_ours(plan: Any) -> Any:
        ours.plan = plan
        return ours.reallocate_drafts(ids, slots)

    def alike(chosen: int, plan: Any) -> bool:
        expected = [boundaries.clone() for boundaries in reallocate_theirs(chosen)[:2]]
        # The shortcut leaves the boundaries that the runner has uploaded, where they are exact.
        ours.query_start_loc.copy_(expected[1])
        return all(torch.equal(a, b) for a, b in zip(expected, reallocate_ours(plan)[:2], strict=True))

    placeholders = replace(unbound, scheduled=unbound.scheduled + 1)
    equal = alike(budget, binding) and alike(unbound.budget, unbound) and alike(unbound.budget, placeholders)
    capacities = torch.full((requests,), steps, dtype=torch.int32, device=DEVICE)
    batch = binding.in_order(ids).reshape(-1)
    return {
        "equal": equal,
        "costs": costs(
            {
                "ranking, upstream": lambda: plain_ranking(theirs._confidence_probs, slots, capacities, budget, steps),
                "ranking and boundaries, one kernel": lambda: ours._ranking.allot(
                    ours._batches.copy_to_uva(batch), budget=budget, bonus_tokens=1
                ),
                "reallocate, upstream": lambda: reallocate_theirs(budget),
                "reallocate, ours": lambda: reallocate_ours(binding),
                "reallocate unbound, upstream": lambda: reallocate_theirs(requests * steps),
                "reallocate unbound, ours": lambda: reallocate_ours(unbound),
                "plan, upstream": lambda: theirs.get_num_tokens(tokens, drafted),
                "plan, ours": lambda: ours.get_num_tokens(tokens, drafted),
            }
        ),
    }


def main() -> None:
    plain_ranking = upstream._assign_draft_token_budget_compiled if ON_GPU else upstream._assign_draft_token_budget
    from patches.install import install

    assert {"fused-ranking", "unbound-budget-shortcut"} <= set(install().applied)
    upstream._assign_draft_token_budget_compiled = plain_ranking
    # A group of one, which needs no process group.
    parallel_state._TP = SimpleNamespace(world_size=1, broadcast_object=lambda value, **_from: value)
    for requests, steps in BATCHES:
        print(json.dumps({"requests": requests, "steps": steps, **compare(requests, steps, plain_ranking)}), flush=True)


if __name__ == "__main__":
    main()
