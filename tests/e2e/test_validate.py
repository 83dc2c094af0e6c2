"""`dspark-serve validate` and `bench`, whole: real servers, the real tools, records, report and what is left behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from serve.validate.exactness import Outputs, compare
from serve.validate.load import counted
from serve.validate.plan import plan, works_of
from serve.validate.results import Accuracy, Arm, Exactness, Load, Protocol, Run, Start
from tests.e2e.running import BIN, Server
from tests.processes import left

SMALLEST = (
    "--concurrencies",
    "1",
    "--rounds",
    "1",
    "--requests",
    "2",
    "--output-tokens",
    "4",
    "--warmup-requests",
    "0",
)
QUESTIONS = [
    (f"Ann has {have} apples and buys {more} more. How many apples has she?", have, more)
    for have in (2, 5, 7)
    for more in (1, 3, 4)
]


def started(*words: str | Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(BIN / "dspark-serve"), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def ended(process: subprocess.Popen[str], seconds: float = 900) -> tuple[int, str, str]:
    """Exit code and both outputs."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def run_of(directory: Path) -> Run:
    return Run.model_validate_json((directory / "run.json").read_bytes())


def loads(directory: Path) -> dict[str, Load]:
    return {
        path.stem: Load.model_validate_json(path.read_bytes()) for path in sorted((directory / "load").glob("*.json"))
    }


def check_against_raw(directory: Path) -> None:
    """Every record recomputes from what the tools themselves wrote."""
    forced = run_of(directory).protocol.output_tokens
    for cell in loads(directory).values():
        again = counted(json.loads((directory / cell.raw).read_text()), forced)
        assert Load.model_validate({**cell.model_dump(), **again}) == cell
    for path in (directory / "exactness").glob("*.json"):
        exact = Exactness.model_validate_json(path.read_bytes())
        reference, own = (
            Outputs.model_validate_json((directory / f"raw/exactness-{arm}.json").read_bytes())
            for arm in ("off", exact.arm)
        )
        assert compare(reference, own, exact.raw) == exact


def planned(protocol: Protocol) -> set[str]:
    """The records that the whole protocol leaves."""
    return {work.record for work in works_of(plan(protocol))}


def written(directory: Path) -> set[str]:
    found = {str(path.relative_to(directory).with_suffix("")) for path in directory.rglob("*.json")}
    return {name for name in found if re.match(r"load/|accuracy/|raw/exactness-", name)}


def test_a_run_that_is_stopped_is_reported_and_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = ["validate", "tiny-cpu", "--out", directory, "--arms", "off,adaptive", "--no-exactness", *SMALLEST]
    first = started(*command, DSPARK_API_KEY="a-key-for-validate")
    deadline = time.monotonic() + 500
    while not (directory / "load/round-1-off-c1.json").exists():
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    family = psutil.Process(first.pid).children(recursive=True)
    assert family
    first.send_signal(signal.SIGTERM)
    code, out, err = ended(first)
    assert code == 5, err
    assert "the report is partial; the same command measures the rest" in err
    assert Path(out.strip()).exists()
    assert not left(family)
    kept = (directory / "load/round-1-off-c1.json").read_bytes()
    assert written(directory) < planned(run_of(directory).protocol)

    code, out, err = ended(started(*command, DSPARK_API_KEY="a-key-for-validate"))
    assert code == 0, err
    assert "[1/1] round 1, adaptive at concurrency 1" in err
    assert (directory / "load/round-1-off-c1.json").read_bytes() == kept
    assert written(directory) == planned(run_of(directory).protocol)
    check_against_raw(directory)
    off, adaptive = loads(directory)["round-1-off-c1"], loads(directory)["round-1-adaptive-c1"]
    for cell in (off, adaptive):
        assert (cell.requested, cell.completed, cell.output_tokens) == (2, 2, 8)
        assert "openai-chat" in cell.command
    assert off.drafts is None
    assert adaptive.drafts is not None
    assert adaptive.drafts.proposed >= adaptive.drafts.verified >= adaptive.drafts.accepted
    # Each request's first token comes from its prompt, the others from verification steps.
    assert adaptive.drafts.emitted >= 6
    start = Start.model_validate_json((directory / "starts/round-1-off.json").read_bytes())
    assert start.ready_s > 1
    assert (start.graph_s, start.graph_gib) == (None, None)
    assert start.environment["TRITON_INTERPRET"] == "1"
    for path in directory.rglob("*"):
        assert path.is_dir() or b"a-key-for-validate" not in path.read_bytes(), path

    code, _, err = ended(started(*command, "--seed", "3"))
    assert code == 2
    assert "holds a run with seed 42, and this one has 3" in err


def test_bench_switches_a_running_server_and_puts_it_back(server: Server, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    before = server.client.get("/dspark/mode").json()["mode"]
    command = ["bench", "--url", server.url, "--arms", "fixed,adaptive", "--out", directory, *SMALLEST]
    code, out, err = ended(started(*command))
    assert code == 0, err
    assert Path(out.strip()).exists()
    assert server.client.get("/dspark/mode").json()["mode"] == before
    found = loads(directory)
    assert set(found) == {"round-1-fixed-c1", "round-1-adaptive-c1"}
    assert all(cell.completed == 2 and cell.drafts is not None for cell in found.values())
    run = run_of(directory)
    assert run.protocol.url == server.url
    assert run.hardware == "cpu"
    assert run.patch_set == server.client.get("/version").json()["dspark_serve"]["patchset"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--url", "127.0.0.1:8000"), "write it as http://HOST:PORT"),
        (("--url", "http://127.0.0.1:9"), "is the server ready, and is its key in DSPARK_API_KEY?"),
        (("--url", "http://a:b@127.0.0.1:9"), "holds a password"),
        (("--url", "http://127.0.0.1:9", "--arms", "off,off"), "off is there twice"),
    ],
)
def test_a_server_that_cannot_be_benched_is_named(words: tuple[str, ...], named: str) -> None:
    code, out, err = ended(started("bench", *words))
    assert (code, out) == (2, "")
    assert named in err
    assert len(err.splitlines()) == 1


def test_an_arm_that_the_server_does_not_run_is_refused(server: Server) -> None:
    code, out, err = ended(started("bench", "--url", server.url, "--arms", "off"))
    assert (code, out) == (2, "")
    assert f"--arms off: {server.url} runs {server.client.get('/dspark/mode').json()['mode']}; leave --arms out" in err


def test_answers_longer_than_the_context_are_refused_before_a_server_starts(tmp_path: Path) -> None:
    code, out, err = ended(started("validate", "tiny-cpu", "--output-tokens", "1024", "--out", tmp_path / "run"))
    assert (code, out) == (2, "")
    assert "--output-tokens 1024: tiny-cpu has a context of 1024 tokens for prompt and answer together" in err
    assert not (tmp_path / "run").exists()


def test_a_cell_of_which_every_request_failed_is_no_success(server: Server, tmp_path: Path) -> None:
    words = ("--concurrencies", "1", "--rounds", "1", "--requests", "1", "--warmup-requests", "0")
    code, out, err = ended(
        started("bench", "--url", server.url, "--output-tokens", "5000", *words, "--out", tmp_path / "run")
    )
    assert code == 1
    assert "at concurrency 1: every request failed: Bad Request" in err
    assert Path(out.strip()).exists()


def data_sets(folder: Path) -> list[str]:
    """A small data set of every format that `--prompts` takes."""
    texts = [f"def add_{number}(a, b):\n" for number in range(3)]
    turns = [{"messages": [{"role": "user", "content": text}], "category": "coding"} for text in texts]
    (folder / "qualitative.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    talks = [{"conversations": [{"value": text}, {"value": "    return a + b\n"}]} for text in texts]
    (folder / "sharegpt.json").write_text(json.dumps(talks))
    (folder / "mine.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return [f"speed-bench:{folder}", f"sharegpt:{folder}/sharegpt.json", f"{folder}/mine.jsonl"]


@pytest.mark.slow
def test_every_format_of_prompts_is_loaded(server: Server, tmp_path: Path) -> None:
    for number, prompts in enumerate(data_sets(tmp_path)):
        directory = tmp_path / str(number)
        code, _, err = ended(started("bench", "--url", server.url, "--out", directory, *SMALLEST, "--prompts", prompts))
        assert code == 0, err
        (cell,) = loads(directory).values()
        assert (cell.requested, cell.completed, cell.output_tokens) == (2, 2, 8), prompts


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_whole_protocol_runs_on_the_cpu(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(
            json.dumps({"question": text, "answer": f"{a} + {b} = {a + b}.\n#### {a + b}"}) + "\n"
            for text, a, b in QUESTIONS
        )
    )
    directory = tmp_path / "run"
    command = ["validate", "tiny-cpu", "--out", directory, "--gsm8k", questions, "--tasks", "gsm8k,niah-900,niah-16384"]
    code, _, err = ended(started(*command, "--questions", "2"), 2900)
    assert code == 0, err
    run = run_of(directory)
    assert [skipped.what for skipped in run.skipped] == ["niah-16384"]
    assert written(directory) == {work.record for work in works_of(plan(run.protocol, 1024, ("niah-16384",)))}
    check_against_raw(directory)
    for cell in loads(directory).values():
        assert cell.failed == 0
        assert cell.requested == cell.completed
    for arm in ("fixed", "adaptive"):
        exact = Exactness.model_validate_json((directory / f"exactness/{arm}.json").read_bytes())
        assert exact.greedy_equal == exact.greedy_prompts == 16, exact.first_difference
        assert min(exact.p_values.values()) > 1e-4
        gsm8k = Accuracy.model_validate_json((directory / f"accuracy/{arm}-gsm8k.json").read_bytes())
        assert set(gsm8k.scores) == {"exact_match,strict-match", "exact_match,flexible-extract"}
        assert gsm8k.samples == 2
        needles = Accuracy.model_validate_json((directory / f"accuracy/{arm}-niah-900.json").read_bytes())
        assert set(needles.scores) == {"niah_single_1", "niah_multikey_2", "niah_multikey_3"}
        assert needles.samples == 6
    assert (directory / "report.md").exists()
    # Nothing is left to do: no server is started any more.
    code, _, err = ended(started(*command, "--questions", "2"))
    assert code == 0
    assert "waiting" not in err


@pytest.mark.slow
def test_fixed_has_servers_of_its_own_where_that_is_asked(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    arms = ["--arms", "fixed,adaptive", "--server-per-arm", "--no-exactness"]
    code, _, err = ended(started("validate", "tiny-cpu", "--out", directory, *arms, *SMALLEST))
    assert code == 0, err
    run = run_of(directory)
    assert written(directory) == planned(run.protocol)
    check_against_raw(directory)
    for arm in (Arm.FIXED, Arm.ADAPTIVE):
        start = Start.model_validate_json((directory / f"starts/round-1-{arm}.json").read_bytes())
        assert start.arms == (arm,)
        assert start.command[start.command.index("--verification") + 1] == arm
        drafts = loads(directory)[f"round-1-{arm}-c1"].drafts
        assert drafts is not None
        if arm is Arm.FIXED:
            assert drafts.proposed == drafts.verified
    report = (directory / "report.md").read_text()
    assert "| fixed |" in report
    assert "| adaptive |" in report


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_interrupted_at_ten_random_points_it_resumes_to_the_same_cells(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = ["validate", "tiny-cpu", "--out", directory, "--no-exactness", *SMALLEST, "--rounds", "2"]
    draws = random.Random(9)
    kept: dict[str, bytes] = {}
    for _ in range(10):
        process = started(*command)
        family: list[psutil.Process] = []
        deadline = time.monotonic() + draws.uniform(1, 120)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(draws.choice((signal.SIGINT, signal.SIGTERM)))
        code, _, err = ended(process)
        assert code in (0, 5, -signal.SIGTERM), err  # before there was anything to stop, as any command
        assert not left(family)
        now = {path.name: path.read_bytes() for path in (directory / "load").glob("*.json")}
        assert kept.items() <= now.items()  # what was measured is not measured again
        kept = now
    code, _, err = ended(started(*command), 2000)
    assert code == 0, err
    assert written(directory) == planned(run_of(directory).protocol)
