"""`report.json`: every number of a report. Text and plots are made of this alone."""

from __future__ import annotations

from enum import StrEnum

from serve.validate.references import Checked, Reference, ReferenceTable
from serve.validate.results import Arm, Record, Run
from serve.validate.statistics import Difference, Ratio, Spread, Standing


class Round(Record):
    """One measured cell. It is used only where every request was completed."""

    round: int
    output_tokens_per_s: float
    requested: int
    failed: int
    errors: dict[str, int]
    used: bool


class Cell(Record):
    """One arm at one concurrency.

    Attributes:
        rounds: All that were measured, used or not.
        output_tokens_per_s: Over the used rounds, like all that follows; None without one.
        ttft_ms, ttft_p99_ms, tpot_ms, tpot_p99_ms: Over the rounds' medians and 99th percentiles.
        acceptance_length, verified_width: Tokens of a request in a step, the bonus token included.
        verified_of_proposed, accepted_of_verified, accepted_of_expected: Quotients of draft tokens.
    """

    arm: Arm
    concurrency: int
    rounds: tuple[Round, ...]
    output_tokens_per_s: Spread | None
    ttft_ms: Spread | None
    ttft_p99_ms: Spread | None
    tpot_ms: Spread | None
    tpot_p99_ms: Spread | None
    acceptance_length: Spread | None
    verified_width: Spread | None
    verified_of_proposed: float | None
    accepted_of_verified: float | None
    accepted_of_expected: float | None


class Comparison(Record):
    """Throughput of one arm divided by another's at one concurrency.

    Attributes:
        left_out: Rounds that both arms have and that were not used, since requests failed.
    """

    arm: Arm
    against: Arm
    concurrency: int
    ratio: Ratio | None
    standing: Standing
    left_out: tuple[int, ...]


class TaskScore(Record):
    """One metric of one task on one arm."""

    task: str
    metric: str
    arm: Arm
    value: float
    standard_error: float | None
    samples: int
    acceptance_length: float | None


class ScoreDifference(Record):
    """One metric of one task: an arm less another.

    Attributes:
        can_fall: Whether the other arm has anything right; where it has not, no loss could be seen.
    """

    task: str
    metric: str
    arm: Arm
    against: Arm
    can_fall: bool
    difference: Difference


class Outputs(StrEnum):
    """What the exactness check says of an arm."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "cannot tell"


class OutputCheck(Record):
    """One arm's outputs against those without speculation.

    Attributes:
        greedy_prompts, greedy_equal, greedy_tokens, first_difference: As recorded.
        sampled_tokens: As recorded.
        positions: Positions whose distributions were compared.
        p_value: The smallest of them, corrected for their number.
        outputs: Different where a greedy answer is, or where `p_value` is below `DIFFERENT`.
    """

    arm: Arm
    greedy_prompts: int
    greedy_equal: int
    greedy_tokens: int
    first_difference: dict[int, int]
    sampled_tokens: int
    positions: int
    p_value: float | None
    outputs: Outputs


class StartCost(Record):
    """Starts of servers of the same arms and context; graph numbers only where graphs were captured.

    Attributes:
        context: The longest request in tokens, where the command says it: a long task has a server of its own.
    """

    arms: tuple[Arm, ...]
    context: int | None
    starts: int
    ready_s: Spread
    graph_s: Spread | None
    graph_gib: Spread | None


class Part(StrEnum):
    """Parts of a run."""

    START = "start"
    LOAD = "load"
    ACCURACY = "accuracy"
    EXACTNESS = "exactness"


class Missing(Record):
    """Something of the protocol of which there is no record."""

    part: Part
    arm: Arm
    round: int | None = None
    concurrency: int | None = None
    task: str | None = None
    reason: str


class Command(Record):
    """What produced a record, to repeat it."""

    part: Part
    what: str
    command: tuple[str, ...]
    environment: dict[str, str] | None = None


class Kept(StrEnum):
    """Whether adaptive verification keeps accuracy."""

    KEPT = "kept"
    LOWER = "lower"
    UNKNOWN = "cannot tell"
    UNMEASURED = "not measured"


class Win(Record):
    """At which concurrencies adaptive verification is faster than another arm, and where not."""

    against: Arm
    standings: dict[Standing, tuple[int, ...]]


class Verdict(Record):
    """What the report leads with."""

    accuracy: Kept
    outputs: dict[Arm, Outputs]
    throughput: tuple[Win, ...]
    failed_requests: int
    requests: int
    unused_cells: int
    missing_cells: int
    cells: int


class BesideDelta(Record):
    """Adaptive against another arm at one concurrency: in the reference table and here."""

    against: Arm
    concurrency: int
    reference_percent: float | None
    here: Ratio | None


class Beside(Record):
    """A reference table laid beside the run's."""

    reference: Reference
    table: ReferenceTable
    deltas: tuple[BesideDelta, ...]
    score_differences: tuple[ScoreDifference, ...]
    checked: tuple[Checked, ...]


class Findings(Record):
    """The whole report."""

    run: Run
    verdict: Verdict
    cells: tuple[Cell, ...]
    comparisons: tuple[Comparison, ...]
    scores: tuple[TaskScore, ...]
    score_differences: tuple[ScoreDifference, ...]
    outputs: tuple[OutputCheck, ...]
    starts: tuple[StartCost, ...]
    missing: tuple[Missing, ...]
    commands: tuple[Command, ...]
    beside: tuple[Beside, ...]
