"""Small files of a checkpoint, from a folder, from the cache and from a hub that answers in every way it can."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import failed, judge, made_up_facts, made_up_plan

from serve.preflight.checkpoint import Checkpoint, read_checkpoint, read_checkpoints
from serve.profile import resolve_model

CONFIG = {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5}
INDEX = {"metadata": {"total_size": 7_000_000}, "weight_map": {"mtp.0.confidence_head.weight": "a.safetensors"}}


class Hub(ThreadingHTTPServer):
    """Answers `/NAME/resolve/REVISION/FILE` from `files`; everything else with `refusal`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files: dict[str, bytes] = {}
        self.refusal: tuple[int, dict[str, str]] = (404, {})
        self.asked: list[tuple[str, str | None]] = []

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_address[1]}"}


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("authorization")))
        body = self.server.files.get(self.path)
        status, headers = (200, {}) if body is not None else self.server.refusal
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body or b""))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_bundled_pair_is_read_from_its_folders() -> None:
    target = read_checkpoint(resolve_model("bundled:tiny/target"), None, {})
    assert (target.architecture, target.problem, target.confidence_head) == ("Qwen3ForCausalLM", "", False)
    draft = read_checkpoint(resolve_model("bundled:tiny/draft"), None, {})
    assert (draft.architecture, draft.number("block_size"), draft.confidence_head) == ("Qwen3DSparkModel", 5, True)
    assert draft.weight_bytes == Path(resolve_model("bundled:tiny/draft"), "model.safetensors").stat().st_size


def test_an_index_in_a_folder_names_its_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    assert read_checkpoint(str(tmp_path), None, {}).confidence_head is True


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff\xff\xff\xff\xff\xff{", struct.pack("<Q", 2) + b"[]"])
def test_broken_weights_are_no_failure(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(content)
    found = read_checkpoint(str(tmp_path), None, {})
    assert (found.config, found.confidence_head) == (CONFIG, None)


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), ("{", "no JSON object"), ("[1]", "holds a list")]
)
def test_a_folder_without_a_config_says_so(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    found = read_checkpoint(str(tmp_path), None, {})
    assert found.config is None
    assert says in found.problem


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "a/b/c", "a b", "", "-x", "a--b/c", "x" * 200, "a\0b"])
def test_a_name_that_is_nothing_says_so(hub: Hub, name: str) -> None:
    found = read_checkpoint(name, None, hub.environment)
    assert found.config is None
    assert found.problem
    assert hub.asked == []


def test_config_and_index_come_from_the_hub_with_the_token(hub: Hub) -> None:
    hub.files = {
        "/deepseek-ai/m/resolve/v1/config.json": json.dumps(CONFIG).encode(),
        "/deepseek-ai/m/resolve/v1/model.safetensors.index.json": json.dumps(INDEX).encode(),
    }
    found = read_checkpoint("deepseek-ai/m", "v1", hub.environment | {"HF_TOKEN": "secret"})
    assert found == Checkpoint("deepseek-ai/m", CONFIG, weight_bytes=7_000_000, confidence_head=True)
    assert [path for path, _ in hub.asked] == list(hub.files)
    assert {token for _, token in hub.asked} == {"Bearer secret"}


def test_a_missing_index_leaves_sizes_unknown(hub: Hub) -> None:
    hub.files = {"/a/m/resolve/main/config.json": json.dumps(CONFIG).encode()}
    found = read_checkpoint("a/m", None, hub.environment)
    assert (found.config, found.weight_bytes, found.confidence_head) == (CONFIG, None, None)


@pytest.mark.parametrize(
    ("status", "headers", "gated", "says"),
    [
        (401, {"x-error-code": "GatedRepo"}, True, "is gated"),
        (403, {"x-error-code": "GatedRepo"}, True, "is gated"),
        (401, {"x-error-code": "RepoNotFound"}, False, "does not exist or is private"),
        (404, {"x-error-code": "RevisionNotFound"}, False, "at revision v9"),
        (500, {}, False, "HTTP 500"),
        (302, {"location": "http://127.0.0.1:1/"}, False, "cannot be reached"),
    ],
)
def test_every_refusal_of_the_hub_is_told(
    hub: Hub, status: int, headers: dict[str, str], gated: bool, says: str
) -> None:
    hub.refusal = (status, headers)
    found = read_checkpoint("a/m", "v9", hub.environment)
    assert found.config is None
    assert found.gated is gated
    assert says in found.problem


def test_offline_asks_nobody(hub: Hub) -> None:
    found = read_checkpoint("a/m", None, hub.environment | {"HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE" in found.problem
    assert hub.asked == []


@pytest.mark.usefixtures("hub")
def test_a_hub_that_is_not_there_is_told() -> None:
    found = read_checkpoint("a/m", None, {"HF_ENDPOINT": "http://127.0.0.1:1"})
    assert "cannot be reached" in found.problem


def test_a_cached_file_is_read_without_a_request(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    cache = tmp_path / "cache"
    commit = "0123456789" * 4
    snapshot = cache / "models--a--m" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (cache / "models--a--m" / "refs").mkdir()
    (cache / "models--a--m" / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    found = read_checkpoint("a/m", None, hub.environment | {"HF_HUB_OFFLINE": "1"})
    assert found.config == CONFIG
    assert hub.asked == []


def test_several_are_read_at_once(hub: Hub) -> None:
    names = [("a/m", None), ("a/n", None), ("a/m", None)]
    found = read_checkpoints(names, hub.environment)
    assert set(found) == {("a/m", None), ("a/n", None)}
    assert len(hub.asked) == 2


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def hang(*_: object) -> Checkpoint:
        never.wait()
        return Checkpoint("late")

    monkeypatch.setattr("serve.preflight.checkpoint.read_checkpoint", hang)
    monkeypatch.setattr("serve.preflight.checkpoint._ALL_SECONDS", 0.01)
    found = read_checkpoints([("a/m", None)], {})
    assert "did not answer" in found["a/m", None].problem
    never.set()


@pytest.mark.parametrize("config", [{}, {"architectures": "X"}, {"architectures": [1]}, {"architectures": []}])
def test_a_config_without_an_architecture_has_none(config: dict[str, Any]) -> None:
    assert Checkpoint("m", config).architecture == ""


def test_a_nested_text_config_is_read_through() -> None:
    config = {"architectures": ["V"], "text_config": {"dspark_block_size": 5}, "n": True, "z": 0}
    found = Checkpoint("m", config)
    assert found.number("block_size", "dspark_block_size") == 5
    assert found.number("n", "z") is None


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
KEYS = [
    "architectures", "text_config", "block_size", "dspark_block_size", "compress_ratios", "enable_confidence_head",
    "num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings",
]  # fmt: skip


@settings(max_examples=200, derandomize=True, database=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), ODD, min_size=1), name=st.sampled_from(["target", "draft"]))
def test_no_config_makes_a_traceback(changes: dict[str, Any], name: str) -> None:
    planned = made_up_plan("qwen3-8b-dspark-h200", ["max_model_len=auto"])
    facts = made_up_facts(planned)
    changed = replace(getattr(facts, name), config={**(getattr(facts, name).config or {}), **changes})
    report = judge(planned, replace(facts, **{name: changed}))
    assert set(failed(report)) <= {"architecture", "draft-block", "confidence-head", "memory"}
    assert report.lines()


@settings(max_examples=100, derandomize=True, database=None)
@given(index=ODD | st.fixed_dictionaries({"weight_map": ODD, "metadata": ODD}))
def test_no_index_makes_a_traceback(index: Any) -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))
        found = read_checkpoint(folder, None, {})
    assert found.config == CONFIG
    assert found.confidence_head in (None, False)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": 1, "metadata": []}, {"weight_map": {}, "metadata": {"total_size": "x"}}]
)
def test_an_odd_index_of_the_hub_leaves_the_size_unknown(hub: Hub, index: dict[str, Any]) -> None:
    hub.files = {
        "/a/m/resolve/main/config.json": json.dumps(CONFIG).encode(),
        "/a/m/resolve/main/model.safetensors.index.json": json.dumps(index).encode(),
    }
    found = read_checkpoint("a/m", None, hub.environment)
    assert (found.config, found.weight_bytes) == (CONFIG, None)
