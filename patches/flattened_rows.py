"""One row a query token, built from request boundaries that only the device knows.

A kernel that takes a single query token a row needs, for every token of a batch, the number of keys it may see and
the block table of the request it belongs to. Adaptive verification moves the boundaries between requests on the
device after the host has planned the step, so whose token is whose must be found there. One launch does it: each
program looks for the request that owns its row and writes that row. Nothing is allocated and no shape depends on
the boundaries, so a captured launch stays right when they change.

A block table is as wide as the longest context that the server allows. A row gets the pages that its keys lie on and
no more; what lies behind them in the buffer is an earlier step's pages, as it is in vLLM's own block tables.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from patches.kernel_launch import Launcher

_COLUMNS = 1024
"""Elements that a program moves at a time."""


# No argument is specialised: sizes change from step to step, and one variant must hold for all (`kernel_launch`).
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "block_table_stride",
        "row_block_table_stride",
        "num_requests",
        "num_rows",
        "capacity",
        "num_columns",
        "tokens_per_page",
    ],
    do_not_specialize_on_alignment=[
        "boundaries_ptr",
        "seq_lens_ptr",
        "block_table_ptr",
        "row_seq_lens_ptr",
        "row_query_lens_ptr",
        "row_block_table_ptr",
    ],
)
def _flatten_kernel(  # type: ignore[no-untyped-def]
    boundaries_ptr,
    seq_lens_ptr,
    block_table_ptr,
    row_seq_lens_ptr,
    row_query_lens_ptr,
    row_block_table_ptr,
    block_table_stride,
    row_block_table_stride,
    num_requests,
    num_rows,
    capacity,
    num_columns,
    tokens_per_page,
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
        visible = tl.where(owned, tl.maximum(seq_len - end + row + 1, 0), 0)
        tl.store(row_seq_lens_ptr + row, visible)
        tl.store(row_query_lens_ptr + row, 1)
        source = block_table_ptr + owner.to(tl.int64) * block_table_stride
        target = row_block_table_ptr + row.to(tl.int64) * row_block_table_stride
        # A row without keys needs one valid page, and page 0 always exists.
        width = tl.minimum(tl.maximum(tl.cdiv(visible, tokens_per_page), 1), num_columns)
        for start in tl.range(0, width, COLUMNS):
            inside = start + columns < width
            pages = tl.load(source + start + columns, mask=inside & owned, other=0)
            tl.store(target + start + columns, pages, mask=inside)


class Rows:
    """The row buffers of one metadata builder. They stay where they are, so captured graphs follow them."""

    def __init__(self, seq_lens: Any, query_lens: Any, block_table: Any, max_keys: int) -> None:
        """Write into these buffers in every step.

        Args:
            seq_lens: [capacity] int32, keys that each row sees.
            query_lens: [capacity] int32, query tokens of each row.
            block_table: [capacity, pages] int32, unit stride along a row.
            max_keys: The longest context of a request. The pages of any request's block table hold at least as many.
        """
        self._seq_lens, self._query_lens, self._block_table = seq_lens, query_lens, block_table
        self._capacity, self._max_columns = block_table.shape
        self._stride = block_table.stride(0)
        self._max_keys = max_keys
        self._launcher = Launcher(_flatten_kernel)
        self._views: dict[int, tuple[Any, Any, Any]] = {}

    def flatten(
        self, boundaries: Any, seq_lens: Any, block_table: Any, *, num_requests: int, num_rows: int
    ) -> tuple[Any, Any, Any]:
        """Write a row for each of the first `num_rows` query tokens.

        Args:
            boundaries: int32, first token of each request. In memory the end of the last one lies right behind its
                start, whether or not the tensor's shape includes it. Never falling.
            seq_lens: [requests] int32, keys of each request, its query tokens included.
            block_table: [requests, pages] int32, unit stride along a request.
            num_requests: Requests of the batch, empty and padding ones included.
            num_rows: Rows to write. More than the last boundary under graph padding; the rest are padding rows.

        Returns:
            The first `num_rows` of the buffers: keys that each row sees, 0 in padding rows (and behind `num_rows`);
            the owner's pages that hold these keys, page 0 where there are none; and query lengths, 1 everywhere.

        Raises:
            ValueError: more rows than the buffers hold, or a block table wider than theirs.
        """
        num_columns = block_table.shape[1]
        views = self._views.get(num_rows)
        if views is None:
            if num_rows > self._capacity:
                raise ValueError(f"{num_rows} rows do not fit into metadata for {self._capacity}")
            views = self._seq_lens[:num_rows], self._block_table[:num_rows], self._query_lens[:num_rows]
            self._views[num_rows] = views
        if num_columns > self._max_columns:
            raise ValueError(f"block tables of {num_columns} pages do not fit into rows of {self._max_columns}")
        self._launcher.launch(
            num_rows + -(-(self._capacity - num_rows) // _COLUMNS),
            (
                boundaries,
                seq_lens,
                block_table,
                self._seq_lens,
                self._query_lens,
                self._block_table,
                block_table.stride(0),
                self._stride,
                num_requests,
                num_rows,
                self._capacity,
                num_columns,
                # A full table holds the longest context, so a page holds at least this many tokens.
                max(self._max_keys // num_columns, 1),
            ),
            (1 << (num_requests - 1).bit_length(), _COLUMNS),
            num_warps=4,
        )
        return views
