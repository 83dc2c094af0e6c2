"""chunked-full-budgets, coarser-capture-grid and full-batch-graphs, against every release's own classes."""

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


WITH_A_GRAPH = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224]


def test_a_full_batch_replays_a_graph_of_its_own_requests_as_under_fixed_verification(release):
    upstream, patched = (found(release)[variant]["full"] for variant in ("upstream", "patched"))
    assert patched["graphs"] == len(WITH_A_GRAPH)
    for requests in range(1, 257):
        before, now, fixed = (
            answer[requests - 1] for answer in (upstream["replayed"], patched["replayed"], patched["fixed"])
        )
        assert before[1] == min(before[0], 256), "upstream's graph has as many requests as tokens"
        if requests in WITH_A_GRAPH:
            assert now == fixed == [8 * requests, requests]
        else:
            assert now[1] == min(now[0], 256)


def test_no_other_batch_replays_it(release):
    """Neither one of which a draft was trimmed nor one with a prefill, and its sizes are no one else's to profile."""
    upstream, patched = (found(release)[variant] for variant in ("upstream", "patched"))
    for tokens, requests in patched["full"]["trimmed"]:
        assert requests == min(tokens, 256)
    assert patched["full"]["prefilling"] == upstream["full"]["prefilling"]
    assert patched["full"]["profiled"] == patched["graphs"]["adaptive"]


def test_a_profile_of_the_two_largest_graphs_replays_no_other(release):
    """Upstream profiles the costs of these two as well, to see how much memory all will take."""
    assert found(release)["patched"]["full"]["largest_alone"] == [True, True]


def test_data_parallel_engines_keep_upstreams_graphs(release):
    assert found(release)["patched"]["full"]["of_two_engines"] == 0
