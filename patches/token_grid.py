"""Thins a list of sizes by a rule on how far apart neighbours may be. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


def coarser_for_full_batches(sizes: Sequence[int], parts: int, *, width: int, requests: int) -> list[int]:
    """As `coarser`, with the size that a full batch needs among them.

    Upstream rounds a size up to whole requests and drops what is then more than a full batch, or more than the largest
    size. So the largest size that is neither stays: without it a full batch of an odd width would have no graph.

    Args:
        sizes: Ascending, at least 1 each.
        parts: At least 1.
        width: Tokens of a request that keeps all its drafts.
        requests: Of a full batch.

    Returns:
        Some of `sizes`, ascending.
    """
    largest = sizes[-1] if sizes else 0
    full = min(width * requests, largest - largest % width)
    kept = coarser([size for size in sizes if size <= full], parts)
    above = [size for size in sizes if size > full]
    return [*kept[:-1], *coarser([*kept[-1:], *above], parts)]


def coarser(sizes: Sequence[int], parts: int) -> list[int]:
    """Leave out sizes as far as a bound on padding allows.

    The first and the last stay. The one after a kept size is at most 1/`parts` bigger, or its neighbour where none is
    that close: what is padded up to a kept size grows by at most 1/`parts`, unless it did before. Of the sizes in
    reach the roundest is taken, the multiple of the largest power of two, since full batches of round numbers of
    requests fill it.

    Args:
        sizes: Ascending, at least 1 each.
        parts: At least 1.

    Returns:
        Some of `sizes`, ascending.
    """
    kept = list(sizes[:1])
    rest = list(sizes[1:])
    while rest:
        reached = [size for size in rest if size * parts <= kept[-1] * (parts + 1)] or rest[:1]
        following = rest[-1] if rest[-1] in reached else max(reached, key=lambda size: (size & -size, size))
        kept.append(following)
        rest = [size for size in rest if size > following]
    return kept
