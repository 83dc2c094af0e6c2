"""The commands as they are mounted: what they print, their exit codes, and that no input makes a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.hardware import CPU, CUDA_HOPPER, Hardware
from serve.commands.preflight import preflight_command
from serve.commands.profiles import fit, profiles_command, profiles_show_command
from serve.errors import ExitCode, InputError
from serve.preflight.checks import TABLE
from serve.profile import Profile, Verification, bundled_names, load


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_embedded_profile_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight_command("tiny-cpu", as_json=True) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert [result["id"] for result in report["results"]] == [check.id for check in TABLE]


def test_a_profile_for_other_hardware_fails_with_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight_command("deepseek-v4-flash-h200x4") == ExitCode.BAD_INPUT == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("error    hardware: the profile is for cuda-hopper and this is cpu")
    assert "checks passed" in lines[-1]


def test_sets_words_skips_and_modes_reach_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    sets, words = ["pipeline_parallel_size=2"], ["--enable-lora"]
    assert preflight_command("tiny-cpu", sets, words) == ExitCode.BAD_INPUT
    out = capsys.readouterr().out
    assert "error    lora" in out
    assert "error    pipeline-parallel" in out
    assert preflight_command("tiny-cpu", sets, words, skip=["lora", "pipeline-parallel"]) == ExitCode.OK
    assert preflight_command("tiny-cpu", sets, words, verification=Verification.FIXED) == ExitCode.OK


def test_a_port_in_use_is_found() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert preflight_command("tiny-cpu", port=taken.getsockname()[1]) == ExitCode.BAD_INPUT


def test_preflight_imports_neither_torch_nor_vllm() -> None:
    """An import of either takes seconds, and torch's would hold a GPU context."""
    code = (
        "import sys; from serve.commands.preflight import preflight_command; preflight_command('tiny-cpu');"
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("hardware", "gpus", "runs"), [(CUDA_HOPPER, 4, True), (CUDA_HOPPER, 2, False), (CPU, 4, False)]
)
def test_a_profile_fits_its_hardware_with_enough_gpus(hardware: str, gpus: int, runs: bool) -> None:
    assert fit(load("deepseek-v4-flash-h200x4"), Hardware(hardware, ""), gpus).runs_here is runs


def test_the_list_marks_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert profiles_command(as_json=True) == 0
    rows = {row["name"]: row["runs_here"] for row in json.loads(capsys.readouterr().out)}
    assert rows == {name: name == "tiny-cpu" for name in bundled_names()}
    assert profiles_command() == 0
    assert "this machine: cpu" in capsys.readouterr().out


def test_show_prints_what_a_person_could_run(capsys: pytest.CaptureFixture[str]) -> None:
    profiles_show_command("deepseek-v4.1-flash-mi355x4", ["max_num_seqs=64"], ["--seed", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert "export VLLM_ROCM_MONO_DECODE=1" in lines
    command = next(line for line in lines if line.startswith("vllm serve "))
    assert "--max-num-seqs 64" in command
    assert command.endswith("--seed 3")
    assert any("FULL_AND_PIECEWISE, forced by adaptive verification" in line for line in lines)


def test_show_prints_the_environment_that_wins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ROCM_MONO_DECODE", "0")
    profiles_show_command("deepseek-v4.1-flash-mi355x4")
    assert "export VLLM_ROCM_MONO_DECODE=0" in capsys.readouterr().out


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FITTING: dict[str, st.SearchStrategy[Any]] = {
    "engine_args.max_num_seqs": st.integers(1, 1024),
    "engine_args.max_model_len": st.integers(1, 1 << 40) | st.sampled_from(["8k", "1M", "auto", -1]),
    "engine_args.tensor_parallel_size": st.integers(1, 64),
    "engine_args.data_parallel_size": st.integers(1, 64),
    "engine_args.pipeline_parallel_size": st.integers(1, 8),
    "engine_args.enforce_eager": st.booleans(),
    "engine_args.enable_lora": st.booleans(),
    "engine_args.kv_cache_dtype": st.sampled_from(["auto", "bfloat16", "fp8", ""]),
    "engine_args.kv_cache_memory_bytes": st.integers(1, 1 << 60),
    "engine_args.gpu_memory_utilization": st.floats(0.01, 1),
    "engine_args.worker_extension_cls": st.text(max_size=9),
    "engine_args.revision": st.text(max_size=9),
    "engine_args.compilation_config.cudagraph_mode": st.text(max_size=9) | st.just("PIECEWISE"),
    "engine_args.compilation_config.max_cudagraph_capture_size": st.integers(0, 1 << 20),
    "engine_args.attention_config.indexer_kv_dtype": st.sampled_from(["mxfp4", "fp8"]),
    "speculative_config.num_speculative_tokens": st.integers(1, 64),
    "speculative_config.model": st.text(max_size=9) | st.sampled_from(["a/b", "bundled:", "bundled:tiny/draft", "/"]),
    "speculative_config.method": st.text(max_size=9),
    "environment.VLLM_PLUGINS": st.text(max_size=9),
    "environment.VLLM_ROCM_MONO_DECODE": st.sampled_from(["0", "1", "true", "yes"]),
    "model": st.text(max_size=9) | st.sampled_from(["a/b", "a/b/c", "bundled:..", "/", "~", "x" * 300]),
    "hardware": st.sampled_from(["cpu", "cuda-hopper", "rocm-gfx950"]) | st.text(max_size=9),
    "gpus": st.integers(0, 9),
    "concurrency": st.integers(1, 999),
    "checkpoint_gib": st.floats(0.1, 1e6),
}
"""Values that fit, so that the change reaches the checks."""
KEYS = st.sampled_from(sorted(FITTING)) | st.sampled_from(sorted(Profile.model_fields)) | st.text(max_size=10)
CHANGES = st.sampled_from(sorted(FITTING)).flatmap(lambda key: st.tuples(st.just(key), FITTING[key])) | st.tuples(
    KEYS, ODD
)


def put(content: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The content with one value replaced or added, or taken away where it is None and was there."""
    changed: dict[str, Any] = json.loads(json.dumps(content))
    *parents, last = key.split(".") if key.split(".", maxsplit=1)[0] in changed else [key]
    target = changed
    for parent in parents:
        if not isinstance(target.get(parent), dict):
            target[parent] = {}
        target = target[parent]
    if value is None and last in target:
        del target[last]
    else:
        target[last] = value
    return changed


def as_word(key: str, value: Any) -> str:
    return f"--{key.removeprefix('engine_args.')}={value if isinstance(value, str) else json.dumps(value)}"


def as_set(key: str, value: Any) -> str:
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def outcome(command: Callable[[], int]) -> str:
    """`refused` with one line, or the name of the exit code; anything else is a traceback, and fails the test."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return ExitCode(command()).name
    except InputError as refusal:
        return "refused" if len(str(refusal).splitlines()) == 1 else f"not one line: {refusal}"


@pytest.mark.parametrize("name", bundled_names())
def test_no_mutation_of_a_profile_makes_a_traceback(name: str, tmp_path: Path) -> None:
    """A hundred changes, each to the file, by `--set` or by a word after `--`, with now and then a second one."""
    file = tmp_path / "mutated.yaml"
    original = load(name).model_dump()
    seen: Counter[str] = Counter()

    @settings(max_examples=100, derandomize=True, database=None)
    @given(
        changes=st.lists(st.tuples(st.sampled_from(["file", "set", "word"]), CHANGES), min_size=1, max_size=2),
        loose=st.lists(st.text(max_size=12), max_size=1) | st.just([]),
        mode=st.sampled_from(Verification),
        as_json=st.booleans(),
    )
    def mutate(changes: list[tuple[str, tuple[str, Any]]], loose: list[str], mode: Verification, as_json: bool) -> None:
        content, sets, extra = original, [], list(loose)
        for place, (key, value) in changes:
            if place == "file":
                content = put(content, key, value)
            elif place == "set":
                sets.append(as_set(key, value))
            else:
                extra.append(as_word(key, value))
        file.write_text(yaml.safe_dump(content))
        seen[outcome(lambda: preflight_command(str(file), sets, extra, verification=mode, as_json=as_json))] += 1
        seen[outcome(lambda: profiles_show_command(str(file), sets, extra, mode))] += 1

    mutate()
    assert set(seen) <= {"refused", ExitCode.OK.name, ExitCode.BAD_INPUT.name}
    # The changes that fit reach the checks; were all refused early, this test would show little.
    assert seen[ExitCode.BAD_INPUT.name] >= 10, seen
