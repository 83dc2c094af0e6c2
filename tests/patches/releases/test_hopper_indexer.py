"""hopper-flattened-indexer, against the indexer that vLLM 0.28.0 ships."""

from __future__ import annotations

from functools import partial

from tests.patches.release_process import answer

SM90, SM100 = "90", "100"
SEEN_IN_THE_FIELD = "Adaptive verification trims verification requests on device, which the DeepseekV4IndexerBackend"

probe = partial(answer, "hopper_indexer", "0.28.0")


def test_without_the_patch_the_engine_refuses_to_start():
    stock = probe("stock", SM90, "facts")
    assert stock["mismatch"] == [False, False]
    assert stock["startup_error"].startswith(SEEN_IN_THE_FIELD)
    assert stock["graphs"]["adaptive"] == "UNIFORM_BATCH"
    assert "use_flattening=False" in stock["log"]["adaptive"]


def test_with_the_patch_it_starts_and_flattens():
    patched = probe("patched", SM90, "facts")
    assert patched["mismatch"] == [True, True]
    assert patched["startup_error"] is None
    assert patched["graphs"]["adaptive"] == "ALWAYS"
    assert "use_flattening=True supports_varlen=False" in patched["log"]["adaptive"]


def test_fixed_and_plain_decoding_keep_upstreams_answers():
    stock, patched = probe("stock", SM90, "facts"), probe("patched", SM90, "facts")
    for mode in ("fixed", "fixed_7", "plain"):
        assert patched["graphs"][mode] == stock["graphs"][mode]
        assert patched["log"][mode] == stock["log"][mode]


def test_sm100_is_untouched():
    assert probe("patched", SM100, "facts") == probe("stock", SM100, "facts")


def test_metadata_equals_the_reference():
    patched = probe("patched", SM90, "adaptive", "0", "2000", timeout=1200)
    assert patched["first"] == []
    assert patched["wrong"] == 0
    assert patched["moved"] == 0


def test_upstreams_shortcut_would_mix_requests_up():
    """The reference can tell: upstream's own metadata, with flattening forced on, fails it."""
    assert probe("stock", SM90, "adaptive", "0", "150")["wrong"] > 0


def test_fixed_verification_gets_upstreams_metadata():
    patched, stock = probe("patched", SM90, "fixed", "1", "150"), probe("stock", SM90, "fixed", "1", "150")
    assert patched["digest"] == stock["digest"]
