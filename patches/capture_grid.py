"""coarser-capture-grid: no more graphs than padding by a sixteenth asks for.

Upstream captures a graph every 8 tokens up to 256 and every 16 above, however large the largest is. An adaptive budget
may be any number, so it seems to want them all. It does not: the cost table is a step function of the captured sizes,
and a budget grows until it fills one. What a coarse grid costs is the padding of batches whose budget cannot grow.

A server of 256 requests x 7 drafts captures 147 graphs so, and then profiles each (`patches.step_costs`), though at
2,048 tokens a step of 16 is less than a hundredth. Here a size is left out where another pads the batch by at most a
sixteenth; of those the roundest is kept, which full batches of round numbers of requests fill. That makes 83 graphs,
all of upstream's up to 512 tokens among them. Sizes that the user gave stay as they are, as do the largest and the
largest that a full batch can use (`CudaGraphManager._init_candidates`).

The sizes are configuration, worked out once before any worker starts, so every rank captures the same.

Upstream reference: `VllmConfig._set_cudagraph_sizes`, all releases. Hardware: all GPUs; a CPU captures nothing, and
its list is empty. Delete this when upstream's steps grow with the size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from patches.install import Hook
from patches.token_grid import coarser_for_full_batches

PATCH_ID = "coarser-capture-grid"

PARTS = 16
"""A batch is padded by at most one part in so many."""


def _thin_upstreams_grid(config_module: ModuleType) -> None:
    set_sizes = config_module.VllmConfig._set_cudagraph_sizes

    @functools.wraps(set_sizes)
    def set_fewer_sizes(self: Any) -> None:
        """Upstream's sizes, fewer of them where verification is adaptive and the user gave none."""
        compilation = self.compilation_config
        given = compilation.cudagraph_capture_sizes is not None
        set_sizes(self)
        speculation = self.speculative_config
        if not given and speculation is not None and speculation.enable_adaptive_verification:
            compilation.cudagraph_capture_sizes = coarser_for_full_batches(
                compilation.cudagraph_capture_sizes,
                PARTS,
                width=speculation.num_speculative_tokens + 1,
                requests=self.scheduler_config.max_num_seqs,
            )

    config_module.VllmConfig._set_cudagraph_sizes = set_fewer_sizes


HOOKS: Mapping[str, Hook] = {"vllm.config.vllm": _thin_upstreams_grid}
