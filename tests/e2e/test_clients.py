"""Real clients against the real server: the official openai package, vLLM's own load generator, rude ones."""

import json
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.prompts import python_prompts
from tests.e2e.running import BIN, MODEL, Server

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            # Few values: a model this small would go on writing digits.
            "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [1, 2, 3]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["function", "class"]}, "lines": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "lines"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "def add(a, b):\n"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


def test_models_and_completions(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    whole = client.completions.create(model=MODEL, prompt="def add(a, b):\n", max_tokens=24, temperature=0)
    streamed = client.completions.create(
        model=MODEL, prompt="def add(a, b):\n", max_tokens=24, temperature=0, stream=True
    )
    assert "".join(part.choices[0].text for part in streamed) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


def test_chat_streaming_and_not(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=24, temperature=0)
    parts = list(
        client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole.choices[0].message.content
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 24


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_tools(client: openai.OpenAI, choice: object) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=400,
        temperature=0,
        # The grammar allows white space without end, and so does a model this small.
        frequency_penalty=1.0,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].function.name == "add"
    arguments = json.loads(calls[0].function.arguments)
    assert set(arguments) == {"a", "b"}


def test_structured_output(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=96,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}},
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert value["kind"] in ("function", "class")
    assert 0 <= value["lines"] <= 99


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="def add(a, b):\n", max_output_tokens=16, temperature=0)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 16


def test_messages_and_tokenize(server: Server) -> None:
    message = server.client.post("/v1/messages", json={"model": MODEL, "messages": ASK, "max_tokens": 8})
    assert message.status_code == 200
    assert message.json()["type"] == "message"
    ask_tokens = {"model": MODEL, "prompt": "import os\n", "add_special_tokens": False}
    tokens = server.client.post("/tokenize", json=ask_tokens).json()["tokens"]
    text = server.client.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json()["prompt"]
    assert text == "import os\n"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"[]", 400),
        ("/v1/completions", b'{"model": "tiny-cpu", "prompt": "x", "max_tokens": -1}', 400),
        ("/v1/completions", b'{"model": "tiny-cpu", "prompt": "x", "temperature": "hot"}', 400),
        ("/v1/completions", b'{"model": "other", "prompt": "x"}', 404),
        ("/v1/chat/completions", b'{"model": "tiny-cpu", "messages": []}', 400),
        ("/v1/chat/completions", b'{"model": "tiny-cpu"}', 400),
        ("/v1/nothing", b"{}", 404),
    ],
)
def test_a_malformed_request_gets_an_openai_error(server: Server, path: str, body: bytes, status: int) -> None:
    response = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    if path != "/v1/nothing":
        assert response.json()["error"]["message"]
    assert server.client.get("/readyz").status_code == 200


def test_vllm_bench_serve_fails_no_request(server: Server, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            str(BIN / "vllm"),
            "bench",
            "serve",
            "--backend=openai",
            f"--base-url={server.url}",
            "--endpoint=/v1/completions",
            f"--model={MODEL}",
            f"--tokenizer={Path(__file__).parents[2] / 'serve/tiny/target'}",
            "--dataset-name=random",
            "--random-input-len=24",
            "--random-output-len=16",
            "--num-prompts=24",
            "--max-concurrency=8",
            "--ignore-eos",
            "--save-result",
            f"--result-dir={tmp_path}",
            "--result-filename=result.json",
        ],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 24
    assert result["failed"] == 0
    assert result["total_output_tokens"] == 24 * 16


def test_clients_that_go_away_free_their_slots_and_leak_nothing(server: Server) -> None:
    """300 requests, streaming or not, that disconnect before, during or after the answer."""
    rng = random.Random(7)
    prompts = python_prompts()
    for prompt in prompts[:2]:
        server.complete(prompt)
    before = {process.pid: process.num_fds() for process in server.descendants()}

    def leave(_: int) -> None:
        body = {
            "model": MODEL,
            "prompt": rng.choice(prompts),
            "max_tokens": rng.choice([1, 8, 64, 400]),
            "stream": rng.random() < 0.5,
        }
        patience = rng.choice([0.0, 0.01, 0.05, 0.2, 0.8])
        try:
            with httpx.Client(base_url=server.url, timeout=httpx.Timeout(30, read=patience or 0.001)) as rude:
                rude.post("/v1/completions", json=body)
        except httpx.TimeoutException:
            pass

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(leave, range(290)))
    for _ in range(10):  # and ten that do not even finish their request
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        samples = server.samples()
        running = samples["vllm:num_requests_running", ""] + samples["vllm:num_requests_waiting", ""]
        under_way = server.client.get("/dspark/status").json()["requests_under_way"]
        after = {process.pid: process.num_fds() for process in server.descendants()}
        grown = {pid: after[pid] - before.get(pid, 0) for pid in after if after[pid] > before.get(pid, 0) + 2}
        if running == under_way == 0 and not grown:
            break
        time.sleep(0.5)
    assert running == 0
    assert under_way == 0
    assert grown == {}
    assert server.complete("def f(x):", max_tokens=4)["usage"]["completion_tokens"] == 4
