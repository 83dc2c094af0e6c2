"""One row a query token, built from request boundaries that only the device knows.

A kernel that takes a single query token a row needs, for every token of a batch, the number of keys it may see and
the block table of the request it belongs to. Adaptive verification moves the boundaries between requests on the
device after the host has planned the step, so whose token is whose must be found there. One launch does it: each
program looks for the request that owns its row and writes that row. Nothing is allocated and no shape depends on
the boundaries, so a captured launch stays right when they change.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_COLUMNS = 1024
"""Elements that a program moves at a time."""


# Sizes that change from step to step must not each compile a variant.
@triton.jit(do_not_specialize=["num_requests", "num_rows"])  # type: ignore[untyped-decorator]
def _flatten_kernel(  # type: ignore[no-untyped-def]
    boundaries_ptr,
    seq_lens_ptr,
    block_table_ptr,
    block_table_stride,
    row_seq_lens_ptr,
    row_query_lens_ptr,
    row_block_table_ptr,
    row_block_table_stride,
    num_requests,
    num_rows,
    capacity,
    num_columns,
    REQUESTS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    if row >= num_rows:
        # The programs after the last row clear what an earlier, larger step left in the buffer.
        behind = num_rows + (row - num_rows) * COLUMNS + columns
        tl.store(row_seq_lens_ptr + behind, 0, mask=behind < capacity)
    else:
        requests = tl.arange(0, REQUESTS)
        ends = tl.load(boundaries_ptr + 1 + requests, mask=requests < num_requests, other=num_rows)
        # Boundaries never fall, so the owner is the first request that ends behind this row. A request without
        # tokens ends where it starts and owns nothing; a row behind every end is graph padding.
        owner = tl.sum((ends <= row).to(tl.int32), axis=0)
        owned = owner < num_requests
        owner = tl.where(owned, owner, 0)
        end = tl.load(boundaries_ptr + 1 + owner)
        seq_len = tl.load(seq_lens_ptr + owner)
        # The kernels downstream read lengths as unsigned: never let one go below zero.
        visible = tl.maximum(seq_len - end + row + 1, 0)
        tl.store(row_seq_lens_ptr + row, tl.where(owned, visible, 0))
        tl.store(row_query_lens_ptr + row, 1)
        source = block_table_ptr + owner.to(tl.int64) * block_table_stride
        target = row_block_table_ptr + row.to(tl.int64) * row_block_table_stride
        # A padding row needs one valid page, and page 0 always exists.
        width = tl.where(owned, num_columns, 1)
        for start in tl.range(0, width, COLUMNS):
            inside = start + columns < width
            pages = tl.load(source + start + columns, mask=inside & owned, other=0)
            tl.store(target + start + columns, pages, mask=inside)


def flatten(
    boundaries: Any,
    seq_lens: Any,
    block_table: Any,
    *,
    num_rows: int,
    row_seq_lens: Any,
    row_query_lens: Any,
    row_block_table: Any,
) -> None:
    """Write a row of indexer metadata for each of the first `num_rows` query tokens.

    Args:
        boundaries: [requests + 1] int32, first token of each request and the end of the last one; never falling.
        seq_lens: [requests] int32, keys of each request, its query tokens included.
        block_table: [requests, pages] int32, unit stride along a request.
        num_rows: Rows to write. More than `boundaries[-1]` under graph padding; the rest are padding rows.
        row_seq_lens: Out, [capacity] int32. Keys that each row sees; 0 in padding rows and behind `num_rows`.
        row_query_lens: Out, [capacity] int32. 1 in each of the rows.
        row_block_table: Out, [capacity, pages] int32. The owner's pages; page 0 in a padding row's first column.

    Raises:
        ValueError: more rows than the outputs hold, or a block table wider than theirs.
    """
    capacity = row_seq_lens.shape[0]
    num_requests, num_columns = block_table.shape
    if num_rows > capacity:
        raise ValueError(f"{num_rows} rows do not fit into metadata for {capacity}")
    if num_columns > row_block_table.shape[1]:
        raise ValueError(f"block tables of {num_columns} pages do not fit into rows of {row_block_table.shape[1]}")
    grid = num_rows + triton.cdiv(capacity - num_rows, _COLUMNS)
    _flatten_kernel[(grid,)](
        boundaries,
        seq_lens,
        block_table,
        block_table.stride(0),
        row_seq_lens,
        row_query_lens,
        row_block_table,
        row_block_table.stride(0),
        num_requests,
        num_rows,
        capacity,
        num_columns,
        REQUESTS=triton.next_power_of_2(num_requests),
        COLUMNS=_COLUMNS,
    )
