"""Flattened indexer metadata on a Hopper GPU: the kernel, a captured launch, and the builder of 0.28.0 around it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.patches.flattened_reference import Batch, differences, random_batch
from tests.patches.release_process import answer

MAX_REQUESTS, DRAFTS = 128, 7
CAPACITY = 1024
MAX_KEYS = 4096

builder_of_0_28 = partial(answer, "hopper_indexer", "0.28.0", settings=(("TRITON_INTERPRET", "0"),))


class Buffers:
    """The persistent buffers of `Rows`, and what differs in them."""

    def __init__(self, pages: int) -> None:
        import torch

        from patches.flattened_rows import Rows

        whole = partial(torch.full, dtype=torch.int32, device="cuda")
        self.seq_lens = whole((CAPACITY,), 77)
        self.query_lens = whole((CAPACITY,), 77)
        self.block_table = whole((CAPACITY, pages), 77)
        self.tokens_per_page = max(MAX_KEYS // pages, 1)
        self.rows = Rows(self.seq_lens, self.query_lens, self.block_table, MAX_KEYS)

    def flatten(self, boundaries: Any, seq_lens: Any, block_table: Any, num_rows: int) -> None:
        requests = seq_lens.shape[0]
        self.rows.flatten(boundaries, seq_lens, block_table, num_requests=requests, num_rows=num_rows)

    def differences(self, batch: Batch) -> list[str]:
        rows = batch.num_rows
        found = differences(
            batch,
            self.seq_lens[:rows].cpu().numpy(),
            self.block_table[:rows].cpu().numpy(),
            self.query_lens[:rows].cpu().numpy(),
            tokens_per_page=self.tokens_per_page,
        )
        if self.seq_lens[rows:].any():
            found.append("lengths of an earlier step are left behind the last row")
        return found


def on_gpu(array: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(array).cuda()


@pytest.mark.parametrize("pages", [1, 63, 1500])
def test_rows_equal_the_reference(pages):
    rng, rows = np.random.default_rng(pages), Buffers(pages)
    for _ in range(1000):
        batch = random_batch(rng, drafts=DRAFTS, max_requests=MAX_REQUESTS, max_rows=CAPACITY, pages=pages)
        rows.flatten(on_gpu(batch.boundaries), on_gpu(batch.seq_lens), on_gpu(batch.block_table), batch.num_rows)
        assert rows.differences(batch) == []


def test_a_captured_launch_follows_the_boundaries():
    import torch

    pages, captured = 33, (64, 512)
    rng, rows = np.random.default_rng(5), Buffers(pages)
    draw = partial(
        random_batch, rng, drafts=DRAFTS, max_requests=MAX_REQUESTS, max_rows=CAPACITY, pages=pages, captured=captured
    )
    first = draw()
    inputs = [on_gpu(first.boundaries), on_gpu(first.seq_lens), on_gpu(first.block_table)]
    rows.flatten(*inputs, first.num_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.flatten(*inputs, first.num_rows)
    for _ in range(1000):
        batch = draw()
        for held, changed in zip(inputs, (batch.boundaries, batch.seq_lens, batch.block_table), strict=True):
            held.copy_(on_gpu(changed))
        graph.replay()
        assert rows.differences(batch) == []


def test_the_builder_of_0_28_equals_the_reference():
    patched = builder_of_0_28("patched", "90", "adaptive", "0", "4000")
    assert patched["first"] == []
    assert patched["wrong"] == patched["moved"] == 0


def test_a_captured_build_of_0_28_follows_the_boundaries():
    replayed = builder_of_0_28("patched", "90", "replay", "1", "500")
    assert replayed["first"] == []
    assert replayed["wrong"] == 0


def test_0_28_says_that_it_flattens_on_this_gpu():
    patched, stock = builder_of_0_28("patched", "90", "facts"), builder_of_0_28("stock", "90", "facts")
    assert stock["mismatch"] == [False, False]
    assert patched["mismatch"] == [True, True]
    assert patched["graphs"]["adaptive"] == "ALWAYS"
    assert "use_flattening=True supports_varlen=False" in patched["log"]["adaptive"]
