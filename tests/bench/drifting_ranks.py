"""`python drifting_ranks.py OUT STEPS {shared,own}`: `RankWorker` on two real gloo ranks with real managers, no model.

What `two_ranks` does to the workers of an engine, and what it reads of them; records go to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.bench.rank_worker import RankWorker
from tests.bench.two_ranks import curves
from tests.patches.ranks import SLOTS, STEPS, main, manager_of, plan

DRIFT = 1e-3


def run_rank(rank: int, port: int, out: Path, steps: int, shared: bool, adaptive: Any) -> None:
    manager, states = manager_of(rank, port, adaptive)
    worker = RankWorker()
    worker.model_runner = SimpleNamespace(
        adaptive_verification=manager, req_states=states, sample_tokens=lambda: None, rejection_sampler=None
    )
    worker.bench_watch()
    worker.ranks_drift(DRIFT)
    worker.ranks_set_costs(*curves(SLOTS, SLOTS * (STEPS + 1)))
    worker.ranks_share(shared)
    worker.ranks_record(str(out), 64 if shared else 1)
    worker.ranks_time_broadcast()
    plan(manager, rank, steps)
    times = worker.ranks_broadcast_times()
    assert len(times["host"]) == (steps if shared else 0)
    worker.ranks_record(None, 0)


if __name__ == "__main__":
    main(*sys.argv[1:], run=run_rank)
