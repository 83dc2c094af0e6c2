"""dspark-verification: what was drafted, verified and accepted, and whether confidence and costs were right."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from panels import (
    BLUE,
    ENGINE,
    GREEN,
    NUMBER,
    PER_SECOND,
    RED,
    SECONDS,
    SHARE,
    TOKENS,
    TOKENS_PER_SECOND,
    YELLOW,
    areas,
    bars,
    dashboard,
    heat,
    lines,
    mean,
    number,
    query,
    rate,
    thresholds,
)

PLAIN = thresholds((None, BLUE))
PROPOSED, VERIFIED, ACCEPTED, EXPECTED = (
    rate(f"dspark_{what}_draft_tokens_total") for what in ("proposed", "verified", "accepted", "expected_accepted")
)
PREDICTIONS, CONFIRMED = (rate(f"dspark_confidence_{what}_total") for what in ("predictions", "accepted"))
MEASURED, PREDICTED = rate("dspark_step_seconds_sum"), rate("dspark_step_predicted_seconds_total")

PROMISED = " or ".join(
    f'label_replace(vector({low / 10 + 0.05:.2f}), "bin", "{low / 10:.1f}-{(low + 1) / 10:.1f}", "", "")'
    for low in range(10)
)
"""The middle of each bin of confidence: PromQL cannot read a number from a label."""


def share(part: str, whole: str, by: str = "") -> str:
    """A ratio of sums; absent while the whole is zero."""
    return f"sum{by} ({part}) / (sum{by} ({whole}) > 0)"


NOW = (
    number(
        "Acceptance length",
        "Accepted drafts and the bonus token, per request and verification step.",
        TOKENS,
        PLAIN,
        query(mean("dspark_acceptance_length"), "mean"),
    ),
    number(
        "Verified length",
        "Verified width per request and step, bonus token included: what the budget admits.",
        TOKENS,
        PLAIN,
        query(mean("dspark_verified_length"), "mean"),
    ),
    number(
        "Accepted of verified",
        "Share of the verified drafts that were accepted. It rises when the budget trims.",
        SHARE,
        PLAIN,
        query(share(ACCEPTED, VERIFIED), "accepted"),
    ),
    number(
        "Trimmed of proposed",
        "Share of the proposed drafts that the budget left out.",
        SHARE,
        PLAIN,
        query(f"1 - {share(VERIFIED, PROPOSED)}", "trimmed"),
    ),
    number(
        "Accepted of expected",
        "Accepted drafts over those that confidence predicted: 1 is right, at any load.",
        SHARE,
        thresholds((None, RED), (0.5, YELLOW), (0.8, GREEN), (1.25, YELLOW)),
        query(share(ACCEPTED, EXPECTED), "accepted"),
    ),
    number(
        "Cost error",
        "Measured step time over what the cost tables say, less 1. On a CPU the tables are made up.",
        SHARE,
        thresholds((None, YELLOW), (-0.3, GREEN), (0.3, YELLOW), (1, RED)),
        query(f"{share(MEASURED, PREDICTED)} - 1", "error"),
    ),
)

LENGTHS = (
    lines(
        "Acceptance and verified length",
        "Tokens that a request gains in a step, and the width that was verified for it, both with the bonus token.",
        TOKENS,
        query(mean("dspark_acceptance_length"), "acceptance length"),
        query(mean("dspark_verified_length"), "verified length"),
    ),
    lines(
        "Acceptance length by engine",
        "Engines under different load differ rightly.",
        TOKENS,
        query(mean("dspark_acceptance_length", " by (instance, engine)"), "{{instance}} engine {{engine}}"),
    ),
    heat(
        "Acceptance lengths",
        "Requests and steps a second by acceptance length.",
        TOKENS,
        "dspark_acceptance_length",
    ),
    heat(
        "Verified lengths",
        "Requests and steps a second by verified width: how the budget is shared out.",
        TOKENS,
        "dspark_verified_length",
    ),
)

POSITIONS = (
    lines(
        "Draft tokens",
        "Drafts that were proposed, admitted to verification, accepted, and expected to be accepted.",
        TOKENS_PER_SECOND,
        query(f"sum({PROPOSED})", "proposed"),
        query(f"sum({VERIFIED})", "verified"),
        query(f"sum({ACCEPTED})", "accepted"),
        query(f"sum({EXPECTED})", "expected"),
    ),
    bars(
        "Draft tokens by position",
        "The same by position in the draft. Fewer are verified at later positions, since fewer survive to them.",
        TOKENS_PER_SECOND,
        "position",
        (
            ("proposed", f"sum by (position) ({PROPOSED})"),
            ("verified", f"sum by (position) ({VERIFIED})"),
            ("accepted", f"sum by (position) ({ACCEPTED})"),
            ("expected", f"sum by (position) ({EXPECTED})"),
        ),
    ),
    lines(
        "Accepted of verified by position",
        "Share of the verified drafts that were accepted.",
        SHARE,
        query(share(ACCEPTED, VERIFIED, " by (position)"), "position {{position}}"),
        span=8,
    ).max(1),
    lines(
        "Accepted of proposed by position",
        "Share of the proposed drafts that were accepted. It falls when the budget trims, like upstream's rate.",
        SHARE,
        query(share(ACCEPTED, PROPOSED, " by (position)"), "position {{position}}"),
        span=8,
    ).max(1),
    lines(
        "Trimmed of proposed by position",
        "Share of the proposed drafts that the budget left out.",
        SHARE,
        query(f"1 - {share(VERIFIED, PROPOSED, ' by (position)')}", "position {{position}}"),
        span=8,
    ).max(1),
)

CONFIDENCE = (
    bars(
        "Reliability",
        "Share of the drafts of each confidence that were accepted, where those before them were, beside the middle of "
        "the bin. Lower than promised: confidence promises too much.",
        SHARE,
        "bin",
        (
            ("accepted", share(CONFIRMED, PREDICTIONS, " by (bin)")),
            ("promised", f"({PROMISED}) and on (bin) (sum by (bin) ({PREDICTIONS}) > 0)"),
        ),
    ).max(1),
    bars(
        "Confidences",
        "Drafts whose outcome is known, by confidence.",
        TOKENS_PER_SECOND,
        "bin",
        (("drafts", f"sum by (bin) ({PREDICTIONS})"),),
    ),
    lines(
        "Accepted of expected by position",
        "Accepted drafts over those that confidence predicted: under 1, confidence promises too much and verification "
        "is wasted; over 1, drafts are left out that would have been accepted.",
        SHARE,
        query(share(ACCEPTED, EXPECTED, " by (position)"), "position {{position}}"),
        query(share(ACCEPTED, EXPECTED), "all"),
    ),
    lines(
        "Calibration temperature",
        "What the fit divides the confidences' log-odds by, on average over engines: above 1 where they are too sure "
        "of themselves. With --calibration shadow it is reported and not used.",
        NUMBER,
        query(f"avg by (position) (dspark_calibration_temperature{{{ENGINE}}})", "position {{position}}"),
    ),
)

BUDGET = (
    areas(
        "Plans",
        "Verification steps a second, by what the budget did: all drafts verified (full), some (trimmed), none, or all "
        "because verification is fixed.",
        PER_SECOND,
        query(f"sum by (plan) ({rate('dspark_verification_steps_total')})", "{{plan}}"),
    ),
    lines(
        "Budget of a step",
        "Drafts proposed and admitted in a verification step, all requests of an engine together.",
        TOKENS,
        query(share(PROPOSED, rate("dspark_verification_steps_total")), "proposed"),
        query(share(VERIFIED, rate("dspark_verification_steps_total")), "budget"),
    ),
    lines(
        "Step time",
        "How long the timed steps took, by phase, and what the cost tables said of both phases together.",
        SECONDS,
        query(mean("dspark_step_seconds", " by (phase)"), "{{phase}}"),
        query(
            f"sum({PREDICTED}) / (max(sum by (phase) ({rate('dspark_step_seconds_count')})) > 0)",
            "predicted, both",
        ),
    ),
    lines(
        "Cost error",
        "Measured step time over what the cost tables say, less 1: over 0, steps cost more than the budget assumes.",
        SHARE,
        query(f"{share(MEASURED, PREDICTED)} - 1", "error"),
    ),
)


def verification() -> Dashboard:
    """Adaptive verification in depth."""
    return dashboard(
        "dspark-verification",
        "dspark-serve / Adaptive verification",
        "What was proposed, verified and accepted, and whether confidence and cost model were right.",
        ("Now", NOW),
        ("Lengths", LENGTHS),
        ("By position", POSITIONS),
        ("Confidence", CONFIDENCE),
        ("Budget and cost", BUDGET),
    )
