"""ragged-metadata-kernel: the sparse indexer's decode metadata costs the same for even and for ragged requests.

Upstream. Where DeepSeek's sparse indexer flattens, `_prepare_decode_tensors` makes every query token a request of one
token. For requests of even length it launches one Triton kernel. For ragged ones, and so in every step of adaptive
verification, it chains torch operations instead: two `repeat_interleave`, three sums, copies of whole block tables
and fills, three times as long, nearly all of it host time.

Instead. Under adaptive verification every batch that is flattened goes through one kernel (`patches.flattened_rows`),
even ones and single requests too: which it is need not be asked, and the answer could not be had. The host's lengths
are an even split once a budget binds, and count padded requests under full graphs, so a batch may look even there and
be ragged on the device. The native paths, and servers whose verification is fixed, keep upstream's code.

Upstream reference: `DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors`, all releases. Hardware: cuda-hopper
and rocm-gfx950. Delete this when upstream builds ragged rows in one kernel on these devices (0.32.0 has one for
devices whose scoring kernel takes ragged requests, which these do not).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import wrapt

from patches.install import Hook

_INDEXER = "vllm.v1.attention.backends.mla.indexer"

_ROWS = "_dspark_rows"
"""A builder's attribute: its `Rows`, or None where verification is not adaptive. Made once, asked in every step."""


def _flatten_in_one_kernel(indexer: ModuleType) -> None:
    from patches.flattened_rows import Rows

    def make_rows(builder: Any) -> Rows | None:
        speculation = builder.vllm_config.speculative_config
        if speculation is None or not speculation.enable_adaptive_verification:
            return None
        return Rows(
            builder.decode_seq_lens_buffer,
            builder.decode_lens_buffer,
            builder.expanded_block_table_buffer,
            builder.vllm_config.model_config.max_model_len,
        )

    def initialise(wrapped: Callable[..., None], builder: Any, args: Any, kwargs: Any) -> None:
        """Look at the buffers once they are there."""
        wrapped(*args, **kwargs)
        setattr(builder, _ROWS, make_rows(builder))

    def prepare_decode_tensors(wrapped: Callable[..., Any], builder: Any, _args: Any, step: dict[str, Any]) -> Any:
        """Rows from the device's boundaries; the native paths and everything not adaptive stay upstream's."""
        rows = getattr(builder, _ROWS)
        if rows is None or step["use_native"]:
            return wrapped(**step)
        num_rows = step["num_decode_tokens"]
        seq_lens, block_table, query_lens = rows.flatten(
            step["query_start_loc"],
            step["seq_lens"],
            step["block_table"],
            num_requests=step["num_decodes"],
            num_rows=num_rows,
        )
        return seq_lens, block_table, query_lens, num_rows, False

    builder_class = indexer.DeepseekV32IndexerMetadataBuilder.__name__
    wrapt.wrap_function_wrapper(indexer, f"{builder_class}.__init__", initialise)
    wrapt.wrap_function_wrapper(indexer, f"{builder_class}._prepare_decode_tensors", prepare_decode_tensors)


HOOKS: Mapping[str, Hook] = {_INDEXER: _flatten_in_one_kernel}
