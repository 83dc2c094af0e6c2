"""The section that a report leads with: does adaptive verification keep accuracy, and where does it win?"""

from __future__ import annotations

from serve.validate.findings import Comparison, Findings, Kept, Outputs, ScoreDifference
from serve.validate.markdown import line
from serve.validate.results import Arm
from serve.validate.statistics import STANDARD_ERRORS, Agreement, Ratio
from serve.validate.wording import ARMS, FAILED, signed


def verdict_section(findings: Findings) -> list[str]:
    """Accuracy, outputs, throughput with intervals, failures and what is missing."""
    verdict = findings.verdict
    lines = ["## Verdict", "", f"- **Accuracy: {verdict.accuracy}.** {_accuracy_verdict(findings)}"]
    lines += [f"- {_outputs_verdict(findings)}"]
    for win in verdict.throughput:
        each = {c.concurrency: c for c in findings.comparisons if c.against is win.against}
        lines.append(f"- **Throughput, adaptive against {ARMS[win.against]}:**")
        lines += [
            f"  - {standing} at concurrency " + ", ".join(_at(each[concurrency]) for concurrency in at)
            for standing, at in win.standings.items()
        ]
    if not verdict.throughput:
        lines.append("- **Throughput: nothing to compare.** The protocol has no adaptive arm beside another one.")
    measured = verdict.cells - verdict.missing_cells
    lines.append(
        f"- **Failures:** {verdict.failed_requests:,} of {verdict.requests:,} requests; "
        f"not used because of them, or for want of an answer: {verdict.unused_cells} of {measured} measured cells."
    )
    return [*lines, f"- {_completeness(findings)}"]


def _completeness(findings: Findings) -> str:
    cells, skipped = findings.verdict.missing_cells, len(findings.run.skipped)
    other = len(findings.missing) - cells
    parts = [f"no record of {cells} of {findings.verdict.cells} cells of the sweep"] if cells else []
    parts += [f"no record of other parts: {other}"] if other else []
    parts += [f"skipped: {skipped}"] if skipped else []
    if not parts:
        return "**Complete:** everything in the protocol was measured."
    return f"**This report is partial:** {'; '.join(parts)} ([list](#not-measured))."


def _accuracy_verdict(findings: Findings) -> str:
    differences = [each for each in findings.score_differences if each.arm is Arm.ADAPTIVE]
    if not differences:
        return "No task was scored on adaptive and on another arm."
    bottom = ", ".join(dict.fromkeys(each.task for each in differences if not each.can_fall))
    beyond = f" On {line(bottom)} another arm has nothing right, so that no loss could be seen." if bottom else ""
    differences = [each for each in differences if each.can_fall]
    if not differences:
        return beyond.strip()
    tasks = ", ".join(dict.fromkeys(each.task for each in differences))
    verdict = findings.verdict.accuracy
    if verdict is Kept.LOWER:
        lower = [each for each in differences if each.difference.agreement is Agreement.LOWER]
        return (
            f"{len(lower)} of {len(differences)} differences are lower by more than {STANDARD_ERRORS} combined "
            f"standard errors: {'; '.join(map(_score_delta, lower))}. Of arms that are equal, 12 % of comparisons "
            f"are.{beyond}"
        )
    if verdict is Kept.UNKNOWN:
        return f"On {line(tasks)}, some scores have no standard error.{beyond}"
    lowest = min(differences, key=lambda each: each.difference.value)
    most = max(-each.difference.low for each in differences if each.difference.low is not None)
    return (
        f"On {line(tasks)} no score of adaptive is lower by more than {STANDARD_ERRORS} combined standard errors "
        f"({len(differences)} differences); the lowest is {_score_delta(lowest)}. "
        f"What the intervals leave possible is a loss of up to {max(100 * most, 0.0):.2f} points.{beyond}"
    )


def _score_delta(each: ScoreDifference) -> str:
    found = each.difference
    name = line(f"{each.task} {each.metric}, {each.arm} less {each.against}: {100 * found.value:+.2f} points")
    if found.low is None or found.high is None:
        return f"{name} (no interval)"
    return f"{name} ({100 * found.low:+.2f} to {100 * found.high:+.2f})"


OUTPUTS = {
    Outputs.SAME: "the same as without speculation",
    Outputs.DIFFERENT: "different from no speculation",
    Outputs.UNKNOWN: "not compared",
}


def _outputs_verdict(findings: Findings) -> str:
    if not findings.outputs:
        return "**Outputs: not checked** against no speculation."
    texts = []
    for check in findings.outputs:
        greedy = f"{check.greedy_equal} of {check.greedy_prompts} greedy answers equal"
        texts.append(f"{OUTPUTS[check.outputs]} with {check.arm} ({greedy}, {_p_value(check.p_value)})")
    return f"**Outputs:** {'; '.join(texts)}."


def _p_value(p_value: float | None) -> str:
    return "no distribution test" if p_value is None else f"distribution p = {p_value:.3g}"


def _at(comparison: Comparison) -> str:
    if comparison.ratio is None:
        return f"{comparison.concurrency}" + (f" ({FAILED} no round without failures)" if comparison.left_out else "")
    return f"{comparison.concurrency} ({_delta(comparison.ratio)})"


def _delta(ratio: Ratio) -> str:
    value = signed(ratio.value)
    if ratio.low is None or ratio.high is None:
        return f"{value}, one round: no interval"
    return f"{value}, {signed(ratio.low)} to {signed(ratio.high)}"
