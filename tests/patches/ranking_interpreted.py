"""`Ranking` in Triton's interpreter, in a process of its own. usage: ranking_interpreted.py SEED COUNT

Prints what differs from the reference as JSON: an empty list when nothing does. The reference sorts every draft in
Python by (survival, request, position).
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import wrapt
from numpy.typing import NDArray

from patches.cpu import interpreter

for module, hook in interpreter.HOOKS.items():
    wrapt.register_post_import_hook(hook, module)

from patches.consensus import admit_best_drafts  # noqa: E402
from patches.ranking import Ranking  # noqa: E402

SHAPES = ((5, 1), (12, 4), (17, 7), (70, 7), (1024, 16))
"""(slots, steps)"""


def random_confidences(rng: np.random.Generator, slots: int, steps: int) -> NDArray[np.float32]:
    """Smooth, coarse (full of ties, products exact), saturated, or close to each other."""
    kind = rng.integers(4)
    if kind == 0:
        return rng.random((slots, steps), dtype=np.float32)
    if kind == 1:
        return (rng.integers(0, 5, (slots, steps)) / 4).astype(np.float32)
    if kind == 2:
        return np.where(rng.random((slots, steps)) < 0.5, 1.0, rng.random((slots, steps))).astype(np.float32)
    return (0.9 + rng.integers(0, 3, (slots, steps)) * 2.0**-24).astype(np.float32)


def best(survival: NDArray[np.float32], drafts: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
    """[requests] drafts of each among the `budget` best, the earlier request and position first among equals."""
    ranked = sorted((-survival[r, s], r, s) for r in range(len(drafts)) for s in range(drafts[r]))
    return np.bincount([r for _, r, _ in ranked[:budget]], minlength=len(drafts)).astype(np.int32)


def ends(counts: NDArray[np.int32]) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]


def main(seed: int, count: int) -> list[str]:
    rng = np.random.default_rng(seed)
    found: list[str] = []
    for shape in SHAPES:
        slots, steps = shape
        table = torch.empty(slots, steps)
        logit_ends = torch.full((slots + 1,), 77, dtype=torch.int32)
        token_ends = torch.full((slots + 1,), 77, dtype=torch.int32)
        ranking = Ranking(table, logit_ends, token_ends)
        for step in range(count if slots < 1000 else 3):
            requests = int(rng.integers(1, slots + 1)) if step else slots
            confidences = random_confidences(rng, slots, steps)
            table.copy_(torch.from_numpy(confidences))
            batch = np.stack(
                (rng.permutation(slots)[:requests], rng.integers(0, steps + 1, requests), rng.integers(1, 9, requests))
            ).astype(np.int32)
            where, drafts, others = batch
            budget, bonus = int(rng.integers(0, drafts.sum() + 1)), int(rng.integers(0, 3))
            ranking.allot(batch, budget=budget, bonus_tokens=bonus)

            survival = np.multiply.accumulate(confidences[where], axis=1)
            expected = best(survival, drafts, budget)
            case = f"{shape}, {requests} requests, budget {budget}"
            if ranking.admitted[:requests].tolist() != expected.tolist():
                found.append(f"{case}: admitted {ranking.admitted[:requests].tolist()}, not {expected.tolist()}")
            if logit_ends[: requests + 1].tolist() != ends(expected + bonus):
                found.append(f"{case}: logits end at {logit_ends[: requests + 1].tolist()}")
            tokens = ends(expected + others)
            if token_ends.tolist() != tokens + [tokens[-1]] * (slots - requests):
                found.append(f"{case}: tokens end at {token_ends.tolist()}")
            if np.array_equal(np.round(confidences * 4), confidences * 4):
                # Products are exact here, so the order that tp-consensus compiles must be the same one.
                admitted = torch.from_numpy(drafts.copy())
                admit_best_drafts(table, torch.from_numpy(where).long(), admitted, budget, steps)
                if admitted.tolist() != expected.tolist():
                    found.append(f"{case}: the stable sort admits {admitted.tolist()}, not {expected.tolist()}")
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
