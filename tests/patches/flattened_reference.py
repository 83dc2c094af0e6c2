"""Random decode batches as adaptive verification leaves them, and what their flattened metadata must be.

The reference walks requests and tokens one by one, in Python, and shares nothing with the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """One step's decode requests.

    Attributes:
        query_lens: [requests] tokens of each request on the device. 0 for a padding request.
        host_query_lens: [requests] what the host believes: the same total, split evenly.
        seq_lens: [requests] keys of each request, its query tokens included. 0 for a padding request.
        block_table: [requests, pages].
        num_rows: Rows of the step, graph padding included.
    """

    query_lens: NDArray[np.int32]
    host_query_lens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    num_rows: int

    @property
    def boundaries(self) -> NDArray[np.int32]:
        return np.concatenate(([0], np.cumsum(self.query_lens))).astype(np.int32)

    @property
    def host_boundaries(self) -> NDArray[np.int32]:
        return np.concatenate(([0], np.cumsum(self.host_query_lens))).astype(np.int32)


def random_batch(
    rng: np.random.Generator,
    *,
    drafts: int,
    max_requests: int,
    max_rows: int,
    pages: int,
    captured: tuple[int, int] | None = None,
    trimmed: bool = True,
) -> Batch:
    """A batch of up to `max_requests` requests with up to `drafts` drafts each, admitted unevenly.

    Args:
        captured: (requests, rows) of the graph that it is padded to; None leaves the padding to chance.
        trimmed: False for a batch of fixed verification: every request keeps all its drafts, nothing is padded.
    """
    if captured is not None:
        max_requests, max_rows = captured
    real = int(rng.integers(1, max_requests + 1)) if rng.random() > 0.1 else 1
    real = min(real, max_rows // (drafts + 1))
    drafted = rng.integers(0, drafts + 1, real)
    if rng.random() < 0.15:
        drafted[:] = 0
    if not trimmed or rng.random() < 0.15:
        drafted[:] = drafts
    total = int(drafted.sum())
    even = np.full(real, total // real) + (np.arange(real) < total % real)
    padding, num_rows = 0, total + real
    if captured is not None:
        padding, num_rows = max_requests - real, max_rows
    elif trimmed and rng.random() < 0.5:
        padding = int(rng.integers(0, max_requests - real + 1))
        num_rows = int(rng.integers(num_rows, max_rows + 1))
    zeros = np.zeros(padding, dtype=np.int32)
    query_lens = np.concatenate((drafted + 1, zeros)).astype(np.int32)
    context = rng.integers(0, 3000, real) * (rng.random(real) > 0.1)
    seq_lens = np.concatenate((context + drafted + 1, zeros)).astype(np.int32)
    return Batch(
        query_lens=query_lens,
        host_query_lens=np.concatenate((even + 1, zeros)).astype(np.int32),
        seq_lens=seq_lens,
        block_table=rng.integers(1, 2**20, (real + padding, pages)).astype(np.int32),
        num_rows=num_rows,
    )


def reference(batch: Batch) -> tuple[list[int], list[NDArray[np.int32] | None]]:
    """Per row: the keys it sees, and its owner's pages (None for a padding row)."""
    visible: list[int] = []
    pages: list[NDArray[np.int32] | None] = []
    for request, query_len in enumerate(batch.query_lens):
        context = int(batch.seq_lens[request]) - int(query_len)
        for token in range(int(query_len)):
            visible.append(context + token + 1)
            pages.append(batch.block_table[request])
    missing = batch.num_rows - len(visible)
    return visible + [0] * missing, pages + [None] * missing


def differences(
    batch: Batch,
    row_seq_lens: NDArray[np.int32],
    row_block_table: NDArray[np.int32],
    row_query_lens: NDArray[np.int32],
    *,
    tokens_per_page: int,
    compress_ratio: int = 1,
) -> list[str]:
    """What differs from the reference, in words; empty when nothing does.

    Of a row's pages only those count that its keys lie on, `tokens_per_page` tokens each.
    """
    visible, pages = reference(batch)
    found = []
    if row_seq_lens.tolist() != [keys // compress_ratio for keys in visible]:
        found.append(f"keys {row_seq_lens.tolist()} instead of {visible}")
    if row_query_lens.tolist() != [1] * batch.num_rows:
        found.append(f"query lengths {row_query_lens.tolist()}")
    for row, expected in enumerate(pages):
        if expected is None:
            if row_block_table[row, 0] != 0:
                found.append(f"padding row {row} points at page {row_block_table[row, 0]}")
            continue
        used = -(-visible[row] // tokens_per_page)
        if not np.array_equal(row_block_table[row, :used], expected[:used]):
            found.append(f"row {row} has another request's pages")
    return found
