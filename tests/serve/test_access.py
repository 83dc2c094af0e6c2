"""Keys as vLLM takes them, and origins as browsers send them."""

import argparse

import pytest
from fastapi import Request

from serve.access import Access, keys_of, same_origin
from serve.api_errors import ApiError


def request(**headers: str) -> Request:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Request({"type": "http", "method": "PUT", "path": "/", "headers": raw})


WORDS = [
    [],
    ["--api-key", "one"],
    ["--api-key", "one", "two", "--max-num-seqs", "4"],
    ["--api_key=one"],
    ["--api-key", "one", "--api-key", "two"],
    ["--api-key", ""],
    ["--api-key", "", "two"],
    ["--api-key", "1e3"],
    ["--api-key", "true"],
    ["--max-num-seqs", "4", "--speculative-config", '{"--api-key": "no"}'],
]


@pytest.fixture(scope="module")
def vllms_keys():
    """Which keys vLLM itself asks for: its parser, then what `register_middlewares` does."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())

    def keys(words: list[str], variable: str | None) -> list[str]:
        return [key for key in (parser.parse_args(words).api_key or [variable]) if key]

    return keys


@pytest.mark.parametrize("variable", [None, "", "from-the-environment"])
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_the_keys_are_vllms(vllms_keys, words: list[str], variable: str | None) -> None:
    environment = {} if variable is None else {"VLLM_API_KEY": variable}
    assert keys_of(["model", *words], environment) == vllms_keys(["model", *words], variable)


def test_an_option_without_a_key_takes_the_variables() -> None:
    """vLLM's parser refuses it later; until then nothing is open."""
    assert keys_of(["model", "--api-key"], {"VLLM_API_KEY": "k"}) == ["k"]
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        argparse.ArgumentParser(exit_on_error=False).parse_args(["--api-key"])


@pytest.mark.parametrize("header", ["Bearer one", "bearer two", "BEARER two"])
def test_any_of_the_keys_passes(header: str) -> None:
    Access(["one", "two"])(request(authorization=header))


@pytest.mark.parametrize("header", [None, "", "one", "Bearer", "Bearer ", "Bearer three", "Basic one", "Bearer one "])
def test_anything_else_does_not(header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    with pytest.raises(ApiError) as refused:
        Access(["one", "two"])(request(**headers))
    assert refused.value.status == 401
    assert refused.value.headers == {"WWW-Authenticate": "Bearer"}


def test_without_keys_nobody_is_asked() -> None:
    Access([])(request())
    Access([])(request(authorization="Bearer anything"))


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, "server:8000"),
        ("http://server:8000", "server:8000"),
        ("https://server:8000", "server:8000"),
        ("http://SERVER", "server"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_no_origin_and_our_own_pass(origin: str | None, host: str) -> None:
    same_origin(request(host=host, **({} if origin is None else {"origin": origin})))


@pytest.mark.parametrize(
    "origin",
    ["null", "", "http://other:8000", "http://server", "http://server:80", "http://server:8000.evil", "http://[", "x"],
)
@pytest.mark.parametrize("host", ["server:8000", ""])
def test_every_other_origin_is_refused(origin: str, host: str) -> None:
    with pytest.raises(ApiError) as refused:
        same_origin(request(host=host, origin=origin))
    assert refused.value.status == 403
