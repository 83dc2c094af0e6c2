"""What a report says, recomputed from the raw records without the code that made it, and on records at random."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import made_up_run
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_run import ARMS, protocol, records, write
from scipy import stats

from serve.validate.deriving import UNFINISHED, derive
from serve.validate.findings import Findings, Kept, Outputs, Part
from serve.validate.reading import Records, read
from serve.validate.results import Accuracy, Arm, Load, Protocol, Score, Skipped
from serve.validate.statistics import Standing
from serve.validate.text import PARTS, render

FAILED = {(Arm.ADAPTIVE, 16, 2): 3, (Arm.OFF, 4, 1): 64}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with failures in two cells."""
    return write(tmp_path_factory.mktemp("run"), records(failed=FAILED))


@pytest.fixture(scope="module")
def reported(raw: Path) -> dict[str, Any]:
    return json.loads(derive(read(raw)).model_dump_json())


def loaded(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


def test_throughput_lengths_and_latency_recompute_from_the_raw_records(raw: Path, reported: dict[str, Any]) -> None:
    loads = loaded(raw / "load")
    assert len(reported["cells"]) == 12
    for cell in reported["cells"]:
        rounds = [x for x in loads if (x["arm"], x["concurrency"]) == (cell["arm"], cell["concurrency"])]
        clean = [x for x in rounds if not x["failed"]]
        speeds = [x["output_tokens"] / x["duration_s"] for x in clean]
        assert cell["output_tokens_per_s"]["value"] == pytest.approx(statistics.median(speeds))
        assert cell["output_tokens_per_s"]["low"] == pytest.approx(min(speeds))
        assert cell["output_tokens_per_s"]["high"] == pytest.approx(max(speeds))
        assert cell["ttft_p99_ms"]["value"] == statistics.median(x["ttft_ms"][1] for x in clean)
        assert len(cell["rounds"]) == len(rounds)
        assert sum(x["failed"] for x in cell["rounds"]) == sum(x["failed"] for x in rounds)
        if cell["arm"] == "off":
            assert cell["acceptance_length"] is None
            continue
        total = {key: sum(x["drafts"][key] for x in clean) for key in clean[0]["drafts"]}
        assert cell["acceptance_length"]["value"] == pytest.approx(total["emitted"] / total["steps"])
        assert cell["verified_width"]["value"] == pytest.approx(total["width"] / total["steps"])
        assert cell["accepted_of_verified"] == pytest.approx(total["accepted"] / total["verified"])
        expected = total["accepted"] / total["expected"] if cell["arm"] == "adaptive" else None
        assert cell["accepted_of_expected"] == pytest.approx(expected)


def test_intervals_recompute_from_the_raw_records(raw: Path, reported: dict[str, Any]) -> None:
    speeds = {
        (x["arm"], x["concurrency"], x["round"]): x["output_tokens_per_s"]
        for x in loaded(raw / "load")
        if not x["failed"]
    }
    assert [(x["against"], x["concurrency"]) for x in reported["comparisons"]] == [
        (against, number) for against in ("fixed", "off") for number in (1, 4, 16, 64)
    ]
    for found in reported["comparisons"]:
        both = [
            number
            for number in (1, 2, 3)
            if {("adaptive", found["concurrency"], number), (found["against"], found["concurrency"], number)}
            <= {*speeds}
        ]
        logs = [
            math.log(speeds["adaptive", found["concurrency"], n] / speeds[found["against"], found["concurrency"], n])
            for n in both
        ]
        low, high = stats.t.interval(0.95, len(logs) - 1, statistics.mean(logs), stats.sem(logs))
        assert found["ratio"]["rounds"] == len(both)
        assert found["ratio"]["value"] == pytest.approx(stats.gmean([math.exp(x) for x in logs]))
        assert (found["ratio"]["low"], found["ratio"]["high"]) == pytest.approx((math.exp(low), math.exp(high)))
        assert found["standing"] == ("faster" if low > 0 else "slower" if high < 0 else "cannot tell")
        assert found["left_out"] == [n for n in (1, 2, 3) if n not in both]


def test_scores_and_starts_recompute_from_the_raw_records(raw: Path, reported: dict[str, Any]) -> None:
    scores = {(x["task"], x["arm"]): x["scores"] for x in loaded(raw / "accuracy")}
    assert len(reported["scores"]) == 9
    assert len(reported["score_differences"]) == 9
    for found in reported["score_differences"]:
        of, to = (scores[found["task"], found[arm]][found["metric"]] for arm in ("arm", "against"))
        error = math.sqrt(of["standard_error"] ** 2 + to["standard_error"] ** 2)
        assert found["difference"]["value"] == pytest.approx(of["value"] - to["value"])
        assert found["difference"]["standard_error"] == pytest.approx(error)
        alike = abs(of["value"] - to["value"]) <= 1.2 * error
        assert (found["difference"]["agreement"] == "alike") is alike
    starts = loaded(raw / "starts")
    for found in reported["starts"]:
        ready = [x["ready_s"] for x in starts if x["arms"] == found["arms"]]
        assert found["ready_s"]["value"] == statistics.median(ready)
        assert found["graph_gib"]["value"] == {"off": 2.61, "fixed": 4.71}[found["arms"][0]]


def test_failed_requests_are_counted_marked_and_in_no_number(raw: Path, reported: dict[str, Any]) -> None:
    text = render(Findings.model_validate(reported), [])
    assert reported["verdict"]["failed_requests"] == 67
    assert reported["verdict"]["unused_cells"] == 2
    assert "67 of 4,032 requests; not used because of them, or for want of an answer: 2 of 36 measured cells" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| 16 | ") and "2 of 3 rounds" in line)
    assert row.rstrip(" |").endswith("2 of 3 rounds †")
    assert "| adaptive | 16 | 2 | 3 of 64 |" in text
    assert "3 x HTTP 503: the server \\| is \\<draining\\> \\[retry\\](x)" in text
    assert "| 16 | +4.7 % |" in text
    assert "| 2 | † 2 | cannot tell |" in text


def test_every_number_of_the_text_is_in_the_json(reported: dict[str, Any]) -> None:
    text = render(Findings.model_validate(reported), [])
    for cell in reported["cells"]:
        assert f"{cell['output_tokens_per_s']['value']:,.1f}" in text
    for found in reported["comparisons"]:
        assert f"{100 * (found['ratio']['low'] - 1):+.1f} % to {100 * (found['ratio']['high'] - 1):+.1f} %" in text
    for score in reported["scores"]:
        assert f"| {score['value']:.4f} | {score['standard_error']:.4f} |" in text


def test_the_verdict_says_where_it_wins_and_where_it_cannot_tell() -> None:
    made = derive(records())
    text = render(made, [])
    against = {win.against: win.standings for win in made.verdict.throughput}
    assert against[Arm.FIXED][Standing.SLOWER] == (1,)
    assert against[Arm.FIXED][Standing.UNDECIDED] == (4,)
    assert against[Arm.FIXED][Standing.FASTER] == (16, 64)
    assert against[Arm.OFF] == {Standing.FASTER: (1, 4, 16, 64)}
    verdict = text[text.index("## Verdict") : text.index("## Throughput")]
    assert re.search(r"slower at concurrency 1 \(-\d\.\d %, -\d\.\d % to -\d\.\d %\)", verdict)
    assert re.search(r"cannot tell at concurrency 4 \([+-]\d\.\d %, -\d\.\d % to \+\d\.\d %\)", verdict)
    assert "**Accuracy: kept.** On gsm8k, niah-16384" in verdict
    lows = [each.difference.low or 0 for each in made.score_differences if each.arm is Arm.ADAPTIVE]
    assert f"a loss of up to {-100 * min(lows):.2f} points" in verdict
    assert "**Complete:**" in verdict


@pytest.mark.parametrize(
    ("value", "error", "kept"),
    [(0.90, 0.007, Kept.LOWER), (0.97, 0.007, Kept.KEPT), (0.926, 0.007, Kept.KEPT), (0.926, None, Kept.UNKNOWN)],
)
def test_accuracy_is_kept_lower_or_cannot_be_told(value: float, error: float | None, kept: Kept) -> None:
    made = records(protocol(tasks=("gsm8k",)))

    def scored(accuracy: Accuracy) -> Accuracy:
        score = Score(value=value, standard_error=error)
        return accuracy.model_copy(update={"scores": dict.fromkeys(accuracy.scores, score)})

    accuracies = tuple(scored(a) if a.arm is Arm.ADAPTIVE else a for a in made.accuracies)
    found = derive(Records(made.run, made.starts, made.loads, accuracies, made.exactnesses))
    assert found.verdict.accuracy is kept
    assert f"**Accuracy: {kept}.**" in render(found, [])


def test_a_task_of_which_nothing_is_right_decides_nothing() -> None:
    made = records(protocol(tasks=("gsm8k", "niah-16384")))

    def nothing(accuracy: Accuracy) -> Accuracy:
        return accuracy.model_copy(update={"scores": {"score": Score(value=0.0, standard_error=0.0)}, "samples": 8})

    for tasks, kept in (({"gsm8k"}, Kept.KEPT), ({"gsm8k", "niah-16384"}, Kept.UNKNOWN)):
        accuracies = tuple(nothing(a) if a.task in tasks else a for a in made.accuracies)
        found = derive(Records(made.run, (), (), accuracies))
        text = render(found, [])
        assert found.verdict.accuracy is kept
        assert "another arm has nothing right, so that no loss could be seen" in text
        assert ("On niah-16384 no score of adaptive is lower" in text) is (kept is Kept.KEPT)


@pytest.mark.parametrize(
    ("equal", "p_value", "outputs"),
    [(32, 0.3, "same"), (31, 0.3, "different"), (0, 0.3, "different"), (32, 0.003, "different")],
)
def test_outputs_are_the_same_or_not(equal: int, p_value: float, outputs: str) -> None:
    made = records()
    checks = (made_up_run.exactness(Arm.ADAPTIVE, equal, p_value),)
    found = derive(Records(made.run, made.starts, made.loads, made.accuracies, checks))
    assert found.verdict.outputs == {Arm.ADAPTIVE: Outputs(outputs)}
    assert found.outputs[0].p_value == pytest.approx(3 * p_value)
    assert f"{equal} of 32 greedy answers equal" in render(found, [])
    assert ("prompt 0 at 17" in render(found, [])) is (equal < 32)
    assert ("prompt 4 at 17, 27 more" in render(found, [])) is (equal == 0)


def test_one_round_has_no_interval_and_says_so() -> None:
    found = derive(records(protocol((1, 16), rounds=1, tasks=())))
    assert all(each.standing is Standing.UNDECIDED and each.ratio for each in found.comparisons)
    text = render(found, [])
    assert "one round: no interval" in text
    assert "none with one round" in text
    assert "miss on average" not in text
    assert "**Accuracy: not measured.**" in text


def test_a_server_that_was_only_asked_is_called_what_it_is() -> None:
    planned = protocol(arms=[Arm.FIXED], tasks=(), exactness=False)
    planned = planned.model_copy(update={"profile": None, "url": "http://127.0.0.1:9000"})
    made = records(planned)
    found = derive(Records(made.run, (), made.loads))
    assert found.missing == ()
    text = render(found, [])
    assert text.startswith("# Throughput of http://127.0.0.1:9000\n")
    assert "**Throughput: nothing to compare.**" in text


def test_starts_with_a_longer_context_are_counted_apart() -> None:
    made = records(protocol(rounds=1))
    long = made.starts[1].model_copy(update={"command": ("x", "up", "--", "--max-model-len", "65792"), "ready_s": 900})
    found = derive(Records(made.run, (*made.starts, long)))
    assert [(cost.arms, cost.context, cost.starts) for cost in found.starts] == [
        ((Arm.OFF,), None, 1),
        ((Arm.FIXED, Arm.ADAPTIVE), None, 1),
        ((Arm.FIXED, Arm.ADAPTIVE), 65792, 1),
    ]
    assert "| fixed, adaptive | 65,792 | 1 | 900.0 |" in render(found, [])


def test_what_is_missing_is_named_with_its_reason() -> None:
    skipped = [
        Skipped(what="task niah-65536", reason="its data is not there: give --data"),
        Skipped(what="exactness", reason="r2"),
    ]
    planned = protocol((1, 16), rounds=2, tasks=("gsm8k", "niah-65536"))
    made = records(planned, skipped=skipped)
    found = derive(Records(made.run, made.starts[:1], made.loads[:3], made.accuracies[:3]))
    reasons = {(each.part, each.task): each.reason for each in found.missing}
    assert reasons == {
        (Part.START, None): UNFINISHED,
        (Part.LOAD, None): UNFINISHED,
        (Part.ACCURACY, "niah-65536"): skipped[0].reason,
        (Part.EXACTNESS, None): "r2",
    }
    partial = "no record of 9 of 12 cells of the sweep; no record of other parts: 7; skipped: 2 ([list](#not-measured))"
    assert partial in render(found, [])
    assert len(missing_in(render(found, []))) == len(found.missing) == 2 + 9 + 3 + 2
    assert "| task niah-65536 | its data is not there: give --data |" in render(found, [])


def missing_in(text: str) -> set[tuple[str, ...]]:
    """What the text's table of missing things names: part, arm, round, concurrency or task."""
    if "In the protocol, and without a record:" not in text:
        return set()
    body = text.split("In the protocol, and without a record:")[1].split("\n\n")[1].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body]
    return {(part, arm, number, which) for part, arm, number, whiches, _ in rows for which in whiches.split(", ")}


NASTY = st.sampled_from(["timeout", "a | b", "<script>", "`x` ``", "", "\n\n# no heading", "$x_1$", "x" * 999])
SPEEDS = st.one_of(st.sampled_from([0.0, 1e-3, 1e7]), st.floats(0.1, 1e5))


@st.composite
def random_records(draw: st.DrawFn) -> Records:
    """Any part of any run, with failures, without drafts, with numbers from all over."""
    arms = draw(st.lists(st.sampled_from(ARMS), min_size=1, unique=True))
    planned = protocol(
        draw(st.lists(st.sampled_from([1, 2, 3, 16, 1000]), min_size=1, unique=True)),
        draw(st.integers(1, 3)),
        arms,
        draw(st.lists(st.sampled_from(["gsm8k", "niah-16384", "niah-65536", "a | b"]), unique=True)),
        draw(st.booleans()),
    )
    if draw(st.booleans()):
        planned = planned.model_copy(update={"profile": None, "url": "http://127.0.0.1:9/v1"})
    made = records(planned, seed=draw(st.integers(0, 9)), skipped=[Skipped(what=draw(NASTY), reason=draw(NASTY))])

    def some(each: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(item for item in each if draw(st.booleans()))

    return Records(
        made.run,
        some(made.starts),
        tuple(draw(changed_load(load)) for load in some(made.loads)),
        tuple(draw(changed_score(accuracy)) for accuracy in some(made.accuracies)),
        some(made.exactnesses),
    )


@st.composite
def changed_load(draw: st.DrawFn, load: Load) -> Load:
    failed = draw(st.sampled_from([0, 0, 1, load.requested]))
    update: dict[str, Any] = {
        "failed": failed,
        "completed": load.requested - failed,
        "errors": {draw(NASTY): failed} if failed and draw(st.booleans()) else {},
        "output_tokens_per_s": draw(SPEEDS),
    }
    if draw(st.booleans()):
        update |= {"drafts": None, "ttft_ms": None, "tpot_ms": None}
    elif load.drafts is not None and draw(st.booleans()):
        update["drafts"] = load.drafts.model_copy(update={"steps": 0.0, "expected": 0.0, "proposed": 0.0})
    return load.model_copy(update=update)


@st.composite
def changed_score(draw: st.DrawFn, accuracy: Accuracy) -> Accuracy:
    errors = st.sampled_from([None, 0.0, 0.01])
    scores = {metric: Score(value=draw(st.floats(0, 1)), standard_error=draw(errors)) for metric in accuracy.scores}
    return accuracy.model_copy(update={"scores": scores})


def everything(planned: Protocol) -> set[tuple[str, ...]]:
    """All that a run of a protocol measures, in the words of the text."""
    rounds = [str(number) for number in range(1, planned.rounds + 1)]
    cells = {("Load", a, n, str(c)) for a in planned.arms for n in rounds for c in planned.concurrencies}
    tasks = {("Accuracy", a, "—", t.replace("|", "\\|")) for a in planned.arms for t in planned.tasks}
    checks = {("Exactness", a, "—", "—") for a in planned.arms if a is not Arm.OFF and planned.exactness}
    starts = {(PARTS[Part.START], a, "—", "—") for a in planned.arms if planned.profile}
    return cells | tasks | checks | starts


@settings(max_examples=60)
@given(random_records())
def test_any_part_of_any_run_has_a_report_that_names_all_that_is_missing(made: Records) -> None:
    found = derive(made, ["vllm-58151"])
    assert Findings.model_validate_json(found.model_dump_json()) == found
    text = render(found, [])
    present = {("Load", x.arm, str(x.round), str(x.concurrency)) for x in made.loads}
    present |= {("Accuracy", x.arm, "—", x.task.replace("|", "\\|")) for x in made.accuracies}
    present |= {("Exactness", x.arm, "—", "—") for x in made.exactnesses}
    present |= {(PARTS[Part.START], arm, "—", "—") for x in made.starts for arm in x.arms}
    assert missing_in(text.replace("a \\| b", "a \\! b")) == {
        tuple(word.replace("a \\| b", "a \\! b") for word in each) for each in everything(made.run.protocol) - present
    }
    for load in made.loads:
        if load.failed:
            assert f"| {load.arm} | {load.concurrency} | {load.round} | {load.failed:,} of {load.requested:,} |" in text
    assert re.search(r"\b(nan|inf|None)\b", text) is None
    tables = [block for block in text.split("\n\n") if block.startswith("| ")]
    for block in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block
