"""From a run's records to what its report says: pure functions.

A cell in which a request failed is counted, shown and left out of medians and comparisons: fewer requests did less work
at lower concurrency, so its throughput is that of another load.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from serve.validate import references
from serve.validate.drafts import acceptance_length, quotient, verified_width
from serve.validate.findings import (
    Beside,
    BesideDelta,
    Cell,
    Command,
    Comparison,
    Findings,
    Kept,
    Missing,
    OutputCheck,
    Outputs,
    Part,
    Round,
    ScoreDifference,
    StartCost,
    TaskScore,
    Verdict,
    Win,
)
from serve.validate.reading import Records
from serve.validate.results import Accuracy, Arm, Exactness, Load, Protocol, Run, Score, Start
from serve.validate.statistics import (
    DIFFERENT,
    Agreement,
    Difference,
    Ratio,
    Spread,
    Standing,
    added,
    corrected,
    difference,
    ratio,
    spread,
    standing,
)

COMPARED = ((Arm.ADAPTIVE, Arm.FIXED), (Arm.ADAPTIVE, Arm.OFF))
SCORES_COMPARED = (*COMPARED, (Arm.FIXED, Arm.OFF))
UNFINISHED = "there is no record: the run has not come to it, or was stopped there"
CONTEXT = re.compile(r"\bmax[-_]model[-_]len[ =](\d+)")

Loads = Mapping[tuple[Arm, int], Sequence[Load]]
"""(arm, concurrency) -> its rounds, ascending."""


def derive(records: Records, beside: Sequence[str] = ()) -> Findings:
    """Everything that the report says.

    Args:
        records: Of one run, complete or not.
        beside: Names of reference tables.

    Raises:
        InputError: no such reference table.
    """
    protocol = records.run.protocol
    loads: dict[tuple[Arm, int], list[Load]] = defaultdict(list)
    for load in records.loads:
        loads[load.arm, load.concurrency].append(load)
    comparisons = compared(loads, protocol)
    scores = task_scores(records.accuracies)
    differences = score_differences(scores, SCORES_COMPARED)
    outputs = tuple(output_check(found) for found in records.exactnesses)
    missing = missing_of(records)
    return Findings(
        run=records.run,
        verdict=verdict(records, comparisons, differences, outputs, missing),
        cells=tuple(cell(*key, loads[key]) for key in cell_keys(protocol) if key in loads),
        comparisons=comparisons,
        scores=scores,
        score_differences=differences,
        outputs=outputs,
        starts=start_costs(records.starts),
        missing=missing,
        commands=commands(records),
        beside=tuple(laid_beside(name, comparisons) for name in dict.fromkeys(beside)),
    )


def arms_of(protocol: Protocol) -> list[Arm]:
    """The arms of a protocol, each once."""
    return list(dict.fromkeys(protocol.arms))


def concurrencies_of(protocol: Protocol) -> list[int]:
    """Its concurrencies, ascending, each once."""
    return sorted(set(protocol.concurrencies))


def cell_keys(protocol: Protocol) -> list[tuple[Arm, int]]:
    """Every cell of the sweep."""
    return [(arm, concurrency) for arm in arms_of(protocol) for concurrency in concurrencies_of(protocol)]


def used(load: Load) -> bool:
    """Whether every request was completed and something was said."""
    return load.failed == 0 and load.output_tokens_per_s > 0


def cell(arm: Arm, concurrency: int, loads: Sequence[Load]) -> Cell:
    """Medians and ranges over the rounds of one arm at one concurrency."""
    kept = [load for load in loads if used(load)]
    drafts = [load.drafts for load in kept if load.drafts is not None]
    total = added(drafts)
    return Cell(
        arm=arm,
        concurrency=concurrency,
        rounds=tuple(
            Round(
                round=load.round,
                output_tokens_per_s=load.output_tokens_per_s,
                requested=load.requested,
                failed=load.failed,
                errors=load.errors,
                used=used(load),
            )
            for load in loads
        ),
        output_tokens_per_s=spread(load.output_tokens_per_s for load in kept),
        ttft_ms=spread(load.ttft_ms[0] for load in kept if load.ttft_ms),
        ttft_p99_ms=spread(load.ttft_ms[1] for load in kept if load.ttft_ms),
        tpot_ms=spread(load.tpot_ms[0] for load in kept if load.tpot_ms),
        tpot_p99_ms=spread(load.tpot_ms[1] for load in kept if load.tpot_ms),
        acceptance_length=pooled(acceptance_length(total), map(acceptance_length, drafts)) if total else None,
        verified_width=pooled(verified_width(total), map(verified_width, drafts)) if total else None,
        verified_of_proposed=quotient(total.verified, total.proposed) if total else None,
        accepted_of_verified=quotient(total.accepted, total.verified) if total else None,
        accepted_of_expected=quotient(total.accepted, total.expected) if total else None,
    )


def pooled(value: float | None, rounds: Iterable[float | None]) -> Spread | None:
    """The quotient of sums, with the range of the rounds' own quotients."""
    if value is None:
        return None
    # With the value itself: equal quotients may differ from that of their sums in the last bit.
    each = [value, *(found for found in rounds if found is not None)]
    return Spread(value=value, low=min(each), high=max(each))


def compared(loads: Loads, protocol: Protocol) -> tuple[Comparison, ...]:
    """Adaptive against the others, at every concurrency."""
    found = []
    for arm, against in COMPARED:
        if arm not in protocol.arms or against not in protocol.arms:
            continue
        for concurrency in concurrencies_of(protocol):
            of, to = loads.get((arm, concurrency), ()), loads.get((against, concurrency), ())
            divided = ratio(throughputs(of), throughputs(to))
            both = {load.round for load in of} & {load.round for load in to}
            found.append(
                Comparison(
                    arm=arm,
                    against=against,
                    concurrency=concurrency,
                    ratio=divided,
                    standing=standing(divided),
                    left_out=tuple(sorted(both - (throughputs(of).keys() & throughputs(to).keys()))),
                )
            )
    return tuple(found)


def throughputs(loads: Sequence[Load]) -> dict[int, float]:
    """Round -> output tokens a second, of the rounds that are used."""
    return {load.round: load.output_tokens_per_s for load in loads if used(load)}


def task_scores(accuracies: Sequence[Accuracy]) -> tuple[TaskScore, ...]:
    """Every metric of every task, in order of task, metric and arm."""
    found = [
        TaskScore(
            task=accuracy.task,
            metric=metric,
            arm=accuracy.arm,
            value=score.value,
            standard_error=score.standard_error,
            samples=accuracy.samples,
            acceptance_length=accuracy.acceptance_length,
        )
        for accuracy in accuracies
        for metric, score in accuracy.scores.items()
    ]
    tasks = list(dict.fromkeys(accuracy.task for accuracy in accuracies))
    return tuple(sorted(found, key=lambda score: (tasks.index(score.task), score.metric)))


def score_differences(scores: Sequence[TaskScore], pairs: Sequence[tuple[Arm, Arm]]) -> tuple[ScoreDifference, ...]:
    """Every pair of arms, in every metric that both have."""
    by_arm = {(score.task, score.metric, score.arm): score for score in scores}
    return tuple(
        ScoreDifference(
            task=task,
            metric=metric,
            arm=arm,
            against=against,
            can_fall=by_arm[task, metric, against].value > 0,
            difference=_difference(by_arm[task, metric, arm], by_arm[task, metric, against]),
        )
        for task, metric in dict.fromkeys((score.task, score.metric) for score in scores)
        for arm, against in pairs
        if (task, metric, arm) in by_arm and (task, metric, against) in by_arm
    )


def _difference(of: TaskScore, to: TaskScore) -> Difference:
    return difference(_score(of), _score(to), of.samples, to.samples)


def _score(found: TaskScore) -> Score:
    return Score(value=found.value, standard_error=found.standard_error)


def output_check(exactness: Exactness) -> OutputCheck:
    """What the comparison with no speculation says of one arm."""
    p_value = corrected(exactness.p_values.values())
    if exactness.greedy_equal < exactness.greedy_prompts or (p_value is not None and p_value < DIFFERENT):
        outputs = Outputs.DIFFERENT
    else:
        outputs = Outputs.SAME if exactness.greedy_prompts or p_value is not None else Outputs.UNKNOWN
    return OutputCheck(
        arm=exactness.arm,
        greedy_prompts=exactness.greedy_prompts,
        greedy_equal=exactness.greedy_equal,
        greedy_tokens=exactness.greedy_tokens,
        first_difference=dict(sorted(exactness.first_difference.items())),
        sampled_tokens=exactness.sampled_tokens,
        positions=len(exactness.p_values),
        p_value=p_value,
        outputs=outputs,
    )


def start_costs(starts: Sequence[Start]) -> tuple[StartCost, ...]:
    """What starts took, by the arms and the context of the server."""
    alike: dict[tuple[tuple[Arm, ...], int | None], list[Start]] = defaultdict(list)
    for start in starts:
        alike[start.arms, context_of(start)].append(start)
    order = list(dict.fromkeys(arms for arms, _ in alike))
    return tuple(
        StartCost(
            arms=arms,
            context=context,
            starts=len(group),
            ready_s=ready,
            graph_s=spread(start.graph_s for start in group if start.graph_s is not None),
            graph_gib=spread(start.graph_gib for start in group if start.graph_gib is not None),
        )
        for (arms, context), group in sorted(alike.items(), key=lambda each: (order.index(each[0][0]), each[0][1] or 0))
        if (ready := spread(start.ready_s for start in group)) is not None
    )


def context_of(start: Start) -> int | None:
    """The context that a start's command asks for; the last word counts."""
    found = CONTEXT.findall(" ".join(start.command))
    return int(found[-1]) if found else None


def missing_of(records: Records) -> tuple[Missing, ...]:
    """Every part of the protocol of which there is no record."""
    run, protocol = records.run, records.run.protocol
    arms, rounds = arms_of(protocol), range(1, protocol.rounds + 1)
    found = []
    if protocol.profile is not None:
        # One start may serve several rounds.
        started = {arm for start in records.starts for arm in start.arms}
        found += [Missing(part=Part.START, arm=arm, reason=UNFINISHED) for arm in arms if arm not in started]
    measured = {(load.round, load.arm, load.concurrency) for load in records.loads}
    found += [
        Missing(part=Part.LOAD, arm=arm, round=number, concurrency=concurrency, reason=UNFINISHED)
        for number in rounds
        for arm, concurrency in cell_keys(protocol)
        if (number, arm, concurrency) not in measured
    ]
    scored = {(accuracy.task, accuracy.arm) for accuracy in records.accuracies}
    found += [
        Missing(part=Part.ACCURACY, arm=arm, task=task, reason=skip_reason(run, task))
        for task in dict.fromkeys(protocol.tasks)
        for arm in arms
        if (task, arm) not in scored
    ]
    if protocol.exactness:
        checked = {exactness.arm for exactness in records.exactnesses}
        found += [
            Missing(part=Part.EXACTNESS, arm=arm, reason=skip_reason(run, Part.EXACTNESS))
            for arm in arms
            if arm is not Arm.OFF and arm not in checked
        ]
    return tuple(found)


def skip_reason(run: Run, name: str) -> str:
    """Why the run left something out: what it says of a skipped thing that has this name in it."""
    named = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return next((skipped.reason for skipped in run.skipped if named.search(skipped.what)), UNFINISHED)


def commands(records: Records) -> tuple[Command, ...]:
    """How each part was produced, the run as a whole first."""
    found = [
        Command(
            part=Part.START,
            what=f"round {start.round}: {', '.join(start.arms)}",
            command=start.command,
            environment=dict(sorted(start.environment.items())),
        )
        for start in records.starts
    ]
    found += [
        Command(
            part=Part.LOAD,
            what=f"round {load.round}: {load.arm} at concurrency {load.concurrency}",
            command=load.command,
        )
        for load in records.loads
    ]
    found += [
        Command(part=Part.ACCURACY, what=f"{accuracy.task}: {accuracy.arm}", command=accuracy.command)
        for accuracy in records.accuracies
    ]
    return tuple(found)


def verdict(
    records: Records,
    comparisons: Sequence[Comparison],
    differences: Sequence[ScoreDifference],
    outputs: Sequence[OutputCheck],
    missing: Sequence[Missing],
) -> Verdict:
    """What the report leads with."""
    protocol = records.run.protocol
    wins = []
    for against in dict.fromkeys(comparison.against for comparison in comparisons):
        standings: dict[Standing, tuple[int, ...]] = {}
        for each in Standing:
            at = tuple(c.concurrency for c in comparisons if c.against is against and c.standing is each)
            if at:
                standings[each] = at
        wins.append(Win(against=against, standings=standings))
    return Verdict(
        accuracy=kept(differences),
        outputs={check.arm: check.outputs for check in outputs},
        throughput=tuple(wins),
        failed_requests=sum(load.failed for load in records.loads),
        requests=sum(load.requested for load in records.loads),
        unused_cells=sum(not used(load) for load in records.loads),
        missing_cells=sum(each.part is Part.LOAD for each in missing),
        cells=len(cell_keys(protocol)) * protocol.rounds,
    )


def kept(differences: Sequence[ScoreDifference]) -> Kept:
    """Whether adaptive verification scores as the other arms do, in everything that was measured and can fall."""
    measured = [each for each in differences if each.arm is Arm.ADAPTIVE]
    if not measured:
        return Kept.UNMEASURED
    found = {each.difference.agreement for each in measured if each.can_fall}
    if not found:
        return Kept.UNKNOWN
    if Agreement.LOWER in found:
        return Kept.LOWER
    return Kept.UNKNOWN if Agreement.UNKNOWN in found else Kept.KEPT


def laid_beside(name: str, comparisons: Sequence[Comparison]) -> Beside:
    """A reference table beside the run's comparisons.

    Raises:
        InputError: no such table.
    """
    reference, table = references.find(name)
    here: dict[tuple[Arm, int], Ratio | None] = {(c.against, c.concurrency): c.ratio for c in comparisons}
    deltas = []
    for against in (Arm.FIXED, Arm.OFF):
        printed = {
            concurrency: delta
            for concurrency in sorted(table.throughput.get(Arm.ADAPTIVE, {}))
            if (delta := references.delta_percent(table, Arm.ADAPTIVE, against, concurrency)) is not None
        }
        own = {concurrency for other, concurrency in here if other is against}
        deltas += [
            BesideDelta(
                against=against,
                concurrency=concurrency,
                reference_percent=printed.get(concurrency),
                here=here.get((against, concurrency)),
            )
            for concurrency in sorted(own | printed.keys())
        ]
    scores = [TaskScore.model_validate(score.model_dump()) for score in table.accuracy]
    return Beside(
        reference=reference,
        table=table,
        deltas=tuple(deltas),
        score_differences=score_differences(scores, SCORES_COMPARED),
        checked=tuple(each for each in references.check(reference)),
    )
