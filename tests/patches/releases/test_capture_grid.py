"""coarser-capture-grid, against the configuration and the graph manager of every release."""

from __future__ import annotations

from patches.capture_grid import PARTS
from tests.patches.release_process import answer


def test_256_requests_of_7_drafts_capture_83_graphs_instead_of_147(release):
    stock = answer("capture_grid", release, "stock", "256", "7", "2048")
    patched = answer("capture_grid", release, "patched", "256", "7", "2048")
    assert (len(stock["fixed"]), len(stock["adaptive"]), len(patched["adaptive"])) == (144, 147, 83)
    assert patched["fixed"] == stock["fixed"]
    assert patched["given"] == stock["given"] == [8, 1000, 1016]
    assert patched["adaptive"][-1] == 2048


def test_no_batch_is_padded_by_more_than_a_sixteenth_beyond_upstreams_padding(release):
    stock = answer("capture_grid", release, "stock", "256", "7", "2048")["adaptive"]
    patched = answer("capture_grid", release, "patched", "256", "7", "2048")["adaptive"]
    for tokens in range(1, 2049):
        before, now = (next(size for size in sizes if size >= tokens) for sizes in (stock, patched))
        assert now == before or now <= tokens * (1 + 1 / PARTS)
