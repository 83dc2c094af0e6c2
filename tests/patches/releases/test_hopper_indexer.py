"""hopper-flattened-indexer, against the indexer that vLLM 0.28.0 ships."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.patches.release_process import answer, answers

SM90, SM100 = "90", "100"
SEEN_IN_THE_FIELD = "Adaptive verification trims verification requests on device, which the DeepseekV4IndexerBackend"
FACTS, ADAPTIVE, FIXED = TASKS = ("facts", "adaptive 0 200", "fixed 1 150")

probe = partial(answer, "hopper_indexer", "0.28.0")


def ask(variant: str, task: str) -> Any:
    """On SM90, where one process answers everything."""
    return answers("hopper_indexer", "0.28.0", variant, SM90, tasks=TASKS)[task]


def test_without_the_patch_the_engine_refuses_to_start():
    stock = ask("stock", FACTS)
    assert stock["mismatch"] == [False, False]
    assert stock["startup_error"].startswith(SEEN_IN_THE_FIELD)
    assert stock["graphs"]["adaptive"] == "UNIFORM_BATCH"
    assert "use_flattening=False" in stock["log"]["adaptive"]


def test_with_the_patch_it_starts_and_flattens():
    patched = ask("patched", FACTS)
    assert patched["mismatch"] == [True, True]
    assert patched["startup_error"] is None
    assert patched["graphs"]["adaptive"] == "ALWAYS"
    assert "use_flattening=True supports_varlen=False" in patched["log"]["adaptive"]


def test_fixed_and_plain_decoding_keep_upstreams_answers():
    stock, patched = ask("stock", FACTS), ask("patched", FACTS)
    for mode in ("fixed", "fixed_7", "plain"):
        assert patched["graphs"][mode] == stock["graphs"][mode]
        assert patched["log"][mode] == stock["log"][mode]


def test_sm100_is_untouched():
    assert probe("patched", SM100, FACTS) == probe("stock", SM100, FACTS)


def test_metadata_equals_the_reference():
    patched = ask("patched", ADAPTIVE)
    assert patched["first"] == []
    assert patched["wrong"] == 0
    assert patched["moved"] == 0


@pytest.mark.slow
def test_metadata_equals_the_reference_in_2000_batches():
    patched = probe("patched", SM90, "adaptive", "0", "2000", timeout=1200)
    assert (patched["first"], patched["wrong"], patched["moved"]) == ([], 0, 0)


def test_upstreams_shortcut_would_mix_requests_up():
    """The reference can tell: upstream's own metadata, with flattening forced on, fails it."""
    assert ask("stock", ADAPTIVE)["wrong"] > 0


def test_fixed_verification_gets_upstreams_metadata():
    assert ask("patched", FIXED)["digest"] == ask("stock", FIXED)["digest"]
