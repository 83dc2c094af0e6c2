"""The one manager that chooses how many drafts a step verifies.

Upstream's `AdaptiveVerificationManager` counts the scheduler's padding among the drafts. A fresh request has a
confidence of 1.0, so its K padded drafts rank first: the step verifies tokens that do not exist and refuses real
ones for it. Here padding is not eligible. The budget itself (`patches.budget`) follows upstream's rule; in fixed mode
(`patches.modes`) it is every eligible draft. What comes after the choice, compaction on the host and the ranking on
the device, works from the eligible counts. Estimates are first calibrated (`patches.calibration`) and made the same on
every tensor-parallel rank (`patches.consensus`). What a step costs is profiled by `patches.step_costs`, and a budget
that takes every draft may be larger than upstream allows (`patches.full_budgets`). Three stages take time off a step,
each by itself: `patches.confidence_ring`, `patches.unbound_budget`, `patches.ranking`.

Everything that changes how budgets are chosen belongs in this class, one stage a module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from patches import confidence_ring, consensus, full_budgets, ranking, step_costs, unbound_budget
from patches.admission import eligible_drafts
from patches.budget import CostTables, choose_budget, full_budget, survival_probabilities
from patches.calibration.stage import begin_calibration
from patches.host_upload import upload
from patches.install import is_applied
from patches.modes import Mode
from patches.telemetry import trace

_COUNTS_TO_HOST = "_copy_admitted_drafts_to_host"
"""Upstream's attribute, from 0.33.0 on: whether `reallocate_drafts` also copies the admitted counts to the host."""


@dataclass(frozen=True)
class StepPlan:
    """What was decided for one step."""

    budget: int
    """Drafts to verify."""
    eligible: dict[str, int]
    """Request id -> drafts that were really drafted for it."""
    mode: Mode
    """What chose the budget."""
    scheduled: int
    """Drafts scheduled, placeholders included."""
    row: dict[str, int]
    """Request id -> its row of `batch`."""
    batch: NDArray[np.int32]
    """[3, requests] slots, eligible drafts, and tokens that are not drafts."""

    def in_order(self, request_ids: Sequence[str]) -> NDArray[np.int32]:
        """`batch` with its requests in another order."""
        return self.batch.take(_counts(self.row[request_id] for request_id in request_ids), axis=1)


class AdaptiveManager(AdaptiveVerificationManager):  # type: ignore[misc]
    """Upstream's manager with eligible drafts only, and a record of what it decided."""

    mode: Mode = Mode.ADAPTIVE
    """How the next budget is chosen; `patches.modes` sets it between steps."""
    plan: StepPlan | None = None
    """The decision for the step in preparation."""
    _batch_budget: tuple[dict[str, int], dict[str, int], int] | None
    """Upstream's form of it: eligible drafts and other tokens by request id, and the budget. None once used."""
    _host_ends: NDArray[np.int32]
    """[requests + 1] where the host says that each request's logits end: the batch's own array."""
    _captured: list[int]
    """Token counts with a graph, ascending, as of the last profile."""
    _profiled: list[dict[str, Any]]
    """The batches of the last profile."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ranks = get_tp_group().world_size
        self._shares_estimates = is_applied(consensus.PATCH_ID) and ranks > 1
        self.calibration = begin_calibration(
            self.num_speculative_steps,
            self.req_states.device,
            reaches_every_rank=self._shares_estimates or ranks == 1,
        )
        slots, steps = self._confidence_probs.shape
        self._ring = (
            confidence_ring.ConfidenceRing(slots, steps, self._confidence_probs.device)
            if is_applied(confidence_ring.PATCH_ID)
            else None
        )
        # Where upstream wants the admitted counts on the host as well (0.33.0), its own chain brings them there.
        self._ranking = (
            ranking.Ranking(self._confidence_probs, self._cu_num_logits, self.query_start_loc)
            if is_applied(ranking.PATCH_ID)
            and ranking.Ranking.fits(slots, steps)
            and not getattr(self, _COUNTS_TO_HOST, False)
            else None
        )
        self._takes_shortcut = is_applied(unbound_budget.PATCH_ID)
        # The ranking reads what the host worked out where it lies, as kernels read upstream's request states. A place
        # is used again after as many writes as there can be steps under way, so at most one write a step.
        self._batches = UvaBufferPool(3 * slots, torch.int32)
        self._chunks_full_budgets = is_applied(full_budgets.PATCH_ID)
        self._prices_requests = is_applied(step_costs.PATCH_ID)
        config = get_current_vllm_config_or_none()
        # As upstream tells models with a sparse indexer. Of an unknown model nothing is claimed.
        self._shares_context = config is not None and not hasattr(config.model_config.hf_text_config, "index_topk")

    @property
    def confidence_waits(self) -> int:
        """Steps whose budget had to wait for confidences to reach the host; 0 where upstream's copies are used."""
        return 0 if self._ring is None else self._ring.waits

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, Any]]:
        """What to run, and to time, for the cost tables: arguments of `GPUModelRunner._dummy_run`.

        Args:
            capture_sizes: Token counts with a graph, ascending.
        """
        batches: Iterator[dict[str, Any]] = super().batches_to_profile(capture_sizes)
        if not self._prices_requests:
            return batches
        width = self.num_speculative_steps + self.num_bonus_tokens
        self._captured = capture_sizes
        self._profiled = list(
            step_costs.profiled_batches(
                batches,
                capture_sizes,
                width=width,
                longest_context=self.req_states.max_model_len - width,
                shares_context=self._shares_context,
            )
        )
        return iter(self._profiled)

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Plan with what a profile measured.

        Args:
            samples: Upstream's `StepTimingSample`s of `batches_to_profile`.
        """
        if self._prices_requests:
            self.set_cost_curves(*step_costs.cost_curves(samples, self._profiled, self._captured))
        else:
            super().set_initial_cost_curves(samples)

    def add_request(self, req_idx: int) -> None:
        """Forget what the slot's last owner left."""
        if self._ring is None:
            super().add_request(req_idx)
        else:
            self._ring.reset(req_idx)
            self._confidence_probs[req_idx].fill_(1.0)

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
        if self._ring is None:
            super().record_confidences(confidence_probs, input_batch)
        else:
            self._confidence_probs[input_batch.idx_mapping] = confidence_probs[: input_batch.num_reqs]
            self._ring.record(self._confidence_probs)

    def get_num_tokens(self, num_tokens_per_req: Mapping[str, int], draft_tokens: Mapping[str, Sequence[int]]) -> int:
        """Choose the step's budget; returns the tokens of the step with that many drafts.

        Takes the place of `AdaptiveVerificationManager.get_num_tokens` and leaves `_batch_budget` as upstream's
        `compact_batch` and `reallocate_drafts` expect it.

        Args:
            num_tokens_per_req: Request id -> scheduled tokens, drafts included.
            draft_tokens: Request id -> scheduled drafts.
        """
        request_ids = list(num_tokens_per_req)
        count = len(request_ids)
        states = self.req_states
        batch = np.empty((3, count), dtype=np.int32)
        slots, eligible, other_tokens = batch
        slots[:] = [states.req_id_to_index[request_id] for request_id in request_ids]
        scheduled_tokens = np.fromiter(num_tokens_per_req.values(), dtype=np.int32, count=count)
        scheduled_drafts = np.array([len(draft_tokens.get(request_id, ())) for request_id in request_ids], np.int32)
        np.subtract(scheduled_tokens, scheduled_drafts, out=other_tokens)
        computed = states.num_computed_tokens_np[slots]
        prefill = states.prefill_len.np[slots]
        eligible[:] = eligible_drafts(scheduled_drafts, scheduled_tokens, computed, prefill)
        eligible_by_id = dict(zip(request_ids, eligible.tolist(), strict=True))
        others_by_id: dict[str, int] = dict(zip(request_ids, other_tokens.tolist(), strict=True))
        num_others = sum(others_by_id.values())

        max_budget = self._max_total_logits - count * self.num_bonus_tokens
        if self.mode is Mode.FIXED:
            budget = full_budget(eligible, None if self._chunks_full_budgets else max_budget)
        else:
            assert self.cost_tables is not None
            known = self._stale_confidences[self._stale_idx].np if self._ring is None else self._ring.values
            budget = choose_budget(
                survival_probabilities(known[slots]),
                eligible,
                sampling_requests=int(np.count_nonzero(computed + other_tokens >= prefill)),
                other_tokens=num_others,
                max_budget=max_budget,
                full_is_allowed=self._chunks_full_budgets,
                costs=CostTables(*self.cost_tables),
            )
        self.plan = StepPlan(
            budget,
            eligible_by_id,
            self.mode,
            scheduled=int(scheduled_drafts.sum()),
            row={request_id: row for row, request_id in enumerate(request_ids)},
            batch=batch,
        )
        self._batch_budget = (eligible_by_id, others_by_id, budget)
        return num_others + budget

    def compact_batch(
        self,
        num_draft_tokens_per_req: NDArray[np.int32],
        num_scheduled_tokens: NDArray[np.int32],
        cu_num_logits_np: NDArray[np.int32],
    ) -> Any:
        """Upstream's; keeps hold of the host's logit ends, which `reallocate_drafts` may have to correct."""
        result = super().compact_batch(num_draft_tokens_per_req, num_scheduled_tokens, cu_num_logits_np)
        self._host_ends = result[1]
        return result

    def live_confidences(self, slots: Any) -> Any:
        """[requests, steps] a copy of what the ranking goes by, on the device.

        Args:
            slots: [requests] the slots of the batch, on the device.
        """
        return self._confidence_probs.index_select(0, slots)

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: Any) -> Any:
        """Split the budget among the requests and write the boundaries that follow.

        Takes the place of `AdaptiveVerificationManager.reallocate_drafts` where a patch is on that does it faster.

        Args:
            req_ids: The batch, in order.
            idx_mapping: [requests] its slots, on the device.

        Returns:
            As upstream's: logit boundaries [requests + 1], token boundaries [max requests + 1], the budget, and in
            releases that have it None for counts that are not on their way to the host.
        """
        plan = self.plan
        assert plan is not None
        bonus = self.num_bonus_tokens
        eligible = sum(plan.eligible.values())
        needs_chunks = plan.budget > 0 and plan.budget + len(req_ids) * bonus > self._max_total_logits
        if needs_chunks and not getattr(self, _COUNTS_TO_HOST, False):
            full_budgets.write_ends(plan.in_order(req_ids)[1] + bonus, self._host_ends)
        if self._takes_shortcut and unbound_budget.split_is_known(budget=plan.budget, eligible=eligible):
            _, drafts, others = plan.in_order(req_ids)
            admitted = drafts if plan.budget else np.zeros_like(drafts)
            logit_ends = unbound_budget.running_sums(admitted + bonus)
            upload(logit_ends, self._cu_num_logits[: logit_ends.size])
            if not unbound_budget.host_boundaries_are_exact(budget=plan.budget, scheduled=plan.scheduled):
                boundaries = self.query_start_loc
                token_ends = unbound_budget.padded_boundaries(admitted + others, boundaries.shape[0] - 1)
                upload(token_ends, boundaries)
            result = self._boundaries(len(req_ids), plan.budget)
        elif self._ranking is not None:
            batch = self._batches.copy_to_uva(plan.in_order(req_ids).reshape(-1))
            self._ranking.allot(batch, budget=plan.budget, bonus_tokens=bonus)
            result = self._boundaries(len(req_ids), plan.budget)
        else:
            result = super().reallocate_drafts(req_ids, idx_mapping)
        if getattr(self, _COUNTS_TO_HOST, False) and 0 < plan.budget == eligible < plan.scheduled:
            result = (*result[:3], self._counts_on_host(plan.in_order(req_ids)[1]))
        if trace.enabled():
            trace.record_ranking(
                req_ids,
                budget=plan.budget,
                eligible=[plan.eligible[req_id] for req_id in req_ids],
                confidences=self._confidence_probs[idx_mapping],
                admitted=result[0].diff() - bonus,
            )
        return result

    def _counts_on_host(self, admitted: NDArray[np.int32]) -> Any:
        """Upstream's `AdmittedDraftCounts` of a split that the host knows.

        Upstream leaves them out where the budget takes every draft and reads what was scheduled instead, but that
        includes placeholders, which are not verified here: every rank would expect more logits than there are.
        """
        from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdmittedDraftCounts

        # An event that was never recorded is not waited for.
        return AdmittedDraftCounts(torch.from_numpy(admitted), torch.cuda.Event())

    def _boundaries(self, requests: int, budget: int) -> tuple[Any, ...]:
        """What upstream's `reallocate_drafts` returns, and the state it leaves."""
        self._batch_budget = None
        result = (self._cu_num_logits[: requests + 1], self.query_start_loc, budget)
        return (*result, None) if hasattr(self, _COUNTS_TO_HOST) else result


def _counts(values: Any) -> NDArray[np.int32]:
    return np.fromiter(values, dtype=np.int32)
