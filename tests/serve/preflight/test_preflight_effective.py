"""What a start would really run with."""

from __future__ import annotations

import pytest
from made_up import made_up_plan

from serve.preflight.effective import effective_graph_mode, effective_lines
from serve.profile import Verification

V4, V41, TINY = "deepseek-v4-flash-h200x4", "deepseek-v4.1-flash-mi355x4", "tiny-cpu"
FORCED = "FULL_AND_PIECEWISE, forced by adaptive verification"


@pytest.mark.parametrize(
    ("profile", "words", "verification", "mode"),
    [
        (V4, [], Verification.ADAPTIVE, f"{FORCED} (FULL_DECODE_ONLY without piecewise capture)"),
        (V4, ["-cc.cudagraph_mode=FULL"], Verification.ADAPTIVE, f"{FORCED} instead of FULL"),
        (V4, ["-cc.cudagraph_mode=full_decode_only"], Verification.ADAPTIVE, "FULL_DECODE_ONLY"),
        (V4, ["-cc.cudagraph_mode=FULL"], Verification.FIXED, "FULL"),
        (V4, [], Verification.FIXED, "vLLM's default"),
        (V4, ["--enforce-eager"], Verification.FIXED, "NONE: nothing is captured"),
        (TINY, [], Verification.ADAPTIVE, "NONE: nothing is captured"),
    ],
)
def test_adaptive_verification_changes_the_graph_mode(
    profile: str, words: list[str], verification: Verification, mode: str
) -> None:
    assert effective_graph_mode(made_up_plan(profile, extra=words, verification=verification)) == mode


@pytest.mark.parametrize(
    ("verification", "lines"),
    [
        (
            Verification.ADAPTIVE,
            ["verification: adaptive", "speculation: dspark, 7 draft tokens, probabilistic sampling"],
        ),
        (Verification.FIXED, ["verification: fixed", "speculation: dspark, 7 draft tokens, probabilistic sampling"]),
        (Verification.OFF, ["verification: off", "speculation: off"]),
    ],
)
def test_the_mode_and_the_parallelism_are_said(verification: Verification, lines: list[str]) -> None:
    found = effective_lines(made_up_plan(V4, verification=verification))
    assert found[:2] == lines
    assert "parallelism: tensor 2, data 2, pipeline 1, experts over all ranks" in found
    assert "requests: 128 x 2 at a time" in found
    assert "KV cache: fp8" in found


def test_words_after_the_profile_win() -> None:
    found = effective_lines(made_up_plan(V41, extra=["-tp", "2", "-cc.max_cudagraph_capture_size=512"]))
    assert "parallelism: tensor 2, data 1, pipeline 1, experts split with tensors" in found
    assert "largest graph: 512 tokens" in found
