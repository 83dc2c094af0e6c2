"""How many graphs a release's own configuration and graph manager capture.

usage: capture_grid.py VERSION stock|patched REQUESTS DRAFTS LARGEST

LARGEST is `max_cudagraph_capture_size`. Prints the sizes of the graphs by mode, and those of sizes that a user gave.
"""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

import release
import torch

version, variant, *numbers = sys.argv[1:]
if variant == "patched":
    release.install(version, "cuda-hopper", "coarser-capture-grid")
REQUESTS, DRAFTS, LARGEST = map(int, numbers)

from vllm.config import compilation  # noqa: E402
from vllm.config import vllm as configuration  # noqa: E402
from vllm.v1.worker.gpu import cudagraph_utils  # noqa: E402

MODE = compilation.CUDAGraphMode.FULL_DECODE_ONLY


def captured(mode: str, given: list[int] | None = None) -> list[int]:
    """Sizes of the decode graphs, ascending."""
    speculation = SimpleNamespace(
        enable_adaptive_verification=mode == "adaptive",
        uses_dynamic_speculative_decoding=lambda: False,
        num_speculative_tokens=DRAFTS,
        num_speculative_tokens_per_batch_size=None,
    )
    sizes = {"cudagraph_capture_sizes": given} if given else {"max_cudagraph_capture_size": LARGEST}
    compilation_config = compilation.CompilationConfig(cudagraph_mode=MODE, **sizes)
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation_config,
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=8192),
        speculative_config=speculation,
        performance_mode="balanced",
        num_speculative_tokens=DRAFTS,
        uniform_decode_query_len=DRAFTS + 1,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
    )
    configuration.VllmConfig._set_cudagraph_sizes(config)
    manager: Any = object.__new__(cudagraph_utils.CudaGraphManager)
    vars(manager).update(
        vllm_config=config,
        compilation_config=compilation_config,
        cudagraph_mode=MODE,
        max_num_reqs=REQUESTS,
        decode_query_len=DRAFTS + 1,
        varlen_decode=mode == "adaptive",
        lora_capture_cases=[0],
        ubatch_runner=None,
        device=torch.device("cpu"),
        _candidates={},
        _capture_descs={},
    )
    manager._init_candidates()
    (graphs,) = manager._capture_descs.values()
    return sorted(graph.num_tokens for graph in graphs)


logging.disable(logging.WARNING)
print(
    json.dumps(
        {"fixed": captured("fixed"), "adaptive": captured("adaptive"), "given": captured("adaptive", [8, 1000, 1016])}
    )
)
