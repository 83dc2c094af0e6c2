"""`python -m tests.bench.priced_steps`: what the cost tables say of the steps that never_slower measured.

Fixed verification verifies every draft, so its steps need no decision: requests that end as the workload's acceptance
lets them are simulated, each step is priced by the recorded curves, and the mean step is set beside the measured one.
The difference is what the tables leave out (logits, sampling, the host) or have too much. Pure arithmetic over
results.json; runs anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from tests.bench.never_slower_report import DATA, Row, table

REPETITIONS = 40


def cost_ms(curve: list[list[float]], size: int) -> float:
    """A step pads to the next captured size, and costs never fall."""
    sizes, costs = np.asarray(curve).T
    return float(np.maximum.accumulate(costs)[min(int(np.searchsorted(sizes, size)), len(sizes) - 1)])


def priced_step_ms(costs: Row, rates: list[float], requests: int, tokens: int) -> float:
    """Milliseconds of drafting and verifying, the mean of all steps of a batch that begins together."""
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(REPETITIONS):
        left = np.full(requests, tokens - 1)
        while (left > 0).any():
            running = np.flatnonzero(left > 0)
            accepted = np.cumprod(rng.random((running.size, len(rates))) < rates, axis=1).sum(axis=1)
            left[running] -= accepted + 1
            width = running.size * (len(rates) + 1)
            steps.append(cost_ms(costs["draft"], running.size) + cost_ms(costs["verify"], width))
    return float(np.mean(steps))


def rows(data: list[Row]) -> Iterator[list[str]]:
    from tests.bench.never_slower import WORKLOADS

    costs = [row for row in data if row["part"] == "costs" and row["size"] == "4b"]
    measured: dict[tuple[str, int, int], list[float]] = {}
    for row in data:
        if row["part"] == "workloads" and row["arm"] == "fixed":
            spent = sum(row["seconds"]) - sum(row["first_token_s"])
            cell = measured.setdefault((row["workload"], row["requests"], row["tokens"]), [])
            cell.append(1e3 * spent / row["counts"]["steps"])
    for (workload, requests, tokens), each in sorted(measured.items()):
        shown: list[Any] = [workload, requests, f"{median(each):.2f}"]
        for profile in costs:
            shown.append(f"{priced_step_ms(profile, WORKLOADS[workload], requests, tokens):.2f}")
        yield list(map(str, shown))


def main() -> None:
    data = json.loads(DATA.read_text())["never_slower"]
    profiles = [f"priced by {row['arm']}" for row in data if row["part"] == "costs" and row["size"] == "4b"]
    print("\n".join(table(["workload", "requests", "measured", *profiles], list(rows(data)))))


if __name__ == "__main__":
    main()
