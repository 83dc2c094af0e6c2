"""`python -m tests.bench.priced_steps`: what the cost tables say of the steps that never_slower measured.

First, the price of fixed verification. It verifies every draft, so that its steps need no decision: while all requests
run each is of as many tokens, priced by the curves that the same run recorded, and set beside the measured step. The
difference is what the tables leave out (logits, sampling, the host) or have too much.

Then, the budgets that the tables make best at the largest batch: with points that fall raised by a running maximum, as
upstream does, or pooled at their median; within the rejection sampler's chunk, or without that bound.

Pure arithmetic over results.json; runs anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median

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


def full_step_ms(costs: Row, requests: int, drafts: int) -> float:
    """Milliseconds of drafting for so many requests and verifying all their drafts."""
    tokens = requests * (drafts + 1)
    tables = cost_tables(costs, requests, tokens, pooled=False)
    return float(tables.draft_ms[requests] + tables.verify_ms[tokens])


def rows(measured: list[Row], profiles: list[Row]) -> Iterator[list[str]]:
    from tests.bench.never_slower import DRAFTS

    cells: dict[tuple[int, str], list[float]] = {}
    for row in measured:
        if row["arm"] == "fixed":
            step = 1e3 * sum(row["decode_s"]) / sum(row["outputs"])
            cells.setdefault((row["requests"], row["workload"]), []).append(step)
    for (requests, workload), steps in sorted(cells.items()):
        prices = (f"{full_step_ms(profile, requests, DRAFTS):.2f}" for profile in profiles)
        yield [str(requests), workload, f"{median(steps):.2f}", *prices]


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
    measured = [row for row in data if row["part"] == "workloads"]
    runs = {row["run"] for row in measured}
    profiles = [row for row in data if row["part"] == "costs" and row["run"] in runs]
    heads = [f"priced by {row['arm']}" for row in profiles]
    print("\n".join(table(["requests", "workload", "measured", *heads], list(rows(measured, profiles)))))
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
