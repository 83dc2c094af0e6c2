"""hopper-flattened-indexer: adaptive verification with DeepSeek's sparse indexer on Hopper.

Upstream. The indexer scores each query token against its request's keys with DeepGEMM's paged MQA kernel. On SM100
that kernel takes requests of different query lengths from device tensors, and 0.28.0 advertises adaptive
verification for that path alone (`DeepseekV32IndexerBackend.supports_device_cpu_query_lens_mismatch`). On SM90 the
backend declines, and `maybe_create_adaptive_verification_manager` ends the start of the engine, after the weights
were loaded.

Why it need not. Where SM90's kernel has no variant for a query length, the builder already flattens: every query
token becomes a request of one token. That works for any boundaries, if the rows are built from the device's. On the
host, adaptive verification leaves an even split of the draft budget, which may look uniform, and then
`_prepare_decode_tensors` takes its uniform shortcut and gives tokens to the wrong requests.

Instead. Under adaptive verification on SM90 with DeepGEMM:
- the backend says that device boundaries may differ from the host's;
- the builder always flattens, also for lengths that have a kernel of their own (`use_flattening`);
- rows are built from device boundaries (`patches.flattened_rows`), unless there is one request: its boundaries agree
  on both sides, and upstream's uniform metadata is cheaper;
- graphs of any decode shape may be captured, since the metadata lives in buffers that do not move.
Without adaptive verification, and off SM90, upstream's answers stand.

Upstream reference: #52795, in 0.29.0. Hardware: cuda-hopper. vLLM: 0.28.0. Delete this when 0.28.0 is no longer
supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import wrapt

from patches.install import Hook

_INDEXER = "vllm.v1.attention.backends.mla.indexer"
_HOPPER = 90

_DEVICE_LENGTHS = "_dspark_device_lengths"
"""A builder's attribute: whether its rows come from the device's boundaries. Decided once, asked every step."""

_DEVICE_ROWS = "_dspark_device_rows"
"""A builder's attribute: the `Rows` that its buffers hold, from its first ragged step on."""


def _enable_device_lengths(indexer: ModuleType) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    from patches.flattened_rows import Rows

    builder_class = indexer.DeepseekV32IndexerMetadataBuilder

    def hopper_can_flatten() -> bool:
        platform = indexer.current_platform
        return bool(platform.is_cuda() and platform.is_device_capability_family(_HOPPER) and indexer.has_deep_gemm())

    def flattens_device_lengths(vllm_config: Any) -> bool:
        speculation = vllm_config.speculative_config
        adaptive = speculation is not None and speculation.enable_adaptive_verification
        return bool(adaptive and hopper_can_flatten())

    def supports_mismatch(wrapped: Callable[[], bool], _cls: Any, _args: Any, _kwargs: Any) -> bool:
        """Upstream's answer, or that Hopper flattens."""
        return wrapped() or hopper_can_flatten()

    def graph_support(wrapped: Callable[..., Any], _cls: Any, args: Any, kwargs: Any) -> Any:
        """Any decode shape while rows come from the device; otherwise upstream's answer."""
        vllm_config = args[0] if args else kwargs["vllm_config"]
        return AttentionCGSupport.ALWAYS if flattens_device_lengths(vllm_config) else wrapped(*args, **kwargs)

    class UseFlattening:
        """`builder.use_flattening`: what upstream's `__init__` decides, or device lengths demand.

        A descriptor, because `__init__` decides, logs and sizes by it in one go, and `build` reads it each step.
        """

        def __set__(self, builder: Any, native_is_missing: bool) -> None:
            state = builder.__dict__
            state[_DEVICE_LENGTHS] = flattens_device_lengths(builder.vllm_config)
            state["use_flattening"] = native_is_missing or state[_DEVICE_LENGTHS]

        def __get__(self, builder: Any, _owner: Any = None) -> bool:
            return bool(builder.__dict__["use_flattening"])

    def prepare_decode_tensors(wrapped: Callable[..., Any], builder: Any, _args: Any, step: dict[str, Any]) -> Any:
        """Rows from device boundaries; one request and everything not adaptive stay upstream's."""
        num_requests, num_rows = step["num_decodes"], step["num_decode_tokens"]
        if num_requests == 1 or not builder.__dict__[_DEVICE_LENGTHS]:
            return wrapped(**step)
        rows = builder.__dict__.get(_DEVICE_ROWS)
        if rows is None:
            rows = builder.__dict__[_DEVICE_ROWS] = Rows(
                builder.decode_seq_lens_buffer,
                builder.decode_lens_buffer,
                builder.expanded_block_table_buffer,
                builder.vllm_config.model_config.max_model_len,
            )
        # `build` hands over the starts and leaves off the last end, which lies right behind them.
        seq_lens, block_table, query_lens = rows.flatten(
            step["query_start_loc"],
            step["seq_lens"],
            step["block_table"],
            num_requests=num_requests,
            num_rows=num_rows,
        )
        return seq_lens, block_table, query_lens, num_rows, False

    wrapt.wrap_function_wrapper(
        indexer, "DeepseekV32IndexerBackend.supports_device_cpu_query_lens_mismatch", supports_mismatch
    )
    wrapt.wrap_function_wrapper(indexer, f"{builder_class.__name__}.get_cudagraph_support", graph_support)
    wrapt.wrap_function_wrapper(indexer, f"{builder_class.__name__}._prepare_decode_tensors", prepare_decode_tensors)
    builder_class.use_flattening = UseFlattening()


HOOKS: Mapping[str, Hook] = {_INDEXER: _enable_device_lengths}
