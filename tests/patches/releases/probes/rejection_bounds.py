"""A release's own rejection sampler on trimmed batches, with or without the patch.

usage: rejection_bounds.py VERSION stock|patched TASK [then TASK ...], a TASK being one of

    bindings
    edge                                          (the last row ends at memory that may not be read)
    outputs SEED COUNT
    distribution block|standard REQUESTS SEED

On a CPU kernels are interpreted and `edge` uses a guard page. On a GPU they are compiled and `edge` ends at the end
of an allocation, for compute-sanitizer to see (PYTORCH_NO_CUDA_MEMORY_CACHING=1).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import mmap
import sys
from typing import Any

import numpy as np
import release
import torch
from numpy.typing import NDArray

version, variant, *words = sys.argv[1:]
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    release.interpret()
if variant == "patched":
    release.install(version, "cuda-hopper", "block-rejection-bounds")

from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils  # noqa: E402

DRAFTS, VOCABULARY = 3, 8


def tensor(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype).to(DEVICE)


def readable_to_the_end(tokens: NDArray[np.int32]) -> torch.Tensor:
    """The tokens as a tensor whose last element is the last that may be read."""
    if DEVICE.type == "cuda":
        return tensor(tokens)
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
    placed = torch.frombuffer(memory, dtype=torch.int32, count=len(tokens), offset=page - 4 * len(tokens))
    placed.copy_(torch.from_numpy(tokens))
    return placed


def sample(
    target: NDArray[np.float64],
    draft: NDArray[np.float64],
    drafts: NDArray[np.int32],
    admitted: NDArray[np.int64],
    *,
    block: bool,
    first_position: int = 0,
    seed: int = 0,
    at_the_edge: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Verify `drafts` [requests, DRAFTS] of which `admitted` [requests] were admitted.

    `target` [DRAFTS + 1, V] and `draft` [DRAFTS, V] are probabilities by position, the same for every request.
    Returns the sampled tokens [requests, DRAFTS + 1] and how many each request got.
    """
    rows = admitted + 1
    row_position = np.concatenate([np.arange(count) for count in rows])
    fed = np.concatenate([[0, *tokens[:count]] for tokens, count in zip(drafts, admitted, strict=True)])
    fed = fed.astype(np.int32)
    sampled, counts = rejection_sampler.rejection_sample(
        tensor(np.log(target)[row_position], torch.float32),
        tensor(np.log(draft)[None], torch.float32),
        readable_to_the_end(fed) if at_the_edge else tensor(fed),
        tensor(np.concatenate(([0], np.cumsum(rows)))),
        tensor(first_position + np.arange(len(fed)), torch.int64),
        tensor(np.zeros(len(rows))),
        tensor(np.zeros(len(fed))),
        tensor(row_position),
        torch.ones(1, device=DEVICE),
        torch.full((1,), seed, dtype=torch.int64, device=DEVICE),
        DRAFTS,
        use_block_verification=block,
    )
    return sampled.cpu().numpy(), counts.cpu().numpy()


def probabilities(rng: np.random.Generator, rows: int) -> NDArray[np.float64]:
    return rng.dirichlet(np.full(VOCABULARY, 2.0), rows)


def draw(rng: np.random.Generator, distribution: NDArray[np.float64], count: int) -> NDArray[np.int32]:
    return rng.choice(VOCABULARY, count, p=distribution).astype(np.int32)


def edge() -> str:
    rng = np.random.default_rng(0)
    drafts = rng.integers(0, VOCABULARY, (3, DRAFTS)).astype(np.int32)
    target, draft = probabilities(rng, DRAFTS + 1), probabilities(rng, DRAFTS)
    sample(target, draft, drafts, np.array([DRAFTS, DRAFTS, 1]), block=True, at_the_edge=True)
    return "survived"


def outputs(seed: int, count: int) -> str:
    """A hash of what many trimmed batches sampled, block and standard verification in turn."""
    rng = np.random.default_rng(seed)
    digest = hashlib.sha256()
    for step in range(count):
        requests = int(rng.integers(1, 8))
        drafts = rng.integers(-1, VOCABULARY, (requests, DRAFTS)).astype(np.int32)
        target, draft = probabilities(rng, DRAFTS + 1), probabilities(rng, DRAFTS)
        admitted = rng.integers(0, DRAFTS + 1, requests)
        sampled, counts = sample(
            target, draft, drafts, admitted, block=step % 2 == 0, first_position=100 * step, seed=seed
        )
        for tokens, sampled_count in zip(sampled, counts, strict=True):
            digest.update(tokens[:sampled_count].tobytes())
    return digest.hexdigest()


def distribution(method: str, requests: int, seed: int) -> dict[str, Any]:
    """Token counts by position. What the sampler did not reach is drawn from the target, as later steps would."""
    rng = np.random.default_rng(seed)
    target, draft = probabilities(rng, DRAFTS + 1), probabilities(rng, DRAFTS)
    counts = np.zeros((DRAFTS + 1, VOCABULARY), dtype=np.int64)
    pairs = np.zeros((VOCABULARY, VOCABULARY), dtype=np.int64)
    reached = np.zeros(DRAFTS + 1, dtype=np.int64)
    position = 0
    while requests > 0:
        chunk = min(requests, 20_000)
        requests -= chunk
        drafts = np.stack([draw(rng, draft[step], chunk) for step in range(DRAFTS)], axis=1)
        admitted = rng.integers(0, DRAFTS + 1, chunk)
        admitted[-1] = 1
        sampled, sampled_counts = sample(
            target, draft, drafts, admitted, block=method == "block", first_position=position, seed=seed
        )
        position += int((admitted + 1).sum())
        completed = np.stack([draw(rng, target[step], chunk) for step in range(DRAFTS + 1)], axis=1)
        is_sampled = np.arange(DRAFTS + 1)[None, :] < sampled_counts[:, None]
        tokens = np.where(is_sampled, sampled, completed)
        reached += is_sampled.sum(axis=0)
        for step in range(DRAFTS + 1):
            counts[step] += np.bincount(tokens[:, step], minlength=VOCABULARY)
        np.add.at(pairs, (tokens[:, 0], tokens[:, 1]), 1)
    return {
        "target": target.tolist(),
        "draft": draft.tolist(),
        "counts": counts.tolist(),
        "pairs": pairs.tolist(),
        "reached": reached.tolist(),
    }


def bindings() -> dict[str, bool]:
    """Whether every module that names the sampler got the one that this process should run."""
    import importlib

    from patches.ledger import LEDGER

    row = next(patch for patch in LEDGER if patch.id == "block-rejection-bounds")
    found = {}
    for module_name in row.bound_in[f"{rejection_sampler_utils.__name__}:rejection_sample"]:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            continue
        found[module_name] = module.rejection_sample is rejection_sampler_utils.rejection_sample and (
            hasattr(module.rejection_sample, "__wrapped__") == (variant == "patched")
        )
    return found


def answer(task: str, *arguments: str) -> Any:
    if task == "edge":
        return edge()
    if task == "outputs":
        return outputs(int(arguments[0]), int(arguments[1]))
    if task == "distribution":
        return distribution(arguments[0], int(arguments[1]), int(arguments[2]))
    return bindings()


logging.disable(logging.INFO)
for task, *arguments in release.tasks(words):
    found = answer(task, *arguments)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    print(json.dumps(found), flush=True)
