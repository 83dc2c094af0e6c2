"""`python -m tests.bench.priced_steps`: what the cost tables say of the steps that never_slower measured.

First, the price of fixed verification.

Fixed verification verifies every draft, so its steps need no decision: requests that end as the workload's acceptance
lets them are simulated, each step is priced by the recorded curves, and the mean step is set beside the measured one.
The difference is what the tables leave out (logits, sampling, the host) or have too much.

Then, the budgets that the tables make best at the largest batch: with points that fall raised by a running maximum, as
upstream does, or pooled at their median; within the rejection sampler's chunk, or without that bound.

Pure arithmetic over results.json; runs anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patches.budget import CostTables, choose_budget, survival_probabilities
from patches.step_costs import rising
from tests.bench.never_slower_report import DATA, Row, table

REPETITIONS = 40
CHUNK_ROWS = 2**30 // (151_936 * 4)
"""Rows of logits in a chunk of the rejection sampler."""


def step_table(curve: list[list[float]], limit: int, *, pooled: bool) -> NDArray[np.float64]:
    """[limit + 1] milliseconds by size: each size pads to the next point."""
    sizes, costs = np.asarray(curve).T
    risen = np.asarray(rising(list(costs))) if pooled else np.maximum.accumulate(costs)
    return risen[np.minimum(np.searchsorted(sizes, np.arange(limit + 1)), len(sizes) - 1)]


def cost_tables(costs: Row, requests: int, tokens: int, *, pooled: bool) -> CostTables:
    """The recorded curves, to so many requests and tokens."""
    return CostTables(
        step_table(costs["draft"], requests, pooled=False), step_table(costs["verify"], tokens, pooled=pooled)
    )


def priced_step_ms(costs: Row, rates: list[float], requests: int, tokens: int) -> float:
    """Milliseconds of drafting and verifying, the mean of all steps of a batch that begins together."""
    rng = np.random.default_rng(0)
    tables = cost_tables(costs, requests, requests * (len(rates) + 1), pooled=False)
    steps = []
    for _ in range(REPETITIONS):
        left = np.full(requests, tokens - 1)
        while (left > 0).any():
            running = np.flatnonzero(left > 0)
            accepted = np.cumprod(rng.random((running.size, len(rates))) < rates, axis=1).sum(axis=1)
            left[running] -= accepted + 1
            width = running.size * (len(rates) + 1)
            steps.append(tables.draft_ms[running.size] + tables.verify_ms[width])
    return float(np.mean(steps))


def rows(data: list[Row]) -> Iterator[list[str]]:
    from tests.bench.never_slower import WORKLOADS

    costs = [row for row in data if row["part"] == "costs" and row["size"] == "4b"]
    measured: dict[tuple[str, int, int], list[float]] = {}
    for row in data:
        if row["part"] == "workloads" and row["arm"] == "fixed":
            cell = measured.setdefault((row["workload"], row["requests"], row["tokens"]), [])
            cell.append(1e3 * sum(row["decode_s"]) / sum(row["outputs"]))
    for (workload, requests, tokens), each in sorted(measured.items()):
        shown: list[Any] = [workload, requests, f"{median(each):.2f}"]
        for profile in costs:
            shown.append(f"{priced_step_ms(profile, WORKLOADS[workload], requests, tokens):.2f}")
        yield list(map(str, shown))


def best_budgets(costs: Row, rates: list[float], requests: int, *, pooled: bool, bound: bool) -> list[int]:
    """The budgets that draws of never_slower's confidences make best, smallest and largest."""
    from tests.bench.never_slower import SPREAD

    rng = np.random.default_rng(0)
    mean = np.asarray(rates)
    room = np.minimum(SPREAD, np.minimum(mean, 1 - mean))
    drafts = np.full(requests, len(rates))
    everything = requests * (len(rates) + 1)
    tables = cost_tables(costs, requests, everything, pooled=pooled)
    found = [
        choose_budget(
            survival_probabilities(mean + room * rng.uniform(-1, 1, (requests, len(rates)))),
            drafts,
            sampling_requests=requests,
            other_tokens=requests,
            max_budget=(CHUNK_ROWS if bound else everything) - requests,
            costs=tables,
        )
        for _ in range(REPETITIONS)
    ]
    return sorted({min(found), max(found)})


def main() -> None:
    from tests.bench.never_slower import WORKLOADS

    data = json.loads(DATA.read_text())["never_slower"]
    profiles = [row for row in data if row["part"] == "costs" and row["size"] == "4b"]
    heads = [f"priced by {row['arm']}" for row in profiles]
    print("\n".join(table(["workload", "requests", "measured", *heads], list(rows(data)))))
    for profile in profiles:
        requests = int(profile["draft"][-1][0])
        print(f"Best budgets of {requests} requests, curve of {profile['arm']}:")
        for workload, rates in WORKLOADS.items():
            for pooled in (False, True):
                for bound in (True, False):
                    found = best_budgets(profile, rates, requests, pooled=pooled, bound=bound)
                    how = ("pooled" if pooled else "running maximum", "one chunk" if bound else "no bound")
                    print(f"  {workload}, {how[0]}, {how[1]}: {' to '.join(map(str, found))}")


if __name__ == "__main__":
    main()
