"""The report as files: the command, its errors, the plots, and the same bytes for the same records."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from made_up_run import ARMS, protocol, put, records, write

from serve.commands.report import report_command
from serve.errors import InputError
from serve.validate.deriving import derive
from serve.validate.findings import Findings
from serve.validate.plots import PLOTS, STYLE, TITLES
from serve.validate.reading import Records
from serve.validate.report import write_report
from serve.validate.results import Arm

DSPARK = str(Path(sys.executable).with_name("dspark-serve"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a report, a table laid beside it."""
    directory = write(tmp_path_factory.mktemp("run"), records(failed={(Arm.ADAPTIVE, 16, 2): 3}))
    assert write_report(directory, ["vllm-52795"]) == directory / "report.md"
    return directory


def test_the_text_leads_with_the_verdict_and_has_every_part(run: Path) -> None:
    text = (run / "report.md").read_text()
    assert [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")] == [
        "Verdict",
        "Throughput",
        "Latency",
        "Drafts",
        "Accuracy",
        "Outputs against no speculation",
        "Start-up",
        "Failures",
        "Beside it: vllm-52795",
        "Protocol",
        "Where it ran",
        "Commands",
        "How each number is computed",
    ]
    for name, title in TITLES.items():
        assert f"[![{title}](plots/{name}.png)](plots/{name}.svg)" in text
    assert "| fixed | 16 | +5.79 % |" in text
    assert "| vllm-52795: adaptive against fixed, C16 | +5.78 % | +5.786 % | within the cells' rounding |" in text


def test_versions_patches_and_every_command_are_in_it(run: Path) -> None:
    text = (run / "report.md").read_text()
    for row in ("| vllm | 0.32.0 |", "| tp-consensus | applied |", "| cpu-engine | not for this hardware |"):
        assert row in text
    assert "dspark-serve validate deepseek-v4-flash-h200x4 --rounds 3" in text
    assert "VLLM_ENGINE_READY_TIMEOUT_S=7200 dspark-serve up deepseek-v4-flash-h200x4 --port 9000" in text
    assert """vllm bench serve --max-concurrency 64 --extra-body '{"cache_salt":"a"}'""" in text
    assert "lm_eval --tasks gsm8k --seed 42" in text


def test_a_token_in_the_environment_is_not_repeated(run: Path) -> None:
    for name in ("starts/round-1-off.json", "report.md", "report.json"):
        assert "HF_TOKEN" in (run / name).read_text()
        assert "hf_shown_to_nobody" not in (run / name).read_text()


def test_every_plot_is_there_as_picture_and_drawing(run: Path) -> None:
    assert {path.name for path in (run / "plots").iterdir()} == {f"{n}.{k}" for n in PLOTS for k in ("svg", "png")}
    for name in PLOTS:
        png = (run / "plots" / f"{name}.png").read_bytes()
        width, height = struct.unpack(">II", png[16:24])
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        assert 1000 < width < 1300
        assert 200 < height < 1300
        ElementTree.parse(run / "plots" / f"{name}.svg")


def test_the_same_records_give_the_same_bytes_in_another_process(run: Path) -> None:
    def report() -> dict[str, bytes]:
        paths = [run / "report.md", run / "report.json", *(run / "plots").iterdir()]
        return {path.name: path.read_bytes() for path in paths}

    before = report()
    done = subprocess.run(
        [DSPARK, "report", str(run), "--beside", "vllm-52795"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert done.stdout == f"{run / 'report.md'}\n"
    assert report() == before


def test_text_and_json_say_the_same_after_reading_back(run: Path) -> None:
    from serve.validate.text import render

    findings = Findings.model_validate_json((run / "report.json").read_text())
    assert render(findings, list(PLOTS)) == (run / "report.md").read_text()


def test_a_run_without_a_record_has_a_report_and_old_plots_go(tmp_path: Path) -> None:
    write(tmp_path, Records(records().run))
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "delta.svg").write_text("of an earlier report")
    text = write_report(tmp_path).read_text()
    assert (
        "**This report is partial:** no record of 36 of 36 cells of the sweep; no record of other parts: 11 (" in text
    )
    assert list((tmp_path / "plots").iterdir()) == []
    assert "plots/" not in text


EDGES = {
    "one concurrency, one round": records(protocol((8,), rounds=1)),
    "two rounds": records(protocol((1, 2, 4, 8, 16, 32, 64, 128, 256), rounds=2), seed=3),
    "nothing but failures": records(failed={(arm, c, n): 5 for arm in ARMS for c in (1, 4, 16, 64) for n in (1, 2, 3)}),
    "one arm": records(protocol(arms=[Arm.ADAPTIVE])),
    "a task with a formula for a name": records(protocol((1,), 1, tasks=("$x^{", "niah-65536"))),
}


@pytest.mark.parametrize("name", EDGES)
def test_plots_of_edges_are_drawn_without_a_warning(name: str) -> None:
    findings = derive(EDGES[name], ["vllm-58151", "vllm-58151-mono"])
    with warnings.catch_warnings(), mpl.rc_context(STYLE):
        warnings.simplefilter("error")
        figures = {plot: make(findings) for plot, make in PLOTS.items()}
        for figure in figures.values():
            if figure is not None:
                figure.draw_without_rendering()
    assert figures["throughput"] is not None
    assert (figures["delta"] is None) is (name in ("nothing but failures", "one arm"))


def test_what_is_no_run_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run([DSPARK, "report", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"dspark-serve: {tmp_path} is no run of `dspark-serve validate` or `bench`: it has no run.json; "
        "give the directory that the run wrote\n"
    )


def test_without_what_it_draws_with_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"matplotlib not installed: pip install '\.\[validate\]'"):
        report_command(tmp_path)


def test_an_unknown_table_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write(tmp_path, Records(records().run))
    with pytest.raises(InputError, match="no reference table 'mine': use one of vllm-52795"):
        write_report(tmp_path, ["mine"])
    assert not (tmp_path / "report.json").exists()


CELL = "load/round-1-off-c16.json"


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("run.json", {"protocol": None}, "run.json is damaged: protocol: "),
        (CELL, {"output_tokens_per_s": -1}, "damaged: output_tokens_per_s: "),
        (CELL, {"surprise": 1}, "damaged: surprise: Extra inputs are not permitted"),
        (CELL, {"duration_s": float("inf")}, "damaged: a number is endless"),
        (CELL, {"concurrency": 17}, "is of another protocol: run.json has no concurrency 17"),
        (CELL, {"round": 4}, "is of another protocol: run.json has 3 rounds, this is of round 4"),
        (CELL, {"round": 2}, "are of the same thing"),
        (CELL, {"completed": 60}, "contradicts itself: 64 requests, 60 + 0 ended"),
        (CELL, {"output_tokens_per_s": 9}, "contradicts itself: output_tokens_per_s is not output_tokens / duration_s"),
        ("accuracy/off-gsm8k.json", {"task": "mmlu"}, "is of another protocol: run.json has no task mmlu"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, change: dict[str, object], named: str
) -> None:
    write(tmp_path, records())
    path = tmp_path / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError) as refused:
        write_report(tmp_path)
    assert named in str(refused.value)
    assert name.rpartition("/")[2] in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "report.json").exists()


def test_a_torn_record_and_an_arm_of_another_protocol_are_named(tmp_path: Path) -> None:
    write(tmp_path, records(protocol(arms=[Arm.FIXED, Arm.ADAPTIVE])))
    put(tmp_path / "exactness" / "off.json", records().exactnesses[0].model_copy(update={"arm": Arm.OFF}))
    with pytest.raises(InputError, match=r"off\.json is of another protocol: run\.json has no arm off"):
        write_report(tmp_path)
    (tmp_path / "exactness" / "off.json").write_text('{"arm": "of')
    with pytest.raises(InputError, match=r"off\.json is damaged: file: Invalid JSON"):
        write_report(tmp_path)
