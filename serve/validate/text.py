"""From findings to the report's text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from serve.validate.beside_text import beside_section
from serve.validate.deriving import arms_of, concurrencies_of
from serve.validate.findings import Cell, Command, Findings, Missing, Part
from serve.validate.markdown import fenced, line, table
from serve.validate.plots import TITLES
from serve.validate.results import Protocol
from serve.validate.statistics import CONFIDENCE, DIFFERENT, STANDARD_ERRORS
from serve.validate.verdict_text import verdict_section
from serve.validate.wording import (
    ARMS,
    FAILED,
    NONE,
    PERCENT,
    SCORE_HEAD,
    interval,
    score_difference_table,
    score_row,
    share,
    signed,
    spread_text,
)

LONGEST_MESSAGE = 300
MOST_DIFFERENCES = 5

PARTS = {
    Part.START: "Starts of a server",
    Part.LOAD: "Load",
    Part.ACCURACY: "Accuracy",
    Part.EXACTNESS: "Exactness",
}


def render(findings: Findings, plots: Sequence[str]) -> str:
    """The report.

    Args:
        findings: `report.json`.
        plots: Names of the plots that were drawn.
    """
    protocol = findings.run.protocol
    sections = [
        [_title(protocol)],
        verdict_section(findings),
        _throughput(findings, plots),
        _comparisons(findings, plots),
        _latency(findings.cells),
        _drafts(findings, plots),
        _accuracy(findings, plots),
        _outputs(findings),
        _starts(findings, plots),
        _failures(findings.cells),
        _missing(findings),
        *(beside_section(beside) for beside in findings.beside),
        _protocol(protocol),
        _machine(findings),
        _commands(findings),
        METHOD.splitlines(),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _title(protocol: Protocol) -> str:
    if protocol.profile is None:
        return f"# Throughput of {line(protocol.url or 'a running server')}"
    return f"# Adaptive verification validated: {line(protocol.profile)}"


def _throughput(findings: Findings, plots: Sequence[str]) -> list[str]:
    protocol = findings.run.protocol
    by_key = {(cell.arm, cell.concurrency): cell for cell in findings.cells}
    arms = arms_of(protocol)
    rows = [
        [str(number), *(_speed(by_key.get((arm, number)), protocol.rounds) for arm in arms)]
        for number in concurrencies_of(protocol)
    ]
    return [
        "## Throughput",
        "",
        f"Output tokens a second: median (lowest to highest) over rounds ({protocol.rounds}). {FAILED} marks a cell "
        "with failed requests: its rounds with failures are not in the numbers.",
        "",
        *table(["concurrency", *arms], rows),
        *_plot("throughput", plots),
    ]


def _speed(cell: Cell | None, rounds: int) -> str:
    if cell is None:
        return NONE
    mark = f" {FAILED}" if any(each.failed for each in cell.rounds) else ""
    used = sum(each.used for each in cell.rounds)
    if cell.output_tokens_per_s is None:
        return f"no round to use{mark}"
    return spread_text(cell.output_tokens_per_s, 1) + ("" if used == rounds else f", {used} of {rounds} rounds") + mark


def _comparisons(findings: Findings, plots: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for against in dict.fromkeys(each.against for each in findings.comparisons):
        rows = [
            [
                str(each.concurrency),
                NONE if each.ratio is None else signed(each.ratio.value),
                interval(each.ratio),
                NONE if each.ratio is None else str(each.ratio.rounds),
                f"{FAILED} {', '.join(map(str, each.left_out))}" if each.left_out else "",
                each.standing,
            ]
            for each in findings.comparisons
            if each.against is against
        ]
        lines += [f"### Adaptive against {ARMS[against]}", ""]
        head = ["concurrency", "throughput", f"{PERCENT} interval", "rounds paired", "round left out", "verdict"]
        lines += [*table(head, rows), ""]
    if lines:
        intervals = sum(each.ratio is not None and each.ratio.low is not None for each in findings.comparisons)
        if intervals:
            missing = (1 - CONFIDENCE) * intervals
            lines += [f"Each interval is a {PERCENT} one by itself: of {intervals}, {missing:.1f} miss on average.", ""]
        # The list ends with an empty line, and the plot begins with one.
        lines = [*lines[:-1], *_plot("delta", plots)]
    return lines


def _latency(cells: Sequence[Cell]) -> list[str]:
    rows = [
        [
            cell.arm,
            str(cell.concurrency),
            *(spread_text(each, 1) for each in (cell.ttft_ms, cell.ttft_p99_ms, cell.tpot_ms, cell.tpot_p99_ms)),
        ]
        for cell in cells
        if cell.ttft_ms or cell.tpot_ms
    ]
    if not rows:
        return []
    head = ["arm", "concurrency", "first token, median", "99th percentile", "token after it, median", "99th percentile"]
    return ["## Latency", "", "Milliseconds: median (lowest to highest) over rounds.", "", *table(head, rows)]


def _drafts(findings: Findings, plots: Sequence[str]) -> list[str]:
    rows = [
        [
            cell.arm,
            str(cell.concurrency),
            spread_text(cell.acceptance_length, 2),
            spread_text(cell.verified_width, 2),
            share(cell.verified_of_proposed),
            share(cell.accepted_of_verified),
            NONE if cell.accepted_of_expected is None else f"{cell.accepted_of_expected:.3f}",
        ]
        for cell in findings.cells
        if cell.acceptance_length is not None
    ]
    if not rows:
        return []
    head = ["arm", "concurrency", "acceptance length", "verified width", "verified", "accepted", "accepted / expected"]
    return [
        "## Drafts",
        "",
        "Tokens of a request in a verification step, the bonus token included, with the range over rounds; share of "
        "the proposed drafts that was verified, and of the verified ones that was accepted. Accepted / expected is 1 "
        "where confidences are calibrated. A length that falls as load rises is the budget at work.",
        "",
        *table(head, rows),
        *_plot("drafts", plots),
    ]


def _accuracy(findings: Findings, plots: Sequence[str]) -> list[str]:
    if not findings.scores:
        return []
    lines = ["## Accuracy", "", *table(SCORE_HEAD, map(score_row, findings.scores))]
    if findings.score_differences:
        lines += ["", *score_difference_table(findings.score_differences)]
    return [*lines, *_plot("accuracy", plots)]


def _outputs(findings: Findings) -> list[str]:
    if not findings.outputs:
        return []
    rows = [
        [
            check.arm,
            f"{check.greedy_equal} of {check.greedy_prompts} ({check.greedy_tokens:,} tokens)",
            _first_differences(check.first_difference),
            f"{check.sampled_tokens:,}",
            str(check.positions),
            NONE if check.p_value is None else f"{check.p_value:.3g}",
            check.outputs,
        ]
        for check in findings.outputs
    ]
    head = ["arm", "greedy answers equal", "first difference", "sampled tokens", "positions", "corrected p", "outputs"]
    return [
        "## Outputs against no speculation",
        "",
        *table(head, rows),
        "",
        "A greedy difference is no proof of a fault: on a GPU the rounding of a batch depends on its shape, and where "
        "two tokens are nearly as likely the other one may win.",
    ]


def _first_differences(positions: Mapping[int, int]) -> str:
    named = [f"prompt {prompt} at {position}" for prompt, position in list(positions.items())[:MOST_DIFFERENCES]]
    more = [f"{len(positions) - len(named)} more"] if len(positions) > len(named) else []
    return ", ".join([*named, *more]) or NONE


def _starts(findings: Findings, plots: Sequence[str]) -> list[str]:
    if not findings.starts:
        return []
    rows = [
        [
            ", ".join(cost.arms),
            NONE if cost.context is None else f"{cost.context:,}",
            str(cost.starts),
            spread_text(cost.ready_s, 1),
            spread_text(cost.graph_s, 1),
            spread_text(cost.graph_gib, 2),
        ]
        for cost in findings.starts
    ]
    head = ["server of", "context", "starts", "ready, s", "graph capture, s", "graph memory, GiB"]
    return ["## Start-up", "", *table(head, rows), *_plot("starts", plots)]


def _failures(cells: Sequence[Cell]) -> list[str]:
    rows = [
        [
            cell.arm,
            str(cell.concurrency),
            str(each.round),
            f"{each.failed:,} of {each.requested:,}",
            f"{each.output_tokens_per_s:,.1f}",
            "; ".join(f"{count} x {_clipped(message)}" for message, count in sorted(each.errors.items()))
            or ("no error was named" if each.failed else "nothing was answered"),
        ]
        for cell in cells
        for each in cell.rounds
        if not each.used
    ]
    if not rows:
        return []
    head = ["arm", "concurrency", "round", "failed", "output tokens a second, not used", "errors"]
    return ["## Failures", "", *table(head, rows)]


def _clipped(message: str) -> str:
    return message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} ..."


def _missing(findings: Findings) -> list[str]:
    if not findings.missing and not findings.run.skipped:
        return []
    lines = ["## Not measured", ""]
    if findings.run.skipped:
        rows = [[skipped.what, skipped.reason] for skipped in findings.run.skipped]
        lines += ["Skipped:", "", *table(["what", "why"], rows), ""]
    if findings.missing:
        grouped: dict[tuple[str, ...], list[str]] = {}
        for each in findings.missing:
            grouped.setdefault((PARTS[each.part], each.arm, _when(each), each.reason), []).append(_which(each))
        rows = [[part, arm, when, ", ".join(which) or NONE, why] for (part, arm, when, why), which in grouped.items()]
        lines += ["In the protocol, and without a record:", ""]
        lines += table(["what", "arm", "round", "concurrency or task", "why"], rows)
    return lines


def _when(missing: Missing) -> str:
    return NONE if missing.round is None else str(missing.round)


def _which(missing: Missing) -> str:
    if missing.concurrency is not None:
        return str(missing.concurrency)
    return missing.task or NONE


def _protocol(protocol: Protocol) -> list[str]:
    rows = [[PROTOCOL.get(name, name.replace("_", " ")), _setting(value)] for name, value in protocol]
    return ["## Protocol", "", *table(["what", "value"], rows)]


PROTOCOL = {
    "url": "running server",
    "sets": "profile changed by",
    "extra": "arguments of vllm serve",
    "requests": "requests of a cell, at least",
    "requests_per_stream": "and at least so many x concurrency",
    "warmup_requests": "warm-up requests",
    "output_tokens": "output tokens of a request, forced",
    "tasks": "accuracy tasks",
    "exactness": "outputs compared with no speculation",
    "server_per_arm": "fixed has servers of its own",
}
"""Fields of the protocol whose names do not say it; any other stands under its own name."""


def _setting(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or NONE
    return NONE if value is None else str(value)


def _machine(findings: Findings) -> list[str]:
    run = findings.run
    return [
        "## Where it ran",
        "",
        f"{line(run.machine)} (`{run.hardware}`), first started {line(run.started)}.",
        "",
        *table(["package", "version"], sorted(run.versions.items())),
        "",
        f"Patch set `{line(run.patch_set)}`:",
        "",
        *table(["patch", "status"], run.patches.items()),
    ]


def _commands(findings: Findings) -> list[str]:
    lines = [
        "## Commands",
        "",
        "The whole run, which goes on where it stopped:",
        "",
        *fenced(_shell(findings.run.command)),
    ]
    for part in Part:
        grouped: dict[str, list[Command]] = {}
        for command in findings.commands:
            if command.part is part and command.command:
                grouped.setdefault(_shell(command.command, command.environment), []).append(command)
        if not grouped:
            continue
        lines += ["", f"<details><summary>{PARTS[part]}</summary>", ""]
        for text, same in grouped.items():
            # One paragraph a command: where several parts had the same one, it is printed once.
            lines += [line("; ".join(command.what for command in same)), "", *fenced(text), ""]
        lines += ["</details>"]
    return lines


def _shell(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    return " ".join([*variables, shlex.join(command)])


def _plot(name: str, plots: Sequence[str]) -> list[str]:
    return ["", f"[![{TITLES[name]}](plots/{name}.png)](plots/{name}.svg)"] if name in plots else []


METHOD = f"""\
## How each number is computed

Everything above is in `report.json`, and that is computed from the run's records (`run.json`, `starts/`, `load/`,
`accuracy/`, `exactness/`) alone; `dspark-serve report DIRECTORY` writes it anew.

- **Throughput of a cell**: output tokens of the completed requests over the time from the first request to the last
  answer, as vLLM's load generator gives them; the median over rounds, with the lowest and the highest round.
- **Failures**: a round in which a request failed, or nothing was said, is counted and listed and is in no median and no
  comparison: fewer requests are another load.
- **Arm against arm**: in each round that both arms have, the logarithm of the quotient of their throughputs; the mean
  over rounds and Student's t give the quotient and its {PERCENT} interval. With one round there is none. Faster
  or slower is said only where the interval leaves zero out. It covers what varies between rounds of this run, not
  between machines, prompts or models. Up to two neighbouring rounds share a start of a server, and a running server
  serves them all: such rounds are not independent of that start. What changes with a start is then less in the interval
  than so many starts would put there.
- **Acceptance length**: tokens emitted over (request, step) pairs; **verified width**: tokens verified over the same
  pairs; both with the bonus token, from the server's own counters, rounds added up before dividing.
- **Accepted / expected**: accepted drafts over the sum of the survival probabilities that were predicted for the
  verified ones.
- **Accuracy**: two scores are alike where they differ by at most {STANDARD_ERRORS} combined standard errors,
  sqrt(a^2 + b^2). Of arms that are equal, 77 % of comparisons pass, so one that fails is a reason to look, and a pass
  bounds the loss only as far as its interval does. Where every question went alike, which prints a standard error of 0,
  Agresti and Coull's is taken. A task of which another arm has nothing right decides nothing.
- **Outputs**: greedy answers token for token; sampled tokens by a chi-square test of homogeneity at each position, the
  smallest probability multiplied by the number of positions (Bonferroni). Different is below {DIFFERENT}.
- **Start-up**: from the command to a model that answers; graph capture and memory as vLLM logs them. Median, lowest and
  highest start. A server of fixed and adaptive is an adaptive one: what fixed alone takes is measured with
  `--server-per-arm`, or where adaptive is no arm."""
