"""chunked-full-budgets and coarser-capture-grid, against every release's sampler, configuration and graph manager."""

from __future__ import annotations

from patches.capture_grid import PARTS
from tests.patches.release_process import answer

BATCHES = 25


def found(release):
    return answer("chunks_and_graphs", release, "0", str(BATCHES))


def test_upstream_refuses_chunks_where_it_asks(release):
    upstream = found(release)["upstream"]["chunks"]
    if release == "0.28.0":
        assert upstream["as_fixed"] == BATCHES, "it does not ask"
    else:
        assert upstream["refused"] == BATCHES


def test_an_untrimmed_batch_is_sampled_as_fixed_verification_samples_it(release):
    patched = found(release)["patched"]["chunks"]
    assert patched["as_fixed"] == patched["as_one_chunk"] == BATCHES
    assert patched["lengths"] > BATCHES, "requests of one batch must accept differently many"
    if release != "0.28.0":
        assert patched["trimmed"] == "refused", "the device alone knows where it ends"


def test_256_requests_of_7_drafts_capture_83_graphs_instead_of_147(release):
    upstream, patched = (found(release)[variant]["graphs"] for variant in ("upstream", "patched"))
    assert (len(upstream["fixed"]), len(upstream["adaptive"]), len(patched["adaptive"])) == (144, 147, 83)
    assert patched["fixed"] == upstream["fixed"]
    assert patched["given"] == upstream["given"] == [8, 1000, 1016]
    assert patched["adaptive"][-1] == 2048


def test_no_batch_is_padded_by_more_than_a_sixteenth_beyond_upstreams_padding(release):
    upstream, patched = (found(release)[variant]["graphs"]["adaptive"] for variant in ("upstream", "patched"))
    for tokens in range(1, 2049):
        before, now = (next(size for size in sizes if size >= tokens) for sizes in (upstream, patched))
        assert now == before or now <= tokens * (1 + 1 / PARTS)
