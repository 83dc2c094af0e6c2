"""A release's own sparse indexer, told that it runs on SM90 or gfx950, with its rows built by one kernel or not.

usage: ragged_metadata.py VERSION HARDWARE PATCHES TASK [then TASK ...], a TASK being one of

    adaptive|fixed SEED COUNT
    replay SEED COUNT               (on a GPU)
    time REQUESTS TOKENS PAGES      upstream's code and the patch's in turn, in one process

HARDWARE is `cuda-hopper` or `rocm-gfx950`; PATCHES are ids separated by commas, or `none`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import release
import torch

version, hardware, ids, *words = sys.argv[1:]
if not torch.cuda.is_available():
    release.interpret()
for patch in [] if ids == "none" else ids.split(","):
    release.install(version, hardware, patch)

import indexer_steps as steps  # noqa: E402
from vllm.v1.attention.backends.mla import indexer  # noqa: E402

from tests.bench.alternating import microseconds  # noqa: E402

SHAPES = (steps.Shape(3, 5), steps.Shape(7, 1), steps.Shape(5, 17))
ROCM = hardware == "rocm-gfx950"

steps.pretend(release.platform(cuda_family=None if ROCM else 90, rocm=ROCM), deep_gemm=not ROCM)


def flattening_builder(shape: steps.Shape, *, adaptive: bool, max_rows: int = 64) -> Any:
    builder = steps.make_builder(steps.config(shape.drafts, adaptive=adaptive, max_rows=max_rows), shape)
    builder.use_flattening = True
    return builder


def builders(*, adaptive: bool) -> Iterator[tuple[Any, steps.Shape]]:
    for shape in SHAPES:
        yield flattening_builder(shape, adaptive=adaptive), shape


def timings(requests: int, tokens: int, pages: int) -> dict[str, dict[str, float]]:
    """Preparing decode rows, even and ragged, by upstream's code and by the patch's."""
    ours = indexer.DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors
    upstream = getattr(ours, "__wrapped__", ours)
    calls: dict[str, Callable[[], object]] = {}
    shape = steps.Shape(tokens - 1, pages)
    for name, ragged in (("uniform", False), ("ragged", True)):
        step = steps.decode_step(requests, tokens, pages, ragged=ragged)
        adaptive = flattening_builder(shape, adaptive=True, max_rows=8192)
        # Upstream takes its even path only where verification is fixed.
        other = flattening_builder(shape, adaptive=ragged, max_rows=8192)
        calls[f"{name}, upstream"] = lambda other=other, step=step: upstream(other, **step)
        calls[f"{name}, one kernel"] = lambda adaptive=adaptive, step=step: adaptive._prepare_decode_tensors(**step)
    on_gpu = steps.DEVICE.type == "cuda"
    return microseconds(calls, 400 if on_gpu else 3, torch.cuda.synchronize if on_gpu else lambda: None)


def answer(task: str, *numbers: int) -> Any:
    if task == "replay":
        return steps.replayed_steps(builders(adaptive=True), *numbers)
    if task == "time":
        return timings(*numbers)
    adaptive = task == "adaptive"
    return steps.random_steps(builders(adaptive=adaptive), *numbers, adaptive=adaptive)


logging.disable(logging.INFO)
for task, *numbers in release.tasks(words):
    print(json.dumps(answer(task, *map(int, numbers))), flush=True)
