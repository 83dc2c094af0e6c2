"""Thinning keeps its bound, whatever the sizes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.capture_grid import PARTS
from patches.token_grid import coarser


def upstreams(largest: int) -> list[int]:
    """`VllmConfig._set_cudagraph_sizes`'s sizes."""
    return [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]


@pytest.mark.parametrize(("largest", "before", "after"), [(512, 51, 51), (1024, 83, 67), (2048, 147, 83)])
def test_how_many_graphs_are_left(largest, before, after):
    sizes = upstreams(largest)
    assert len(sizes) == before
    assert len(coarser(sizes, PARTS)) == after
    assert coarser(sizes, PARTS)[:51] == sizes[:51]


@pytest.mark.parametrize("requests", [16, 32, 64, 96, 100, 128, 160, 192, 200, 224, 256])
def test_a_full_batch_of_a_round_number_of_requests_fills_a_graph(requests):
    assert requests * 8 in coarser(upstreams(2048), PARTS)


@given(st.sets(st.integers(1, 4096), max_size=60).map(sorted), st.integers(1, 20))
def test_padding_is_bounded(sizes, parts):
    kept = coarser(sizes, parts)
    assert set(kept) <= set(sizes)
    assert kept == sorted(kept)
    assert kept[:1] == sizes[:1]
    assert kept[-1:] == sizes[-1:]
    for below, above in itertools.pairwise(kept):
        assert above * parts <= below * (parts + 1) or not any(below < size < above for size in sizes)


def test_no_sizes_stay_none():
    assert coarser([], PARTS) == []
