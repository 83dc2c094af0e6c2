"""The one manager that chooses how many drafts a step verifies.

Upstream's `AdaptiveVerificationManager` counts the scheduler's padding among the drafts. A fresh request has a
confidence of 1.0, so its K padded drafts rank first: the step verifies tokens that do not exist and refuses real
ones for it. Here padding is not eligible. The budget itself (`patches.budget`) follows upstream's rule; in fixed mode
(`patches.modes`) it is every eligible draft. What comes after the choice, compaction on the host and the ranking on
the device, is upstream's and works from the eligible counts. Estimates are first calibrated (`patches.calibration`) and
made the same on every tensor-parallel rank (`patches.consensus`).

Everything that changes how budgets are chosen belongs in this class, one stage a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from patches import consensus
from patches.admission import eligible_drafts
from patches.budget import CostTables, choose_budget, full_budget, survival_probabilities
from patches.calibration.stage import begin_calibration
from patches.install import is_applied
from patches.modes import Mode
from patches.telemetry import trace


@dataclass(frozen=True)
class StepPlan:
    """What was decided for one step."""

    budget: int
    """Drafts to verify."""
    eligible: dict[str, int]
    """Request id -> drafts that were really drafted for it."""
    mode: Mode
    """What chose the budget."""


class AdaptiveManager(AdaptiveVerificationManager):  # type: ignore[misc]
    """Upstream's manager with eligible drafts only, and a record of what it decided."""

    mode: Mode = Mode.ADAPTIVE
    """How the next budget is chosen; `patches.modes` sets it between steps."""
    plan: StepPlan | None = None
    """The decision for the step in preparation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ranks = get_tp_group().world_size
        self._shares_estimates = is_applied(consensus.PATCH_ID) and ranks > 1
        self.calibration = begin_calibration(
            self.num_speculative_steps,
            self.req_states.device,
            reaches_every_rank=self._shares_estimates or ranks == 1,
        )

    def record_confidences(self, confidence_probs: Any, input_batch: Any) -> None:
        """Upstream's scatter and copy, of rank 0's calibrated estimates.

        Args:
            confidence_probs: [max requests, steps] this step's estimates, first the batch's.
            input_batch: The batch, in order.
        """
        if self.calibration is not None:
            confidence_probs = self.calibration.calibrated(confidence_probs[: input_batch.num_reqs])
        if self._shares_estimates:
            consensus.share_estimates(confidence_probs, input_batch.num_reqs)
        super().record_confidences(confidence_probs, input_batch)

    def get_num_tokens(self, num_tokens_per_req: Mapping[str, int], draft_tokens: Mapping[str, Sequence[int]]) -> int:
        """Choose the step's budget; returns the tokens of the step with that many drafts.

        Takes the place of `AdaptiveVerificationManager.get_num_tokens` and leaves `_batch_budget` as upstream's
        `compact_batch` and `reallocate_drafts` expect it.

        Args:
            num_tokens_per_req: Request id -> scheduled tokens, drafts included.
            draft_tokens: Request id -> scheduled drafts.
        """
        request_ids = list(num_tokens_per_req)
        scheduled_tokens = _counts(num_tokens_per_req.values())
        scheduled_drafts = _counts(len(draft_tokens.get(request_id, ())) for request_id in request_ids)
        other_tokens = scheduled_tokens - scheduled_drafts
        states = self.req_states
        slots = _counts(states.req_id_to_index[request_id] for request_id in request_ids)
        computed = states.num_computed_tokens_np[slots]
        prefill = states.prefill_len.np[slots]
        eligible = eligible_drafts(scheduled_drafts, scheduled_tokens, computed, prefill)

        max_budget = self._max_total_logits - len(request_ids) * self.num_bonus_tokens
        if self.mode is Mode.FIXED:
            budget = full_budget(eligible, max_budget)
        else:
            assert self.cost_tables is not None
            budget = choose_budget(
                survival_probabilities(self._stale_confidences[self._stale_idx].np[slots]),
                eligible,
                sampling_requests=int(np.count_nonzero(computed + other_tokens >= prefill)),
                other_tokens=int(other_tokens.sum()),
                max_budget=max_budget,
                costs=CostTables(*self.cost_tables),
            )
        eligible_by_id = dict(zip(request_ids, eligible.tolist(), strict=True))
        self.plan = StepPlan(budget, eligible_by_id, self.mode)
        self._batch_budget = (
            eligible_by_id,
            dict(zip(request_ids, other_tokens.tolist(), strict=True)),
            budget,
        )
        return int(other_tokens.sum()) + budget

    def live_confidences(self, slots: Any) -> Any:
        """[requests, steps] a copy of what the ranking goes by, on the device.

        Args:
            slots: [requests] the slots of the batch, on the device.
        """
        return self._confidence_probs.index_select(0, slots)

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: Any) -> Any:
        """Upstream's ranking on the device; traced when a trace was asked for."""
        result = super().reallocate_drafts(req_ids, idx_mapping)
        if self.plan is not None and trace.enabled():
            trace.record_ranking(
                req_ids,
                budget=self.plan.budget,
                eligible=[self.plan.eligible[req_id] for req_id in req_ids],
                confidences=self._confidence_probs[idx_mapping],
                admitted=self._batch_draft_capacity[: len(req_ids)],
            )
        return result


def _counts(values: Any) -> NDArray[np.int32]:
    return np.fromiter(values, dtype=np.int32)
