"""Where keys come from."""

from pathlib import Path

import pytest

from serve.errors import InputError
from serve.keys import take_keys


def test_the_variables_and_the_file_are_taken_together_and_leave_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# rotated in May\nthree\n\n  four  \r\none\n")
    environment = {"DSPARK_API_KEY": "one", "VLLM_API_KEY": " two\n", "PATH": "/bin"}
    assert take_keys(environment, file) == ["one", "two", "three", "four"]
    assert environment == {"PATH": "/bin"}


def test_empty_variables_are_no_keys() -> None:
    assert take_keys({"DSPARK_API_KEY": "", "VLLM_API_KEY": ""}, None) == []


@pytest.mark.parametrize("blank", [" ", "\n", "\t \n"])
def test_a_blank_variable_does_not_open_the_server(blank: str) -> None:
    with pytest.raises(InputError, match="VLLM_API_KEY is blank"):
        take_keys({"VLLM_API_KEY": blank}, None)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# only a comment\n", b"\xff\xfe\n"])
def test_a_file_without_a_key_opens_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(InputError, match="keys"):
        take_keys({}, file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere cannot be read: No such file.*--api-key-file"):
        take_keys({}, tmp_path / "nowhere")


@pytest.mark.parametrize("key", ["schl\u00fcssel", "two words", "tab\tbed", "nul\x00"])
def test_a_key_that_no_header_carries_is_refused_without_being_shown(tmp_path: Path, key: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"good\n{key}\n")
    for take in (lambda: take_keys({"DSPARK_API_KEY": key}, None), lambda: take_keys({}, file)):
        with pytest.raises(InputError) as refused:
            take()
        assert key not in str(refused.value)
    assert "line 2" in str(refused.value)
