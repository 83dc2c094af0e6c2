"""A reference table beside the run's own numbers."""

from __future__ import annotations

from serve.validate.findings import Beside, TaskScore
from serve.validate.markdown import table
from serve.validate.references import Agrees
from serve.validate.wording import NONE, PERCENT, SCORE_HEAD, interval, score_difference_table, score_row, signed


def beside_section(beside: Beside) -> list[str]:
    """What the source printed, adaptive against the others there and here, and whether what it quotes recomputes."""
    reference, printed = beside.reference, beside.table
    concurrencies = sorted({number for each in printed.throughput.values() for number in each})
    lines = [
        f"## Beside it: {printed.name}",
        "",
        f"{reference.source}, {reference.title}. {reference.model} on {reference.hardware}, {printed.setting}; "
        + "; ".join(f"{name} {version}" for name, version in reference.versions.items())
        + ". Other hardware and another model make other tokens a second: compare percentages.",
        "",
        *(f"- {part}" for part in reference.protocol),
        "",
        "Output tokens a second as printed there"
        + ("" if printed.requests is None else f", {printed.requests} requests a cell, {printed.failed} failed")
        + ":",
        "",
        *table(
            ["concurrency", *printed.throughput],
            [
                [
                    str(number),
                    *(f"{each[number]:,.1f}" if number in each else NONE for each in printed.throughput.values()),
                ]
                for number in concurrencies
            ],
        ),
        "",
        "Adaptive against the others, there and here:",
        "",
        *table(
            ["against", "concurrency", "there", "here", f"{PERCENT} interval here"],
            [
                [
                    each.against,
                    str(each.concurrency),
                    NONE if each.reference_percent is None else f"{each.reference_percent:+.2f} %",
                    NONE if each.here is None else signed(each.here.value),
                    interval(each.here),
                ]
                for each in beside.deltas
            ],
        ),
    ]
    if printed.accuracy:
        scores = (TaskScore.model_validate(score.model_dump()) for score in printed.accuracy)
        lines += ["", "Accuracy there:", "", *table(SCORE_HEAD, map(score_row, scores))]
    if beside.score_differences:
        lines += ["", *score_difference_table(beside.score_differences)]
    if printed.starts:
        rows = [[arm, f"{start.graph_s:.0f}", f"{start.graph_gib:.2f}"] for arm, start in printed.starts.items()]
        lines += ["", "Start-up there:", "", *table(["server of", "graph capture, s", "graph memory, GiB"], rows)]
    if reference.measured:
        rows = [[each.what, f"{each.before:g}", f"{each.after:g}", each.unit] for each in reference.measured]
        lines += ["", "Also printed there:", "", *table(["what", "first", "second", "unit"], rows)]
    doubtful = sum(each.agrees is not Agrees.YES for each in beside.checked)
    rows = [[each.claim, each.quoted, each.recomputed, each.agrees] for each in beside.checked]
    lines += [
        "",
        f"What the source quotes, recomputed from its printed cells: {len(rows) - doubtful} of {len(rows)} agree to "
        "the last digit. Within the cells' rounding means that cells which print the same would give what is quoted.",
        "",
        *table(["what", "quoted", "recomputed", "verdict"], rows),
        *(f"\n{note}" for note in reference.notes),
    ]
    return lines
