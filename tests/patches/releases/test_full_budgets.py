"""chunked-full-budgets, against the sampler of every release."""

from __future__ import annotations

from tests.patches.release_process import answer

BATCHES = 25


def test_upstream_refuses_chunks_where_it_asks(release):
    stock = answer("full_budgets", release, "stock", "0", str(BATCHES))
    if release == "0.28.0":
        assert stock["as_fixed"] == BATCHES, "it does not ask"
    else:
        assert stock["refused"] == BATCHES


def test_an_untrimmed_batch_is_sampled_as_fixed_verification_samples_it(release):
    patched = answer("full_budgets", release, "patched", "0", str(BATCHES))
    assert patched["as_fixed"] == patched["as_one_chunk"] == BATCHES
    assert patched["lengths"] > BATCHES, "requests of one batch must accept differently many"
    if release != "0.28.0":
        assert patched["trimmed"] == "refused", "the device alone knows where it ends"
