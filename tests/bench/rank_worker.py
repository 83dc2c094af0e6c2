"""What the two-rank runs add to vLLM's worker: drift, a record of every decision, and consensus on and off.

Confidences drift where they enter the manager, before it shares them, so that shared ones are what it plans from.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO, Any

from tests.bench import rank_records
from tests.bench.bench_worker import TABLES, BenchWorker


class RankWorker(BenchWorker):
    """Methods for `LLM.collective_rpc`, called on every rank."""

    def bench_watch(self) -> None:
        """As `BenchWorker.bench_watch`; from now on confidences can drift and decisions be recorded."""
        import torch
        from vllm.distributed.parallel_state import get_tp_group

        self._rank = get_tp_group().rank_in_group
        self._drift: Any = None
        self._recorder: _Recorder | None = None
        manager = self.model_runner.adaptive_verification
        record, choose, allot = manager.record_confidences, manager.get_num_tokens, manager.reallocate_drafts

        def drifted(confidences: Any, batch: Any) -> None:
            if self._drift is not None:
                # Quarters tie often, and drift breaks a tie or keeps it. A copy, since sharing writes to it.
                confidences = torch.round(confidences[: batch.num_reqs] * 4).clamp(1, 4) / 4
                confidences -= self._drift[self._bench_steps % TABLES, : batch.num_reqs]
            record(confidences, batch)

        def chosen(num_tokens_per_req: Any, draft_tokens: Any) -> int:
            tokens: int = choose(num_tokens_per_req, draft_tokens)
            if self._recorder is not None:
                self._recorder.chosen(num_tokens_per_req, manager.plan)
            return tokens

        def allotted(req_ids: Any, idx_mapping: Any) -> Any:
            result = allot(req_ids, idx_mapping)
            if self._recorder is not None:
                self._recorder.allotted(result[0], result[1][: len(req_ids) + 1])
            return result

        manager.record_confidences, manager.get_num_tokens, manager.reallocate_drafts = drifted, chosen, allotted
        super().bench_watch()

    def ranks_drift(self, amount: float) -> None:
        """From now on round confidences to quarters and lower some by `amount`, other ones on every rank; 0 ends it."""
        import torch

        table = self.model_runner.adaptive_verification._confidence_probs
        noise = torch.randint(0, 2, (TABLES, *table.shape), generator=torch.Generator().manual_seed(self._rank))
        self._drift = (amount * noise).to(table.device, table.dtype) if amount else None

    def ranks_set_costs(self, draft_curve: list[Any], verify_curve: list[Any]) -> None:
        """Plan with these curves of (size, milliseconds)."""
        curves = [[(int(size), float(ms)) for size, ms in curve] for curve in (draft_curve, verify_curve)]
        self.model_runner.adaptive_verification.set_cost_curves(*curves)

    def ranks_share(self, shares: bool) -> None:
        """Switch consensus: between steps, so that all ranks share the next step's confidences or none does."""
        self.model_runner.adaptive_verification._shares_estimates = shares

    def ranks_record(self, folder: str | None, every: int) -> None:
        """Write every decision from now on to this rank's file in `folder`; None ends it.

        Args:
            folder: An existing directory.
            every: Steps that are written at once. More than 1 leaves host and device running side by side; with 1 a
                step is on file before any collective of its own.
        """
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = None
        if folder is not None:
            states = self.model_runner.req_states
            file = rank_records.record_file(Path(folder), self._rank).open("wb", buffering=0)
            self._recorder = _Recorder(file, states.max_num_reqs, every, states.device)

    def ranks_time_broadcast(self) -> None:
        """Time every broadcast from now on."""
        from patches import consensus

        share, self._broadcasts = consensus.share_estimates, _Broadcasts()

        def timed(*arguments: Any) -> None:
            self._broadcasts.time(share, *arguments)

        consensus.share_estimates, self._share = timed, share

    def ranks_broadcast_times(self) -> dict[str, list[float]]:
        """End it; microseconds of each: `host` until the host may go on, `device`, where there is one, until done."""
        from patches import consensus

        consensus.share_estimates = self._share
        return self._broadcasts.microseconds()


class _Recorder:
    """Rows of `rank_records`. Boundaries are kept on the device until rows are written."""

    def __init__(self, file: IO[bytes], max_requests: int, every: int, device: Any) -> None:
        import numpy as np
        import torch

        self._file, self._ends = file, max_requests + 1
        self._rows = np.zeros((every, rank_records.width(max_requests)), dtype=np.int64)
        self._boundaries = torch.zeros((every, 2 * self._ends), dtype=torch.int32, device=device)
        self._filled = 0

    def chosen(self, request_ids: Any, plan: Any) -> None:
        """Begin a row: a step whose budget was chosen."""
        if self._filled == len(self._rows):
            self._write()
        row = self._rows[self._filled]
        row[rank_records.REQUESTS] = len(request_ids)
        row[rank_records.BATCH] = rank_records.checksum(request_ids)
        row[rank_records.ELIGIBLE] = sum(plan.eligible.values())
        row[rank_records.BUDGET] = plan.budget
        self._filled += 1

    def allotted(self, logit_ends: Any, token_ends: Any) -> None:
        """The last row's boundaries, [requests + 1] each, on the device."""
        row = self._boundaries[self._filled - 1]
        row[: logit_ends.shape[0]] = logit_ends
        row[self._ends : self._ends + token_ends.shape[0]] = token_ends
        if self._filled == len(self._rows):
            self._write()

    def close(self) -> None:
        self._write()
        self._file.close()

    def _write(self) -> None:
        filled, self._filled = self._filled, 0
        self._rows[:filled, rank_records.BOUNDARIES :] = self._boundaries[:filled].cpu().numpy()
        self._file.write(self._rows[:filled].tobytes())
        self._boundaries.zero_()


class _Broadcasts:
    """Durations of one call a step. Events are read at the end only, so that no step waits for them."""

    def __init__(self) -> None:
        import torch

        self._events: list[tuple[Any, Any]] | None = [] if torch.cuda.is_available() else None
        self._host: list[float] = []

    def time(self, call: Any, *arguments: Any) -> None:
        import torch

        if self._events is not None:
            self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._events[-1][0].record()
        started = time.perf_counter()
        call(*arguments)
        self._host.append(1e6 * (time.perf_counter() - started))
        if self._events is not None:
            self._events[-1][1].record()

    def microseconds(self) -> dict[str, list[float]]:
        import torch

        times = {"host": self._host}
        if self._events is not None:
            torch.cuda.synchronize()
            times["device"] = [1e3 * begin.elapsed_time(end) for begin, end in self._events]
        return times
