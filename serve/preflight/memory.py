"""How much memory one GPU needs, from the sizes that a checkpoint's small files tell. Pure arithmetic, in bytes.

The estimate is a lower bound: it leaves out activations and what a backend allocates for itself. It is there to
refuse what cannot fit, not to plan the last GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30

ADAPTIVE_GRAPHS = int(4.71 * GIB)
"""Graphs captured with adaptive verification: vllm#52795 saw 4.71 GiB (K=7, TP2/DP2 on H200)."""

FIXED_GRAPHS = int(2.61 * GIB)
"""The same with fixed verification."""

_COMPRESSED_ROW = 584
"""Bytes of one token in the fp8_ds_mla layout: 448 fp8 + 64 bf16 values + 8 of scale."""

_INDEXER_ROW = 132
"""Bytes of one indexer key: 128 fp8 values and a 4-byte scale."""

_INDEXED_RATIO = 4
"""The compression ratio whose layers have an indexer."""


@dataclass(frozen=True)
class Estimate:
    """One GPU's share, in bytes.

    Attributes:
        weights: Weights, target and draft.
        ranks: GPUs that the weights are divided by.
        kv: KV cache of one request of the longest allowed length, the least that vLLM starts with.
        kv_tokens: That length.
        graphs: Captured graphs.
    """

    weights: int
    ranks: int
    kv: int
    kv_tokens: int
    graphs: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.graphs

    def __str__(self) -> str:
        """The arithmetic in GiB."""
        return (
            f"weights {self.weights * self.ranks / GIB:.1f}/{self.ranks} = {self.weights / GIB:.1f} GiB"
            f" + KV of one request of {self.kv_tokens:,} tokens {self.kv / GIB:.2f} GiB"
            f" + graphs {self.graphs / GIB:.2f} GiB = {self.total / GIB:.1f} GiB"
        )


def estimate(
    *, weight_bytes: int, ranks: int, config: Mapping[str, Any], tokens: int, kv_bytes: int, shards: int, graphs: int
) -> Estimate:
    """What one GPU needs.

    Args:
        weight_bytes: All weights.
        ranks: GPUs that share them.
        config: The target's config.
        tokens: Longest request.
        kv_bytes: Bytes of one cached value.
        shards: Tensor-parallel ranks that share the KV heads.
        graphs: Bytes of captured graphs.
    """
    per_token = kv_bytes_per_token(config, kv_bytes, shards)
    return Estimate(weight_bytes // ranks, ranks, int(per_token * tokens), tokens, graphs)


def kv_bytes_per_token(config: Mapping[str, Any], value_bytes: int, shards: int) -> float:
    """KV cache of one token on one GPU, or 0 where the config does not tell.

    A layer with `compress_ratios` r keeps one row for every r tokens (0: a sliding window, a constant); every rank
    holds all of it. Otherwise a layer keeps a key and a value for each of its KV heads, which the ranks share.
    """
    ratios = config.get("compress_ratios")
    if isinstance(ratios, list):
        rows = [ratio for ratio in ratios if isinstance(ratio, int) and not isinstance(ratio, bool) and ratio > 0]
        compressed = sum(_COMPRESSED_ROW / ratio for ratio in rows)
        return compressed + sum(_INDEXER_ROW / ratio for ratio in rows if ratio == _INDEXED_RATIO)
    layers, heads, width = (_count(config, key) for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    return 2 * layers * max(1, heads // shards) * width * value_bytes if heads else 0.0


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31 else 0
