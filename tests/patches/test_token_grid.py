"""Thinning keeps its bound, whatever the sizes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.capture_grid import PARTS
from patches.token_grid import coarser, coarser_for_full_batches


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


def usable(sizes: list[int], width: int, requests: int) -> int:
    """Tokens of the largest uniform decode graph of `CudaGraphManager._init_candidates`; 0 without one."""
    rounded = [-(-size // width) * width for size in sizes]
    return max((size for size in rounded if size <= min(width * requests, sizes[-1])), default=0)


def test_a_full_batch_of_an_odd_width_keeps_its_graph():
    """33 requests of 6 drafts: 231 tokens, which upstream adds to its grid beside the rounder 232."""
    sizes = sorted({*upstreams(462), 231})
    assert 231 not in coarser(sizes, PARTS)
    assert 231 in coarser_for_full_batches(sizes, PARTS, width=7, requests=33)


@given(
    st.sets(st.integers(1, 4096), max_size=60).map(sorted), st.integers(1, 20), st.integers(1, 9), st.integers(1, 99)
)
def test_no_full_batch_loses_the_graph_that_it_had(sizes, parts, width, requests):
    kept = coarser_for_full_batches(sizes, parts, width=width, requests=requests)
    assert set(kept) <= set(sizes)
    assert kept == sorted(kept)
    assert kept[-1:] == sizes[-1:]
    assert [size for size in kept if size <= width * requests][-1:] or not [s for s in sizes if s <= width * requests]
    for below, above in itertools.pairwise(kept):
        assert above * parts <= below * (parts + 1) or not any(below < size < above for size in sizes)
    if sizes:
        assert usable(kept, width, requests) == usable(sizes, width, requests)


@pytest.mark.parametrize(("largest", "graphs"), [(512, 51), (1024, 67), (2048, 83)])
def test_a_full_batch_of_a_round_number_costs_no_graph_more(largest, graphs):
    assert len(coarser_for_full_batches(upstreams(largest), PARTS, width=8, requests=256)) == graphs


def test_no_sizes_stay_none():
    assert coarser([], PARTS) == []
    assert coarser_for_full_batches([], PARTS, width=8, requests=4) == []
