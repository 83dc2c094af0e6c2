"""tp-consensus: every tensor-parallel rank plans a step from rank 0's acceptance estimates.

Upstream lets each rank choose its own budget. The estimates behind it, `DSparkSpeculator`'s confidence head or the
`OnlineAcceptanceEstimator`, come out of that rank's own floating point arithmetic, and ranks do not compute the same
bits: an all-reduce may sum in another order, and the estimator refits itself on each rank. One bit is enough to
move a budget by one token or a boundary by one request; the ranks then enter the next collective with different
shapes and hang there, or read each other's rows.

Here rank 0's estimates overwrite every other rank's before `AdaptiveVerificationManager.record_confidences` scatters
them and starts their copy to the host. That is the one place through which they enter, whichever of the two made
them and in every release. It is one broadcast of [requests, steps] floats on the device, in stream order behind the
drafter and before the ranking: the host waits for nothing.

Why this suffices. Budget and boundaries are functions of these inputs, and each is the same on every rank:

- the estimates: shared here, so the device's copy and both stale host copies are the same bits. Which host copy a
  budget reads is decided by counting steps (its event is waited for, never asked), so it is the same one;
- the value 1.0 of fresh requests: written by `add_request`, which follows the scheduler's output, as do the slots;
- the cost tables: `set_cost_curves` already broadcasts the curves from rank 0, and the sizes are configuration;
- scheduled tokens, drafts, `num_computed_tokens_np` and `prefill_len`: the scheduler's output, sent to all ranks;
- the arithmetic of the budget: float64 on the host, in a fixed order, argmax taking the first among equals;
- the ranking: this is where equal inputs were not enough. Estimates tie often (fresh requests at 1.0, saturated
  sigmoids, bfloat16 heads), and `torch.topk`, which upstream ranks with, promises nothing about which of tied
  elements it returns, nor the same ones twice. So where there are several ranks a stable sort takes its place:
  among equals the earlier request wins, then the earlier position, everywhere. Where one kernel does the ranking
  (`patches.ranking`), it keeps the same order.

Measured on two H200 (4 to 256 requests, 7 drafts each): 43 us of host time a step for the broadcast, and 35 us more
for the ranking, in steps that rank. A single rank pays neither.

Delete this when upstream shares its estimates and ranks with a stable order (#56831).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from patches.install import Hook

PATCH_ID = "tp-consensus"

Ranking = Callable[..., None]
"""Called as upstream calls `_assign_draft_token_budget`."""


def share_estimates(estimates: torch.Tensor, requests: int) -> None:
    """Overwrite the estimates of this tensor-parallel rank with rank 0's, in place and in stream order.

    A collective: every rank of the group calls it in every step that drafts. Does nothing in a group of one.

    Args:
        estimates: [max requests, steps] acceptance probabilities, contiguous, on the device.
        requests: Rows in use, the first ones.
    """
    from vllm.distributed.parallel_state import get_tp_group

    get_tp_group().broadcast(estimates[:requests], src=0)


def admit_best_drafts(
    estimates: torch.Tensor, slots: torch.Tensor, capacities: torch.Tensor, budget: int, steps: int
) -> None:
    """Admit the `budget` drafts of highest survival probability; ties go to the earlier request and position.

    Several ranks use it instead of `adaptive_verification._assign_draft_token_budget`. Survival never rises along a
    request, so what is admitted of one is always a prefix.

    Args:
        estimates: [max requests, steps] acceptance probabilities by request slot.
        slots: [requests] the slots of the batch.
        capacities: [requests] drafts that may be admitted; on return, drafts admitted.
        budget: Drafts to admit, at most the sum of `capacities`.
        steps: Longest draft.
    """
    survival = estimates[slots].cumprod(dim=1)
    positions = torch.arange(steps, device=survival.device)
    survival = survival.masked_fill(positions >= capacities[:, None], -1.0)
    order = survival.flatten().sort(descending=True, stable=True).indices
    admitted = torch.zeros_like(order, dtype=capacities.dtype).index_fill_(0, order[:budget], 1)
    torch.sum(admitted.view_as(survival), dim=1, dtype=capacities.dtype, out=capacities)


def _rank_in_one_order(adaptive_module: ModuleType) -> None:
    """Put our ranking beside upstream's, and compile it the way upstream compiles its own."""
    module: Any = adaptive_module
    module._assign_draft_token_budget = _by_group_size(admit_best_drafts, module._assign_draft_token_budget)
    module._assign_draft_token_budget_compiled = _by_group_size(
        torch.compile(admit_best_drafts, dynamic=True), module._assign_draft_token_budget_compiled
    )


def _by_group_size(of_several: Ranking, of_one: Ranking) -> Ranking:
    """A ranking that is `of_several` where several ranks must agree, and `of_one` otherwise."""

    def rank(*arguments: Any) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        (of_several if get_tp_group().world_size > 1 else of_one)(*arguments)

    return rank


HOOKS: Mapping[str, Hook] = {"vllm.v1.worker.gpu.spec_decode.adaptive_verification": _rank_in_one_order}
