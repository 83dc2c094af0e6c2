"""From findings to plots, each as SVG and PNG.

Arms differ by colour, marker and line, so that a plot is readable in black and white; the colours are Okabe and Ito's.
The same findings give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from serve.validate.findings import Beside, Cell, Comparison, Findings, StartCost, TaskScore
from serve.validate.references import percent
from serve.validate.results import Arm
from serve.validate.statistics import Spread, Standing

TITLES = {
    "throughput": "Throughput by concurrency and arm: median, lowest and highest round",
    "delta": "Throughput of adaptive against the other arms, with 95 % confidence intervals",
    "drafts": "Acceptance length and verified width by concurrency: mean, lowest and highest round",
    "accuracy": "Accuracy by task and arm, with one standard error",
    "starts": "Start-up time and graph memory by server",
}
"""Name of the files -> what they show."""

MOST_RATIO = 1e6
HERE = (
    "this run, faster or slower (95 % interval)",
    "this run, one round: no interval",
    "this run, cannot tell (95 % interval)",
)
"""Labels of a run's own deltas: the interval leaves 0 out, there is none, 0 is in it."""


class Look(NamedTuple):
    """How an arm is drawn."""

    colour: str
    marker: str
    line: str


LOOKS = {
    Arm.OFF: Look("#595959", "s", ":"),
    Arm.FIXED: Look("#0072B2", "o", "--"),
    Arm.ADAPTIVE: Look("#D55E00", "D", "-"),
}
REFERENCE_COLOUR = "#8C8C8C"
REFERENCE_MARKERS = "v^<>PX"

STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#404040",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "errorbar.capsize": 3,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "grid.color": "#E0E0E0",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
    "savefig.facecolor": "white",
    # Names of tasks are no formulas.
    "text.parse_math": False,
    # Without it the ids in an SVG are random.
    "svg.hashsalt": "dspark-serve",
}


def draw(findings: Findings, folder: Path) -> list[str]:
    """Draw what there are numbers for, and remove what an earlier report drew and this one does not.

    Returns:
        Names of the plots that are there now.
    """
    folder.mkdir(exist_ok=True)
    drawn = []
    for name, make in PLOTS.items():
        with mpl.rc_context(STYLE):
            figure = make(findings)
            for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
                path = folder / f"{name}.{kind}"
                if figure is None:
                    path.unlink(missing_ok=True)
                else:
                    figure.savefig(path, format=kind, dpi=144, metadata=metadata)
        if figure is not None:
            drawn.append(name)
    return drawn


def throughput(findings: Findings) -> Figure | None:
    """Medians with their range; rounds that are not used as crosses."""
    if not any(cell.rounds for cell in findings.cells):
        return None
    figure = _figure(8.0, 4.8)
    axes = figure.subplots()
    _by_concurrency(axes, findings.cells, lambda cell: cell.output_tokens_per_s)
    unused = [
        (cell.concurrency, each.output_tokens_per_s, LOOKS[cell.arm].colour)
        for cell in findings.cells
        for each in cell.rounds
        if not each.used
    ]
    handles, labels = axes.get_legend_handles_labels()
    for x, y, colour in unused:
        (cross,) = axes.plot(x, y, "x", color=colour, markersize=9, markeredgewidth=2, zorder=3)
        if "round with failures, not used" not in labels:
            handles.append(cross)
            labels.append("round with failures, not used")
    _concurrency_axis(axes, [cell.concurrency for cell in findings.cells])
    axes.set_ylabel("output tokens a second")
    axes.set_ylim(bottom=0)
    rounds = findings.run.protocol.rounds
    axes.set_title(
        "Throughput, one round"
        if rounds == 1
        else f"Throughput: median of up to {rounds} rounds, bars from lowest to highest"
    )
    axes.legend(handles, labels, loc="upper left")
    return figure


def delta(findings: Findings) -> Figure | None:
    """Adaptive against each other arm, in percent, around a zero line."""
    found = {
        against: [each for each in findings.comparisons if each.against is against and each.ratio is not None]
        for against in dict.fromkeys(each.against for each in findings.comparisons)
    }
    found = {against: each for against, each in found.items() if each}
    if not found:
        return None
    figure = _figure(8.0, 3.4 * len(found) + 0.4)
    grid = figure.subplots(len(found), 1, squeeze=False, sharex=True)
    concurrencies = {each.concurrency for comparisons in found.values() for each in comparisons}
    concurrencies |= {each.concurrency for beside in findings.beside for each in beside.deltas}
    for axes, (against, comparisons) in zip(grid[:, 0], found.items(), strict=True):
        axes.margins(y=0.15)
        _deltas(axes, comparisons)
        for number, beside in enumerate(findings.beside):
            _reference_deltas(axes, against, beside, REFERENCE_MARKERS[number % len(REFERENCE_MARKERS)])
        axes.axhline(0, color="black", linewidth=1)
        _concurrency_axis(axes, concurrencies, labelled=axes is grid[-1, 0])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g} %" if value else "0 %"))
        axes.set_ylabel("throughput")
        other = "no speculation" if against is Arm.OFF else f"{against} verification"
        axes.set_title(f"Adaptive against {other} (above 0: adaptive is faster)")
        values = [_percent(each.ratio.value) for each in comparisons if each.ratio is not None]
        values += [y for beside in findings.beside for _, y in _reference_points(against, beside)]
        _limit(axes, values)
        # Matplotlib lists lines before bars.
        entries = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda each: each[1] not in HERE)
        axes.legend(*zip(*entries, strict=True), loc="best", fontsize=9)
    return figure


def _deltas(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    look = LOOKS[Arm.ADAPTIVE]
    ratios = [(each, each.ratio) for each in comparisons if each.ratio is not None]
    xs = [each.concurrency for each, _ in ratios]
    ys = [_percent(ratio.value) for _, ratio in ratios]
    axes.plot(xs, ys, color=look.colour, linestyle=look.line, linewidth=1)
    for sure in (True, False):
        some = [(each, ratio) for each, ratio in ratios if (each.standing is not Standing.UNDECIDED) is sure]
        if not some:
            continue
        values = [_percent(ratio.value) for _, ratio in some]
        below = [0.0 if r.low is None else v - _percent(r.low) for v, (_, r) in zip(values, some, strict=True)]
        above = [0.0 if r.high is None else _percent(r.high) - v for v, (_, r) in zip(values, some, strict=True)]
        bare = all(ratio.low is None for _, ratio in some)
        label = HERE[0] if sure else HERE[1] if bare else HERE[2]
        axes.errorbar(
            [each.concurrency for each, _ in some],
            values,
            yerr=[below, above],
            fmt=look.marker,
            color=look.colour,
            markerfacecolor=look.colour if sure else "white",
            label=label,
            capsize=0 if bare else 3,
        )


def _limit(axes: Axes, values: Sequence[float]) -> None:
    """Let an interval that is much wider than the values leave the picture, or it would flatten them."""
    span = 3 * max(max(values) - min(values), 10.0)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, min(values) - span), min(high, max(values) + span))


def _reference_deltas(axes: Axes, against: Arm, beside: Beside, marker: str) -> None:
    points = _reference_points(against, beside)
    if points:
        xs, ys = zip(*points, strict=True)
        label = f"{beside.table.name}, {beside.reference.hardware}"
        axes.plot(xs, ys, color=REFERENCE_COLOUR, linestyle="-.", linewidth=1, marker=marker, label=label, zorder=1)


def _reference_points(against: Arm, beside: Beside) -> list[tuple[int, float]]:
    return [
        (each.concurrency, each.reference_percent)
        for each in beside.deltas
        if each.against is against and each.reference_percent is not None
    ]


def drafts(findings: Findings) -> Figure | None:
    """Acceptance length and verified width, on one scale."""
    cells = [cell for cell in findings.cells if cell.acceptance_length is not None]
    if not cells:
        return None
    figure = _figure(8.0, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    _by_concurrency(left, cells, lambda cell: cell.acceptance_length)
    _by_concurrency(right, cells, lambda cell: cell.verified_width)
    for axes, title in ((left, "Acceptance length"), (right, "Verified width")):
        _concurrency_axis(axes, [cell.concurrency for cell in cells])
        axes.set_title(title)
        axes.set_ylim(bottom=0)
    left.set_ylabel("tokens a request and step, bonus included")
    right.tick_params(labelleft=False)
    left.legend(loc="lower left")
    return figure


def accuracy(findings: Findings) -> Figure | None:
    """Every score with one standard error, a row each."""
    if not findings.scores:
        return None
    tasks = list(dict.fromkeys((score.task, score.metric) for score in findings.scores))
    arms = list(dict.fromkeys(score.arm for score in findings.scores))
    figure = _figure(8.0, 1.5 + 0.3 * len(tasks) * (len(arms) + 1))
    axes = figure.subplots()
    height = len(arms) + 1
    for arm in arms:
        scores = [score for score in findings.scores if score.arm is arm]
        look = LOOKS[arm]
        axes.errorbar(
            [100 * score.value for score in scores],
            [tasks.index((score.task, score.metric)) * height + arms.index(arm) for score in scores],
            xerr=[100 * (score.standard_error or 0.0) for score in scores],
            fmt=look.marker,
            color=look.colour,
            label=arm.value,
        )
        _mark_bare(axes, scores, tasks, arms, height)
    centre = (len(arms) - 1) / 2
    axes.set_yticks(
        [number * height + centre for number in range(len(tasks))], [f"{task}\n{metric}" for task, metric in tasks]
    )
    axes.set_ylim(len(tasks) * height - 1, -1)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.set_xlabel("score; bars are one standard error")
    axes.set_title("Accuracy by task and arm")
    axes.margins(x=0.1)
    figure.legend(loc="outside lower center", ncols=len(arms), fontsize=9)
    return figure


def _mark_bare(
    axes: Axes, scores: Sequence[TaskScore], tasks: Sequence[tuple[str, str]], arms: Sequence[Arm], height: int
) -> None:
    """Say why a score has no bar: without a word it would look exact."""
    for score in scores:
        if not score.standard_error:
            y = tasks.index((score.task, score.metric)) * height + arms.index(score.arm)
            why = "no standard error" if score.standard_error is None else f"all {score.samples} alike"
            axes.annotate(why, (100 * score.value, y), (8, 0), textcoords="offset points", va="center", fontsize=8)


def starts(findings: Findings) -> Figure | None:
    """Time until ready, graph capture in it, and what the graphs hold."""
    if not findings.starts:
        return None
    panels: list[tuple[str, str, list[Spread | None]]] = [
        ("Ready", "seconds", [cost.ready_s for cost in findings.starts]),
        ("Graph capture", "seconds", [cost.graph_s for cost in findings.starts]),
        ("Graph memory", "GiB", [cost.graph_gib for cost in findings.starts]),
    ]
    panels = [panel for panel in panels if any(each is not None for each in panel[2])]
    figure = _figure(8.0, 1.4 + 0.5 * len(findings.starts))
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    names = ["\n".join((*cost.arms, *_context(cost))) for cost in findings.starts]
    for axes, (title, unit, values) in zip(grid, panels, strict=True):
        for y, (cost, each) in enumerate(zip(findings.starts, values, strict=True)):
            if each is None:
                axes.text(0, y, " none", va="center", fontsize=9)
                continue
            bars = [[each.value - each.low], [each.high - each.value]]
            colour = LOOKS[cost.arms[-1]].colour if cost.arms else REFERENCE_COLOUR
            axes.barh(y, each.value, color=colour, xerr=bars, height=0.6, error_kw={"capsize": 3})
            axes.annotate(
                f"{each.value:,.2f}" if unit == "GiB" else f"{each.value:,.1f}",
                (each.high, y),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.margins(x=0.3)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel(unit)
        axes.set_title(title)
    figure.suptitle("Start-up: median of starts, bars from the lowest to the highest", x=0.01, ha="left", fontsize=11)
    return figure


def _context(cost: StartCost) -> list[str]:
    return [] if cost.context is None else [f"context {cost.context:,}"]


PLOTS: dict[str, Callable[[Findings], Figure | None]] = {
    "throughput": throughput,
    "delta": delta,
    "drafts": drafts,
    "accuracy": accuracy,
    "starts": starts,
}


def _figure(width: float, height: float) -> Figure:
    """A figure of its own, in inches, without pyplot's global state."""
    return Figure(figsize=(width, height), layout="constrained")


def _by_concurrency(axes: Axes, cells: Sequence[Cell], number: Callable[[Cell], Spread | None]) -> None:
    """A line an arm through its values, with bars from the lowest to the highest round."""
    for arm in dict.fromkeys(cell.arm for cell in cells):
        points = [
            (cell.concurrency, found) for cell in cells if cell.arm is arm and (found := number(cell)) is not None
        ]
        if not points:
            continue
        look = LOOKS[arm]
        axes.errorbar(
            [concurrency for concurrency, _ in points],
            [found.value for _, found in points],
            yerr=[[found.value - found.low for _, found in points], [found.high - found.value for _, found in points]],
            color=look.colour,
            marker=look.marker,
            linestyle=look.line,
            label=arm.value,
        )


def _concurrency_axis(axes: Axes, concurrencies: Sequence[int] | set[int], *, labelled: bool = True) -> None:
    """A logarithmic axis that names the concurrencies that were measured."""
    each = sorted(set(concurrencies))
    axes.set_xscale("log", base=2)
    axes.set_xlim(each[0] / 1.4, each[-1] * 1.4)
    axes.xaxis.set_major_locator(FixedLocator([float(number) for number in each]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if labelled:
        axes.set_xlabel("concurrency (requests at once)")


def _percent(ratio: float) -> float:
    """In percent; bounded, since two rounds can leave an interval that no axis holds."""
    return percent(min(ratio, MOST_RATIO))
