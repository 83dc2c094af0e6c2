"""Bad input: one line that names the thing and the remedy, exit code 2, no traceback, nothing started."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from serve.errors import ExitCode
from tests.e2e.running import free_port

DSPARK = str(Path(sys.executable).with_name("dspark-serve"))


def complaint(*arguments: str, **environment: str) -> str:
    """Run a command that must be refused; returns its one line."""
    # A port of its own: another test that runs beside it may hold the usual one.
    environment = {**os.environ, "DSPARK_PORT": str(free_port()), **environment}
    done = subprocess.run(
        [DSPARK, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    # What preflight had to say before it is not a complaint.
    lines = [line for line in done.stderr.splitlines() if not line.startswith("INFO ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("dspark-serve: ")
    return lines[0]


def test_an_unknown_profile_names_the_known_ones() -> None:
    assert "no profile 'tiny-gpu': use one of" in complaint("up", "tiny-gpu")
    assert "tiny-cpu" in complaint("up", "tiny-gpu")


def test_a_missing_profile_file_is_named() -> None:
    assert "'/nowhere/mine.yaml', for there is no such file" in complaint("up", "/nowhere/mine.yaml")


@pytest.mark.parametrize(
    ("words", "about"),
    [
        (("up",), "Missing argument 'profile'; see dspark-serve up --help"),
        (("bench", "--bogus"), "see dspark-serve bench --help"),
        (("nonsense",), "No such command 'nonsense'; see dspark-serve --help"),
    ],
)
def test_a_wrong_command_line_says_where_the_right_ones_are(words: tuple[str, ...], about: str) -> None:
    assert about in complaint(*words)


def test_a_profile_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "device.yaml").symlink_to("/dev/zero")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("pipe", "device", "folder"):
        assert f"{name}.yaml is not a regular file" in complaint("up", str(tmp_path / f"{name}.yaml"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name: [", "is not YAML"),
        ("name: mine", "model: Field required"),
        ("- a\n- b", "is not valid"),
        ("", "is not valid"),
    ],
)
def test_a_broken_profile_says_what_is_broken(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert named in complaint("up", str(path))


def test_a_misspelt_key_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: a\ndescription: b\nhardware: cpu\nmodel: m\nsource: s\nspeculative_config: {}\nengine_arg: {}\n"
    )
    assert "engine_arg: Extra inputs are not permitted" in complaint("up", str(path))


def test_a_missing_model_directory_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/gone is no folder" in complaint("up", "tiny-cpu", "--set", f"model={tmp_path}/gone")


def test_too_little_memory_is_named_with_the_arithmetic() -> None:
    line = complaint("up", "tiny-cpu", "--set", f"kv_cache_memory_bytes={2**50}")
    assert "memory: " in line
    assert "GiB" in line


def test_everything_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [DSPARK, "up", "tiny-cpu", "--port", port, "--set", f"model={tmp_path}/gone"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert any(port in line for line in lines)
    assert any("gone" in line for line in lines)
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--port", "web", "--port"),
        ("--port", "0", "--port"),
        ("--port", "65536", "--port"),
        ("--verification", "sometimes", "adaptive"),
        ("--calibration", "maybe", "shadow"),
        ("--drain-seconds", "-1", "--drain-seconds"),
        ("--drain-seconds", "inf", "--drain-seconds"),
        ("--stall-seconds", "nan", "--stall-seconds"),
        ("--request-seconds", "inf", "--request-seconds"),
        ("--max-body-mib", "99999999999999999999", "--max-body-mib"),
        ("--prot", "1", "--prot"),
    ],
)
def test_a_wrong_value_is_named(option: str, value: str, named: str) -> None:
    assert named in complaint("up", "tiny-cpu", option, value)


def test_a_wrong_environment_value_is_named() -> None:
    assert "DSPARK_PORT" in complaint("up", "tiny-cpu", DSPARK_PORT="web")
    assert "DSPARK_CALIBRATION" in complaint("up", "tiny-cpu", DSPARK_CALIBRATION="maybe")


def test_the_profile_may_be_in_the_environment() -> None:
    assert "no profile 'tiny-gpu'" in complaint("up", DSPARK_PROFILE="tiny-gpu")
    assert "no profile 'named'" in complaint("up", "named", DSPARK_PROFILE="tiny-gpu")


@pytest.mark.parametrize("command", [("up",), ("preflight",), ("profiles", "show")])
def test_nothing_after_the_dashes_is_taken_for_the_profile(command: tuple[str, ...]) -> None:
    assert "profile" in complaint(*command, "--", "tiny-cpu")
    assert "no profile 'tiny-gpu'" in complaint(*command, "--", "tiny-cpu", DSPARK_PROFILE="tiny-gpu")


def test_what_follows_the_dashes_is_kept_with_the_profile_in_the_environment() -> None:
    environment = {**os.environ, "DSPARK_PROFILE": "tiny-cpu"}
    done = subprocess.run(
        [DSPARK, "profiles", "show", "--", "--max-num-seqs", "7"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert "--max-num-seqs 7" in done.stdout


def test_a_taken_port_is_named_with_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = complaint("up", "tiny-cpu", "--port", port)
    assert f"127.0.0.1:{port}" in line
    assert "--port" in line


def test_an_address_of_another_machine_is_refused() -> None:
    assert "192.0.2.1:8000" in complaint("up", "tiny-cpu", "--host", "192.0.2.1", "--port", "8000")


def test_a_server_option_after_the_dashes_names_where_it_goes() -> None:
    assert "--port cannot be given to vLLM here; give --port before the --" in complaint(
        "up", "tiny-cpu", "--", "--port", "9"
    )
    assert "--api-server-count" in complaint("up", "tiny-cpu", "--", "--api_server_count=2")


def test_a_server_option_is_refused_wherever_it_is_given() -> None:
    assert "--api-server-count" in complaint("up", "tiny-cpu", "--set", "api_server_count=3")
    assert "--ssl-keyfile" in complaint("up", "tiny-cpu", "--", "--ssl-keyfile", "/x")


def test_an_unknown_patch_to_switch_off_is_named() -> None:
    assert "'nope'" in complaint("up", "tiny-cpu", DSPARK_PATCHES_OFF="nope")
    assert "'nope'" in complaint("preflight", "tiny-cpu", DSPARK_PATCHES_OFF="nope")


def test_a_patch_that_may_not_be_switched_off_stops_the_start() -> None:
    switched_off = {"DSPARK_PATCHES_OFF": "adaptive-manager"}
    assert "adaptive-manager" in complaint("up", "tiny-cpu", **switched_off)
    assert "adaptive-manager" in complaint("up", "tiny-cpu", "--skip", "patches", **switched_off)


def test_development_mode_is_refused() -> None:
    assert "VLLM_SERVER_DEV_MODE" in complaint("up", "tiny-cpu", VLLM_SERVER_DEV_MODE="1")


def test_an_unwritable_counter_directory_is_named() -> None:
    assert "DSPARK_TELEMETRY_DIR" in complaint("up", "tiny-cpu", DSPARK_TELEMETRY_DIR="/proc/nope")


@pytest.mark.parametrize("path", ["/nowhere/trace.jsonl", "/"])
def test_a_trace_that_cannot_be_written_is_named(path: str) -> None:
    said = complaint("up", "tiny-cpu", DSPARK_TRACE_FILE=path)
    assert f"no trace can be written to {path}: " in said
    assert "DSPARK_TRACE_FILE" in said


def test_an_unknown_command_is_refused() -> None:
    assert "serv" in complaint("serv")


def test_the_exit_code_does_not_hang_on_the_output() -> None:
    """Which goes to a full disk."""
    code = "import sys; from serve.cli import leave; from serve.errors import ExitCode\n"
    code += "sys.stdout.write('lost'); leave(ExitCode.ENGINE_STALLED)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, timeout=60, env=environment, check=False)
    assert done.returncode == ExitCode.ENGINE_STALLED


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--rounds", "0"), "--rounds"),
        (("--temperature", "-1"), "--temperature"),
        (("--arms", "sometimes"), "--arms sometimes: use off, fixed and adaptive"),
        (("--prompts", "/nowhere/mine.jsonl"), "--prompts /nowhere/mine.jsonl cannot be read"),
        (("--gsm8k", "/nowhere/questions.jsonl"), "--gsm8k /nowhere/questions.jsonl cannot be read"),
        (("--set", "model=/nowhere"), "/nowhere is no folder"),
        (("--out", "/dev/null"), "--out /dev/null cannot be used"),
    ],
)
def test_a_validation_that_cannot_be_is_refused_before_it_begins(words: tuple[str, str], named: str) -> None:
    assert named in complaint("validate", "tiny-cpu", *words)
