"""The step costs that the CPU engine plans with.

Upstream profiles its cost tables while it captures CUDA graphs (`AdaptiveVerificationManager.batches_to_profile`);
nothing is captured on a CPU, and a measured table would say only that interpreted drafting dwarfs verification, so
that nothing is ever trimmed. These curves have the shape of an accelerator's instead: flat while a step is bound by
memory, then rising with every token. They make the tiny pair behave under load as a real deployment does.
"""

DRAFT_CURVE_MS: tuple[tuple[int, float], ...] = ((1, 2.0), (16, 4.0))
"""(requests, milliseconds of drafting)."""

VERIFY_CURVE_MS: tuple[tuple[int, float], ...] = (
    (1, 10.0),
    (16, 10.5),
    (32, 12.0),
    (64, 18.0),
    (96, 26.0),
    (256, 70.0),
)
"""(tokens, milliseconds of verification)."""
