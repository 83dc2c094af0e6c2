"""`Ranking` in Triton's interpreter, in a process of its own. usage: ranking_interpreted.py SEED COUNT

Prints what differs from the reference as JSON: an empty list when nothing does.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import wrapt

from patches.cpu import interpreter

for module, hook in interpreter.HOOKS.items():
    wrapt.register_post_import_hook(hook, module)

from patches.consensus import admit_best_drafts  # noqa: E402
from patches.ranking import Ranking  # noqa: E402
from tests.patches.ranking_reference import best, ends, random_batch, random_confidences, survivals  # noqa: E402

SHAPES = ((5, 1), (12, 4), (17, 7), (70, 7), (1024, 16))
"""(slots, steps)"""


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
            batch = random_batch(rng, slots, steps, requests)
            where, drafts, others = batch
            budget, bonus = int(rng.integers(0, drafts.sum() + 1)), int(rng.integers(0, 3))
            ranking.allot(torch.from_numpy(batch.reshape(-1)), budget=budget, bonus_tokens=bonus)

            expected = best(survivals(confidences[where]), drafts, budget)
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
