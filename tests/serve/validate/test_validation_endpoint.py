"""What a server that is not ours is asked, and the growth of counters of one that is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from failing_server import failing_server
from validation_samples import protocol

from serve.commands.bench import bench_command
from serve.errors import InputError
from serve.validate.drafts import acceptance_length
from serve.validate.endpoint import Endpoint, EndpointError, growth, key_in
from serve.validate.here import check_extra, modules_of, run_there, versions
from serve.validate.protocol import Options
from serve.validate.results import Arm, Drafts

FIRST = Drafts(proposed=50, verified=40, accepted=20, expected=21.5, steps=10, emitted=30, width=50)
NOTHING = Drafts(proposed=0, verified=0, accepted=0, expected=0, steps=0, emitted=0, width=0)
LATER = Drafts(proposed=150, verified=90, accepted=50, expected=50.5, steps=30, emitted=80, width=110)


@pytest.fixture(scope="module")
def foreign() -> Iterator[Endpoint]:
    """A server without modes, metrics, version and chat."""
    with failing_server() as url:
        yield Endpoint(url + "/")


def test_a_server_without_our_paths_has_no_mode_and_no_counters(foreign: Endpoint) -> None:
    assert foreign.model.name == foreign.model.root == "failing"
    assert foreign.mode() is None
    assert not foreign.switches()
    assert foreign.likely_arm() is Arm.OFF
    assert foreign.drafts() == NOTHING
    assert foreign.version() == {}
    assert not foreign.chats()
    assert not foreign.ready()


def test_a_model_that_it_does_not_have_is_named(foreign: Endpoint) -> None:
    with pytest.raises(EndpointError, match="has no model 'other': it has failing"):
        _ = Endpoint(foreign.url, model="other").model


def test_bench_says_which_models_there_are_and_blames_no_key(foreign: Endpoint, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        bench_command(foreign.url, "other", None, Options(), out=tmp_path / "run")
    assert str(error.value) == f"--model: {foreign.url} has no model 'other': it has failing"
    with pytest.raises(InputError, match="is the server ready, and is its key in DSPARK_API_KEY"):
        bench_command("http://127.0.0.1:9", None, None, Options(), out=tmp_path / "run")


def test_a_mode_that_it_cannot_have_is_an_error(foreign: Endpoint) -> None:
    with pytest.raises(EndpointError, match=r"PUT http://.*/dspark/mode was answered 501"):
        foreign.switch(Arm.FIXED)


def test_nobody_there_is_an_error_that_names_the_address() -> None:
    with pytest.raises(EndpointError, match=r"GET http://127\.0\.0\.1:9/v1/models: "):
        _ = Endpoint("http://127.0.0.1:9").model


def test_counters_grow_from_where_they_were() -> None:
    grown = growth(FIRST, LATER)
    assert grown == Drafts(proposed=100, verified=50, accepted=30, expected=29, steps=20, emitted=50, width=60)
    assert acceptance_length(grown) == 2.5
    assert growth(NOTHING, FIRST) == FIRST
    assert growth(FIRST, FIRST) is None
    assert growth(FIRST, None) is None
    assert growth(None, FIRST) is None, "the server's whole history is no cell's"
    assert growth(LATER, FIRST) is None, "a server that was started anew"
    fallen = LATER.model_copy(update={"expected": 1.0})
    assert growth(FIRST, fallen) is None
    assert acceptance_length(None) is None


COUNTED = "".join(
    f'{name}{{engine="0"}} {value}\n{name}{{engine="1"}} 1\n'
    for name, value in [
        ("dspark_proposed_draft_tokens_total", 49),
        ("dspark_verified_draft_tokens_total", 39),
        ("dspark_accepted_draft_tokens_total", 19),
        ("dspark_expected_accepted_draft_tokens_total", 20.5),
        ("dspark_acceptance_length_count", 9),
        ("dspark_acceptance_length_sum", 29),
        ("dspark_verified_length_sum", 49),
    ]
)


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([(200, COUNTED)], FIRST),
        ([(503, ""), (500, ""), (200, COUNTED)], FIRST),
        ([(503, "")] * 3, None),
        ([(404, "")], NOTHING),
        ([(401, "")], NOTHING),
        ([(200, "<html>")], NOTHING),
        ([(200, "other_total 1\n")], NOTHING),
    ],
)
def test_no_answer_is_not_no_series(
    answers: list[tuple[int, str]], found: Drafts | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a real server, that answers in turn as it is told."""
    monkeypatch.setattr("serve.validate.endpoint.RETRY_SECONDS", 0)
    left = iter(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = next(left)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert Endpoint(f"http://127.0.0.1:{server.server_port}").drafts() == found
        server.shutdown()
    assert not list(left)


def test_nobody_there_says_nothing_of_drafts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("serve.validate.endpoint.RETRY_SECONDS", 0)
    assert Endpoint("http://127.0.0.1:9").drafts() is None
    assert "the drafts of what is measured now are not counted: GET http://127.0.0.1:9/metrics" in caplog.text


def test_the_first_variable_with_a_key_counts() -> None:
    assert key_in({"VLLM_API_KEY": "b", "DSPARK_API_KEY": " a "}) == "a"
    assert key_in({"VLLM_API_KEY": "b", "DSPARK_API_KEY": " "}) == "b"
    assert key_in({}) is None


def test_a_server_elsewhere_gets_no_key_of_vllms() -> None:
    assert key_in({"VLLM_API_KEY": "b"}, ("DSPARK_API_KEY",)) is None
    assert key_in({"VLLM_API_KEY": "b", "DSPARK_API_KEY": "a"}, ("DSPARK_API_KEY",)) == "a"


def test_a_run_says_what_the_server_is_and_what_it_does_not_say() -> None:
    ours = {"version": "0.32.0", "dspark_serve": {"version": "9", "hardware": "cpu", "patchset": "a", "patches": ["p"]}}
    run = run_there(["bench"], protocol(), ours)
    assert run.versions == {**versions(), "server: vllm": "0.32.0", "server: dspark-serve": "9"}
    assert (run.hardware, run.patch_set, run.patches) == ("cpu", "a", {"p": "applied"})
    other = run_there(["bench"], protocol(), {"version": 3, "dspark_serve": "x"})
    assert (other.hardware, other.patch_set, other.patches) == ("unknown", "unknown", {})


def test_a_missing_extra_is_named() -> None:
    check_extra(("scipy",))
    with pytest.raises(InputError, match=r"^no_such_module not installed: pip install '\.\[validate\]' in .* source"):
        check_extra(("scipy", "no_such_module"))


def test_only_what_the_chosen_parts_need_is_asked_for() -> None:
    sweep = {"vllm", "pandas", "matplotlib", "scipy"}
    assert set(modules_of(protocol(tasks=()))) == sweep
    assert set(modules_of(protocol(tasks=(), prompts="sharegpt:/a.json"))) == sweep - {"pandas"}
    assert set(modules_of(protocol(tasks=("gsm8k",)))) == sweep | {"lm_eval", "datasets"}
    needles = {"lm_eval", "datasets", "nltk", "wonderwords"}
    assert set(modules_of(protocol(tasks=("niah-4096",)))) == sweep | needles
    for name in sweep | needles:
        check_extra((name,))
