"""The report says what the rounds say: worked out by hand here."""

from __future__ import annotations

import json

import pytest

from tests.bench import never_slower_report as report
from tests.bench.never_slower import Run


def row(part: str, arm: str, number: int, seconds: float, **more: object) -> dict:
    """Ten tokens of each of four requests."""
    base = {"run": "1", "part": part, "arm": arm, "round": number, "workload": "full", "requests": 4, "size": "4b"}
    return base | {"decode_s": [seconds], "decoded": [40]} | more


CELL = {"workload": "full", "requests": 4, "arms": ["fixed"]}


def by(*arms: str) -> dict:
    return CELL | {"arms": list(arms)}


ROWS = [
    {"run": "1", "part": "machine", "command": "--seconds 9", "device": "a card", "vllm": "0.32.0"},
    *(row("overhead", "fixed", n, s) for n, s in enumerate((0.10, 0.20, 0.10))),
    *(row("overhead", "patched", n, s) for n, s in enumerate((0.11, 0.20, 0.12))),
    *(row("overhead", "upstream", n, s) for n, s in enumerate((0.12, 0.25))),
]


def test_a_token_takes_the_time_of_its_request_not_of_all():
    assert report.token_ms(4, {"decode_s": [0.2, 0.3], "decoded": [40, 80]}) == pytest.approx([20.0, 15.0])


def test_of_several_repeats_the_median_counts():
    several = row("overhead", "fixed", 0, 0.0) | {"decode_s": [0.2, 0.1, 0.3], "decoded": [40, 40, 40]}
    (arms,) = report.by_round([several], "overhead").values()
    assert arms["fixed"] == {("1", 0): pytest.approx(20.0)}


def test_no_speculation_stands_beside_every_workload():
    cells = report.by_round(
        [row("workloads", "off", 0, 0.1), row("workloads", "patched", 0, 0.2, workload="decaying")], "workloads"
    )
    assert report.ratio(cells["decaying", 4], "patched", ["off"]) == pytest.approx((2.0, 2.0, 2.0))
    assert "patched" not in cells["full", 4]


def test_ratios_are_taken_round_by_round():
    (arms,) = report.by_round(ROWS, "overhead").values()
    assert report.ratio(arms, "patched", ["fixed"]) == pytest.approx((1.1, 1.0, 1.2))
    assert report.ratio(arms, "upstream", ["fixed"]) == pytest.approx((1.225, 1.2, 1.25)), "rounds that both have"
    assert report.ratio(arms, "patched", ["fixed", "upstream"]) == pytest.approx((1.1, 1.0, 1.2)), "the best of both"
    assert report.ratio(arms, "patched", ["off"]) is None


def test_the_section_names_the_command_and_says_what_was_missed():
    text = report.section(ROWS)
    assert "`python -m tests.bench.never_slower --seconds 9`: device a card, vllm 0.32.0" in text
    assert "| time a token, full budgets, 4b, 4 requests, patched / fixed | at most 1.01 | 1.100 | no |" in text
    assert "| 4 | 1.225 (1.200 to 1.250) | 1.100 (1.000 to 1.200) |" in text
    assert "Start-up" not in text, "nothing that was not measured"


def test_raw_rounds_and_section_are_written_and_rewritten(tmp_path, monkeypatch):
    raw, results, data = tmp_path / "raw.jsonl", tmp_path / "RESULTS.md", tmp_path / "results.json"
    raw.write_text("\n".join(map(json.dumps, ROWS)) + '\n{"cut sho')
    results.write_text("# Measured\n")
    data.write_text('{"another": [1]}')
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(report, "DATA", data)
    report.write([raw])
    first = results.read_text()
    report.write([raw])
    assert results.read_text() == first
    assert first.startswith("# Measured\n\n<!-- never-slower -->\n## Adaptive")
    assert json.loads(data.read_text()) == {"another": [1], "never_slower": ROWS}


def start(arm: str, turn: int, *capture: tuple[str, str], of: str = "startup") -> dict:
    """Several captures: an earlier one of the same start only estimates."""
    base = {"run": "1", "part": "start", "of": of, "arm": arm, "size": "4b", "ready_s": 30.0, "together": False}
    return base | {"turn": turn, "capture": [list(each) for each in capture]}


def test_what_a_start_and_a_coarser_grid_cost_is_stated():
    rows = [
        start("fixed", 0, ("13", "4.0")),
        start("patched", 0, ("70", "9.0"), ("16", "5.6")),
        start("patched", 0, ("99", "9.9"), of="overhead"),
        row("grids", "patched", 0, 0.101),
        row("grids", report.UPSTREAMS_GRID, 0, 0.100),
        row("grids", "fixed", 0, 0.001),
    ]
    text = "\n".join(report.criteria_section(rows))
    assert "| graph capture, time, patched / fixed, medians of 1 and 1 starts | at most 1.3 | 1.23 | yes |" in text
    assert "| graph capture, memory, patched / fixed, medians of 1 and 1 starts | at most 1.3 | 1.40 | no |" in text
    assert "| throughput, full, 4 requests, patched / upstream's grid | at least 0.99 | 0.990 | yes |" in text


def test_the_median_start_of_each_arm_counts():
    rows = [
        start("fixed", 0, ("10", "4.0")),
        start("patched", 0, ("11", "4.0")),
        start("patched", 1, ("90", "4.0")),
        start("patched", 2, ("12", "4.0")),
        start("fixed", 2, ("10", "4.0")),
    ]
    text = "\n".join(report.criteria_section(rows))
    assert "time, patched / fixed, medians of 3 and 2 starts | at most 1.3 | 1.20 | yes |" in text
    assert "graph capture" not in "\n".join(report.criteria_section(rows[:1])), "nothing to compare"


def test_memory_of_engines_that_started_together_is_not_told():
    rows = [start("fixed", 0, ("13", "4.0")), start("patched", 0, ("16", "-5.6")) | {"together": True}]
    text = "\n".join(report.start_section(rows))
    assert "| startup | fixed | 4b | 30.0 s | 13 s | 4.0 GiB | no |" in text
    assert "| startup | patched | 4b | 30.0 s | 16 s |  | yes |" in text


def test_no_speculation_is_a_target_with_high_acceptance_and_else_told():
    rows = [
        row("workloads", arm, number, took) | {"workload": workload}
        for number in range(2)
        for arm, took in (("off", 0.09), ("fixed", 0.12), ("patched", 0.1))
        for workload in ("high", "decaying")
        if arm != "off" or (workload == "high" and number == 0)
    ]
    text = "\n".join(report.criteria_section(rows))
    assert "| throughput, high, 4 requests, patched / off | at least 1.0 | 0.900 | no |" in text
    assert "| throughput, decaying, 4 requests, patched / off | no target | 0.900 |  |" in text
    lines = report.workload_section(rows, "workloads", "Throughput", ("fixed",))
    assert "| requests | fixed | off |" in lines
    assert any(line.startswith("| 4 | 1 to 2 |") for line in lines), "a round without off"
    grids = report.workload_section([each for each in rows if each["arm"] != "off"], "workloads", "Grids", ("fixed",))
    assert "| requests | fixed |" in grids


def test_a_long_name_is_shortened_on_both_sides_of_a_gap():
    copy, kernel = "Memcpy HtoD (Pinned -> Device)", "void fill<" + "int, " * 99 + "bool>"
    left = report.shortened(f"{kernel} -> {copy}").removesuffix(f" -> {copy}`")
    assert left.startswith("`fill<int, int, ")
    assert left.endswith("int, bool>")
    assert len(left) == report.NAME + 1
    assert report.shortened(f"{copy} -> {copy}") == f"`{copy} -> {copy}`"
    assert report.shortened("operator|(int)") == "`operator\\|(int)`"


def test_a_slow_round_of_a_micro_benchmark_decides_nothing():
    def cost(wall: float, host: float) -> dict[str, float]:
        return {"wall_us": wall, "enqueue_us": host}

    rows = [
        {"run": "1", "part": "micro", "of": "metadata", "requests": 16, "tokens": 8, "pages": 64}
        | {
            "costs": {
                "uniform, upstream": cost(80 * slow, 70),
                "uniform, one kernel": cost(28 * slow, 20),
                "ragged, one kernel": cost(30 * slow, 20 * slow),
            }
        }
        for slow in (1.0, 1.0, 3.0)
    ]
    text = "\n".join(report.criteria_section(rows) + report.micro_section(rows))
    assert "| ragged metadata, 16 to 128 requests, wall us | at most 60 | 30.0 | yes |" in text
    assert "| ragged metadata, 16 to 128 requests, host us | at most 25 | 20.0 | yes |" in text
    assert "| even metadata, patched / upstream, wall | at most 1 | 0.35 | yes |" in text
    assert "30.0 (30.0 to 90.0) / 20.0 (20.0 to 60.0) |" in text
    one = "\n".join(report.micro_section(rows[:1]))
    assert "| 16 x 8, 64 | 80.0 / 70.0 | 28.0 / 20.0 | 30.0 / 20.0 |" in one


def test_a_run_goes_on_where_another_ended(tmp_path):
    raw = tmp_path / "raw.jsonl"
    assert Run(raw, tmp_path).rounds_left("overhead", [CELL], 3) == 3
    raw.write_text("\n".join(map(json.dumps, ROWS)) + '\n{"cut sho')
    again = Run(raw, tmp_path)
    assert again.rounds_left("overhead", [by("fixed", "patched")], 5) == 2
    assert again.rounds_left("overhead", [CELL, by("upstream")], 5) == 3, "upstream lacks a round"
    assert again.rounds_left("overhead", [CELL, CELL | {"requests": 16}], 5) == 5, "no round has all cells"
    assert again.rounds_left("overhead", [CELL], 2) == 0
    assert again.has("machine", device="a card")
    assert not again.has("micro", of="metadata")
    again.record("micro", of="metadata")
    assert [row["part"] for row in report.read([raw])][-1] == "micro", "a cut line spoils no other"


def test_what_a_records_age_costs_is_counted_over_batches_that_both_answered():
    def answered(arm: str, first: int, steps: int, accepted: int) -> dict:
        base = {"run": "1", "part": "staleness", "arm": arm, "first_prompt": first, "said": first}
        return base | {"request_steps": steps, "accepted": accepted}

    rows = [
        answered(report.NEWER, 0, 100, 150),
        answered(report.OLDER, 0, 100, 148),
        answered(report.NEWER, 32, 100, 100),
        answered(report.OLDER, 32, 100, 101) | {"said": 7},
        answered(report.NEWER, 64, 100, 700),
    ]
    text = "\n".join(report.staleness_section(rows))
    assert "| record N-1 | 200 | 2.2500 |" in text
    assert "| record N-2 | 200 | 2.2450 |" in text
    assert "the same in 1 of 2 batches" in text
    assert "N-2 / N-1 | at least 0.995 | 0.9978 | yes |" in "\n".join(report.criteria_section(rows))


def test_the_readmes_say_what_was_measured():
    cells = report.by_round(json.loads(report.DATA.read_text())["never_slower"], "workloads")

    def share(workload: str, requests: int, arm: str, *others: str) -> float:
        found = report.ratio(cells[workload, requests], arm, others)
        assert found is not None
        return 1 / found[0]

    shares = [share(workload, requests, "patched", "fixed", "upstream") for workload, requests in cells]
    root = report.HERE.parents[1]
    readme = (root / "README.md").read_text()
    of_the_better = f"{min(shares):.3f} to {max(shares):.3f} times the tokens of the better of"
    assert of_the_better in readme
    assert of_the_better in " ".join((root / "examples/validate-h200/README.md").read_text().split())
    assert f"({share('high', 256, 'patched', 'off'):.2f} times no speculation there)" in readme
    assert f"it gives {share('decaying', 128, 'patched', 'off'):.2f} times at 128" in readme
    low = share("decaying", 256, "patched", "off"), share("decaying", 256, "fixed", "off")
    assert f"{low[0]:.2f} times at 256 (fixed verification {low[1]:.2f})" in readme
