"""full-batch-graphs: a batch that keeps all its drafts replays the graph that fixed verification would.

Upstream captures one decode graph for T tokens under adaptive verification, and since a trimmed batch may have one
token a request, that graph has T requests, or as many as are served at most. One request with 7 drafts so runs as 8
requests, seven of them empty, 16 as 128 and 128 as 256: metadata, attention and its reduction go over them all. Where
the budget does not bind nothing was trimmed, and the batch is the very one that fixed verification runs with a graph
of its own number of requests. Here such graphs are captured too: one for each number of requests up to eight, and
above that one wherever the next would have a quarter more, 27 for up to 256 requests.

Which graph is taken is upstream's choice. The number of tokens after trimming is requests x (drafts + 1) only where
every request keeps every draft, and upstream says so in `uniform_token_count`: never for a trimmed batch, however even
its lengths look on the host. That is decided from the budget, which all ranks share (tp-consensus). A batch takes such
a graph only where it fills it, so there are no padding requests and no batch is padded further than before.
Data-parallel engines of a mixture of experts pad to one another's tokens, and an exact fit cannot be promised there:
they keep upstream's graphs.

The cost profile goes by sizes that any batch of so many tokens can replay; graphs of full batches alone are no such
sizes. Where `_dummy_run` makes a full batch of a size (0.31.0 on, with few tokens in a batch), its graph is timed.

The price is up to 27 more graphs to capture and keep, two thirds of what `patches.capture_grid` left out at 256
requests.

Upstream reference: `CudaGraphManager._init_candidates` and `captured_token_counts`, all releases. Hardware: all GPUs; a
CPU captures nothing. Delete this when upstream's graphs of decode batches have no more requests than the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from patches.install import Hook
from patches.token_grid import coarser

PATCH_ID = "full-batch-graphs"

PARTS = 4
"""Numbers of requests with a graph are at most one part in so many apart."""


def _add_full_batches(graphs_module: ModuleType) -> None:
    manager_class = graphs_module.CudaGraphManager
    init_candidates = manager_class._init_candidates
    captured_token_counts = manager_class.captured_token_counts

    @functools.wraps(init_candidates)
    def init_candidates_and_full_batches(self: Any) -> None:
        """Upstream's graphs, and those of full batches where drafts can be trimmed."""
        init_candidates(self)
        if not self.varlen_decode or self.vllm_config.parallel_config.data_parallel_size > 1:
            return
        for descriptions in self._capture_descs.values():
            full = _full_batches(descriptions, self.decode_query_len, self.max_num_reqs)
            for description in full:
                key = (description.num_tokens, description.num_active_loras)
                # First, since upstream takes the first that fits. Lists of neighbouring sizes may be one and the same.
                self._candidates[key] = [description, *self._candidates.get(key, [])]
            descriptions.extend(full)
            # Upstream captures the largest first, and only these to see how much memory all will take, with a profile
            # of what it captured: what is taken first of a size is captured first.
            descriptions.sort(key=lambda each: (each.num_tokens, each.uniform_token_count is not None), reverse=True)

    @functools.wraps(captured_token_counts)
    def token_counts_of_any_batch(self: Any) -> list[int]:
        """Upstream's sizes without those that only full batches replay."""
        counts: list[int] = captured_token_counts(self)
        if not self.varlen_decode:
            return counts
        replayed = {each.num_tokens for each in self.graphs if each.uniform_token_count is None}
        return [count for count in counts if count in replayed]

    manager_class._init_candidates = init_candidates_and_full_batches
    manager_class.captured_token_counts = token_counts_of_any_batch


def _full_batches(descriptions: list[Any], width: int, most_requests: int) -> list[Any]:
    """Graphs of full batches beside the given ones.

    Args:
        descriptions: Upstream's `BatchExecutionDescriptor`s of one mode. Those of decode batches bound the length of
            a request's query.
        width: Tokens of a request that keeps all its drafts.
        most_requests: Of a batch. Its graph has no empty requests as it is.
    """
    largest = {each.num_active_loras: each for each in reversed(descriptions) if each.max_query_len == width}
    return [
        replace(decode, num_tokens=width * requests, num_reqs=requests, uniform_token_count=width)
        for decode in largest.values()
        for requests in coarser(range(1, min(most_requests, decode.num_tokens // width) + 1), PARTS)
        if requests < most_requests
    ]


HOOKS: Mapping[str, Hook] = {"vllm.v1.worker.gpu.cudagraph_utils": _add_full_batches}
