"""No secret that a run was given is in its records or its report, and the same command still goes on."""

from __future__ import annotations

from pathlib import Path

import made_up_run
import pytest

from serve.errors import InputError
from serve.validate.report import write_report
from serve.validate.results import Protocol, Run, Start, withheld, withheld_words
from serve.validate.store import opened

SECRET = "hf_shown_to_nobody"
SETS = (f"environment.HF_TOKEN={SECRET}", "max_num_batched_tokens=8192")
EXTRA = ("--hf-token", SECRET, "--api-key", SECRET, f"{SECRET}-2", "--tokenizer", "mine", f"--hf_token={SECRET}")
COMMAND = ("dspark-serve", "validate", "p", "--set", SETS[0], "--", *EXTRA)


def asked(extra: tuple[str, ...] = EXTRA, sets: tuple[str, ...] = SETS) -> Protocol:
    return made_up_run.protocol().model_copy(update={"sets": sets, "extra": extra})


def begun(protocol: Protocol) -> Run:
    return Run(**{**dict(made_up_run.run(protocol)), "command": COMMAND})


def test_no_file_of_a_run_holds_a_secret(tmp_path: Path) -> None:
    run = tmp_path / "run"
    records = made_up_run.records(asked())
    with opened(run, begun(asked())) as store:
        for start in records.starts:
            own = {
                **dict(start),
                "command": COMMAND,
                "environment": {"HF_TOKEN": SECRET, "TOKENIZERS_PARALLELISM": "0"},
            }
            store.write(f"starts/round-{start.round}-{start.arms[0]}", Start(**own))
        for load in records.loads:
            command = (*load.command, f"--header=api-key: {SECRET}")
            name = f"load/round-{load.round}-{load.arm}-c{load.concurrency}"
            store.write(name, type(load)(**{**dict(load), "command": command}))
    write_report(run)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"run.json", "report.json", "report.md", "round-1-off.json"} <= {path.name for path in files}
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    text = (run / "report.md").read_text()
    assert "--hf-token '(withheld)'" in text
    assert "--tokenizer mine" in text
    assert "max_num_batched_tokens=8192" in text
    assert "TOKENIZERS_PARALLELISM=0" in text


def test_what_runs_is_not_withheld() -> None:
    protocol = asked()
    begun(protocol)
    assert (protocol.sets, protocol.extra) == (SETS, EXTRA)


def test_the_same_command_goes_on_and_another_setting_does_not(tmp_path: Path) -> None:
    for _ in range(2):
        with opened(tmp_path, begun(asked())):
            pass
    for other in (asked(sets=(SETS[0], "max_num_batched_tokens=4096")), asked(sets=()), asked(extra=EXTRA[:-1])):
        with pytest.raises(InputError, match="holds a run with"), opened(tmp_path, begun(other)):
            pass


def test_a_run_that_was_written_in_clear_goes_on_and_is_withheld(tmp_path: Path) -> None:
    with opened(tmp_path, begun(asked())):
        pass
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace("HF_TOKEN=(withheld)", f"HF_TOKEN={SECRET}"))
    with opened(tmp_path, begun(asked())):
        pass
    assert SECRET not in path.read_text()


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("environment.HF_TOKEN=a b", "environment.HF_TOKEN=(withheld)"),
        ("--api-key=a", "--api-key=(withheld)"),
        ("--set=environment.AWS_SECRET_ACCESS_KEY=a", "--set=environment.AWS_SECRET_ACCESS_KEY=(withheld)"),
        ('{"api_key": "a b", "n": 1}', '{"api_key": (withheld), "n": 1}'),
        ("x={password: a, tokenizer: b}", "x={password: (withheld), tokenizer: b}"),
        ("--max-num-batched-tokens=8192", "--max-num-batched-tokens=8192"),
        (
            "model=a,tokenizer_backend=none,tokenized_requests=False",
            "model=a,tokenizer_backend=none,tokenized_requests=False",
        ),
        ('{"cache_salt": "a"}', '{"cache_salt": "a"}'),
    ],
)
def test_a_word_is_withheld_after_the_name_of_a_secret_alone(word: str, written: str) -> None:
    assert withheld_words([word]) == (written,)


def test_an_option_takes_the_words_up_to_the_next() -> None:
    assert withheld_words(["--api-key", "a", "b", "--seed", "3"]) == (
        *("--api-key", "(withheld)", "(withheld)"),
        *("--seed", "3"),
    )


def test_variables_are_judged_by_the_same_names() -> None:
    given = {"GOOGLE_APPLICATION_CREDENTIALS": "a", "apikey": "b", "PASSWORDS": "c", "VLLM_MAX_TOKENS": "4"}
    assert withheld(given) == {**dict.fromkeys(list(given)[:3], "(withheld)"), "VLLM_MAX_TOKENS": "4"}
