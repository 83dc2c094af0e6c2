"""Thins a list of sizes by a rule on how far apart neighbours may be. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


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
