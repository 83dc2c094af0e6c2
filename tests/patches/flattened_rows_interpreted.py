"""`flatten` in Triton's interpreter, in a process of its own. usage: flattened_rows_interpreted.py SEED COUNT

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

from patches.flattened_rows import Rows  # noqa: E402
from tests.patches.flattened_reference import differences, random_batch  # noqa: E402

CAPACITY = 70
WIDTHS = (1, 5, 1500)
MAX_KEYS = 4000
"""So that a page holds 4,000, 800 or 2 tokens: with the widest tables rows take more than one round of a program."""


def main(seed: int, count: int) -> list[str]:
    rng = np.random.default_rng(seed)
    found: list[str] = []
    for step in range(count):
        pages = WIDTHS[step % len(WIDTHS)]
        seq_lens = torch.full((CAPACITY,), 77, dtype=torch.int32)
        query_lens = torch.full((CAPACITY,), 77, dtype=torch.int32)
        block_table = torch.full((CAPACITY, pages + step % 2), 77, dtype=torch.int32)
        batch = random_batch(rng, drafts=int(rng.integers(1, 8)), max_requests=7, max_rows=60, pages=pages)
        rows = batch.num_rows
        written = Rows(seq_lens, query_lens, block_table, MAX_KEYS).flatten(
            *map(torch.from_numpy, (batch.boundaries, batch.seq_lens, batch.block_table)),
            num_requests=len(batch.seq_lens),
            num_rows=rows,
        )
        tokens_per_page = MAX_KEYS // pages
        found += differences(
            batch, written[0].numpy(), written[1].numpy(), written[2].numpy(), tokens_per_page=tokens_per_page
        )
        used = np.clip(-(-seq_lens[:rows].numpy() // tokens_per_page), 1, pages)
        if any((block_table[row, used[row] :] != 77).any() for row in range(rows)):
            found.append(f"step {step} copied pages that no key lies on")
        if seq_lens[rows:].any() or (query_lens[rows:] != 77).any() or (block_table[rows:] != 77).any():
            found.append(f"step {step} wrote behind its rows, or left an earlier step's lengths there")
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
