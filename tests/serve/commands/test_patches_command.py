import json

import pytest

from patches.ledger import LEDGER, RELEASES
from serve.commands.patches import patches_command
from serve.errors import ExitCode, InputError


def rows(capsys) -> dict[str, dict]:
    return {row["id"]: row for row in json.loads(capsys.readouterr().out)["patches"]}


def test_this_machine(capsys):
    assert patches_command(None, None, check=True, as_json=False) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("vLLM 0.32.0 on cpu: ")
    for patch in LEDGER:
        assert any(line.startswith(f"{patch.id}: ") for line in lines)
        assert f"  what      {patch.what}" in lines
        assert f"  upstream  {patch.upstream}" in lines


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("hardware", ["cuda-hopper", "rocm-gfx950", "cpu"])
def test_another_machine_needs_neither_its_vllm_nor_its_hardware(release, hardware, capsys):
    assert patches_command(release, hardware, check=True, as_json=True) == ExitCode.OK
    shown = rows(capsys)
    for patch in LEDGER:
        if hardware not in patch.hardware:
            expected = "not for this hardware"
        else:
            expected = "applied" if release in patch.releases else "not needed"
        assert shown[patch.id]["status"] == expected


def test_what_is_not_needed_says_who_needs_it(capsys):
    patches_command("0.33.0", "cpu", check=False, as_json=True)
    row = rows(capsys)["cpu-engine"]
    assert (row["status"], row["reason"]) == ("not needed", "needed by vLLM 0.32.0 only")


def test_check_fails_on_a_refused_patch_and_says_why(capsys, monkeypatch):
    monkeypatch.setenv("DSPARK_PATCHES_OFF", "tp-consensus")
    assert patches_command(None, None, check=False, as_json=True) == ExitCode.OK
    row = rows(capsys)["tp-consensus"]
    assert row["status"] == "refused"
    assert "cannot be switched off" in row["reason"]
    assert capsys.readouterr().err == ""
    assert patches_command(None, None, check=True, as_json=False) == ExitCode.START_FAILED
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("dspark-serve: the patch tp-consensus is refused: DSPARK_PATCHES_OFF names it")


@pytest.mark.parametrize(
    ("vllm", "hardware", "switched_off", "message"),
    [
        ("0.27.1", None, "", "vLLM 0.27.1 was not validated: use one of 0.28.0, "),
        (None, "cuda-sm100", "", "no hardware 'cuda-sm100': use one of cuda-hopper, "),
        (None, None, "telemetry", "DSPARK_PATCHES_OFF names 'telemetry', which is no patch: use "),
    ],
)
def test_bad_input_is_one_clear_line(vllm, hardware, switched_off, message, monkeypatch):
    monkeypatch.setenv("DSPARK_PATCHES_OFF", switched_off)
    with pytest.raises(InputError) as raised:
        patches_command(vllm, hardware, check=False, as_json=False)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
