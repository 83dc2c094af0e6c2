"""What the benchmark adds to vLLM's worker (`worker_extension_cls`): injected confidences and rates, counts, traces.

Confidences are injected by handing the manager another tensor than the drafter's, which takes no kernel of its own.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from tests.bench.step_trace import Trace

TABLES = 64
"""Different sets of confidences that an injected run goes through."""


class BenchWorker:
    """Methods for `LLM.collective_rpc`. All take and return plain values."""

    model_runner: Any

    def bench_watch(self) -> None:
        """Count steps and budgets from now on, and let confidences be injected."""
        runner = self.model_runner
        self._bench_steps = self._bench_budget = self._bench_full = self._bench_chosen = 0
        self._bench_tables: Any = None
        self._bench_trace: Trace | None = None
        sample = runner.sample_tokens

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._bench_steps += 1
            sampled = sample(*args, **kwargs)
            if self._bench_trace is not None:
                self._bench_trace.step_done()
            return sampled

        runner.sample_tokens = counted
        manager = getattr(runner, "adaptive_verification", None)
        if manager is None:
            return
        choose, record = manager.get_num_tokens, manager.record_confidences

        def chosen(*args: Any, **kwargs: Any) -> int:
            tokens: int = choose(*args, **kwargs)
            drafts, _, budget = manager._batch_budget
            self._bench_chosen += 1
            self._bench_budget += budget
            self._bench_full += budget == sum(drafts.values())
            return tokens

        def injected(confidences: Any, batch: Any) -> None:
            if self._bench_tables is not None:
                confidences = self._bench_tables[self._bench_steps % TABLES]
            record(confidences, batch)

        manager.get_num_tokens, manager.record_confidences = chosen, injected

    def bench_workload(self, rates: list[float] | None, confidences: list[float] | None, spread: float) -> None:
        """Accept drafts at these rates, and replace the drafter's confidences.

        Args:
            rates: [steps] probability that a draft is accepted, given that those before it were. None: unchanged.
            confidences: [steps] mean of the injected confidences; None leaves the drafter's.
            spread: Half the width of the range that each confidence is drawn from, uniformly, around its mean.
        """
        import torch

        runner = self.model_runner
        sampler = runner.rejection_sampler
        if rates is not None and sampler is not None:
            held = sampler.synthetic_conditional_rates
            held.copy_(torch.tensor(rates, dtype=held.dtype))
        manager = getattr(runner, "adaptive_verification", None)
        if manager is None:
            return
        self._bench_tables = None
        if confidences is not None:
            mean = torch.tensor(confidences, dtype=torch.float32)
            # Narrower near 0 and 1, so that the mean stays what it is.
            room = torch.minimum(torch.full_like(mean, spread), torch.minimum(mean, 1 - mean))
            shape = (TABLES, manager._confidence_probs.shape[0], mean.numel())
            noise = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
            self._bench_tables = (mean + room * noise).to(manager._confidence_probs.device)

    def bench_counts(self) -> dict[str, int]:
        """Since `bench_watch`: steps, budgets chosen, their sum, how many took every draft, and waits of the ring."""
        manager = getattr(self.model_runner, "adaptive_verification", None)
        return {
            "steps": self._bench_steps,
            "chosen": self._bench_chosen,
            "budget": self._bench_budget,
            "full": self._bench_full,
            "waits": getattr(manager, "confidence_waits", 0),
        }

    def bench_telemetry(self, on: bool) -> bool:
        """Take the step recorder out of the worker, or put it back; returns whether there is one."""
        from patches.telemetry.patch import _RECORDER

        runner = self.model_runner
        if not hasattr(self, "_bench_recorder"):
            self._bench_recorder = getattr(runner, _RECORDER, None)
        for holder in (runner, runner.step_timing):
            setattr(holder, _RECORDER, self._bench_recorder if on else None)
        return self._bench_recorder is not None

    def bench_profile_costs(self) -> dict[str, Any]:
        """The manager's own cost profile once more, on a device that nobody else uses meanwhile; it plans with it.

        Returns:
            `seconds` it took, `batches` it ran, `graphs` there are, and the `draft` and `verify` curves.
        """
        runner = self.model_runner
        manager = runner.adaptive_verification
        set_curves, curves, batches = manager.set_cost_curves, [], 0
        started = time.monotonic()
        with runner.step_timing.collect() as timings:
            for batch in manager.batches_to_profile(runner.cudagraph_manager.captured_token_counts()):
                runner._dummy_run(**batch)
                batches += 1

        def kept(*both: list[tuple[int, float]]) -> None:
            curves.extend(both)
            set_curves(*both)

        manager.set_cost_curves = kept
        try:
            manager.set_initial_cost_curves(timings)
        finally:
            del manager.set_cost_curves
        draft, verify = curves
        return {
            "seconds": round(time.monotonic() - started, 1),
            "batches": batches,
            "graphs": len(runner.cudagraph_manager.captured_token_counts()),
            "draft": draft,
            "verify": verify,
        }

    def bench_begin_trace(self, watched: Literal["device", "host"], skipped: int, steps: int) -> None:
        """Watch some of the steps to come (`Trace`)."""
        self._bench_trace = Trace(watched, skipped, steps)

    def bench_end_trace(self) -> dict[str, Any]:
        """What was seen of them."""
        trace, self._bench_trace = self._bench_trace, None
        if trace is None:
            raise RuntimeError("bench_end_trace without bench_begin_trace")
        return trace.end()
