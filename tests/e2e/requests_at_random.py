"""Requests as nobody should send them, made by hypothesis from valid ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.e2e.running import MODEL

ASK = [{"role": "user", "content": "def add(a, b):\n"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "def f(x):", "max_tokens": 2},
    "/v1/chat/completions": {"model": MODEL, "messages": ASK, "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": "x", "max_output_tokens": 2},
    "/v1/messages": {"model": MODEL, "messages": ASK, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": ASK},
    "/tokenize": {"model": MODEL, "prompt": "import os"},
    "/detokenize": {"model": MODEL, "tokens": [1, 2, 3]},
    "/invocations": {"model": MODEL, "prompt": "x", "max_tokens": 2},
    "/dspark/mode": {"mode": "fixed"},
}
FIELDS = [
    *("model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "n", "best_of", "seed", "stop", "stop_token_ids", "stream"),
    *("stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "echo", "suffix", "user"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "tools", "tool_choice", "parallel_tool_calls"),
    *("response_format", "ignore_eos", "bad_words", "allowed_token_ids", "truncate_prompt_tokens", "priority"),
    *("add_special_tokens", "chat_template", "chat_template_kwargs", "documents", "system", "thinking", "metadata"),
    *("prompt_embeds", "cache_salt", "request_id", "kv_transfer_params", "vllm_xargs", "mode", "tokens", "reasoning"),
]
OTHER_PATHS = [
    *("/livez", "/readyz", "/metrics", "/dspark", "/dspark/", "/dspark/status", "/dspark/openapi.json", "/dspark/x"),
    *(
        "/v1/models",
        "/v1/models/x",
        "/health",
        "/version",
        "/load",
        "/ping",
        "/docs",
        "/openapi.json",
        "/v1/embeddings",
    ),
    *("/v1/responses/x", "/v1/responses/x/cancel", "/generative_scoring", "/v1/systemone", "/kv_event_sources", "//"),
]
METHODS = ["POST", "GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30, 1e308, -0.0, 1e-300]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["", MODEL, "auto", "none", "required", "json_object", "\x00", "\ud800", "x" * 3000, "</s>"]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
mutations = st.lists(st.tuples(st.sampled_from(FIELDS), st.just(None) | anything, st.booleans()), max_size=3)
header_values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30).map(str.strip)
headers = st.dictionaries(
    st.sampled_from(
        [
            *("content-type", "accept", "accept-encoding", "content-encoding", "origin", "x-request-id", "cookie"),
            *("x-session-id", "traceparent", "if-none-match", "range", "x-forwarded-for", "user-agent", "referer"),
        ]
    ),
    header_values | st.sampled_from(["application/json", "text/plain", "multipart/form-data", "gzip", "*/*"]),
    max_size=3,
)


@dataclass(frozen=True)
class Fuzzed:
    """One request."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]


@st.composite
def requests(draw: st.DrawFn) -> Fuzzed:
    """Mostly a valid body with a few fields changed, sometimes cut, sometimes bytes, sometimes another path."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        body = draw(st.binary(max_size=60))
        return Fuzzed(draw(st.sampled_from(METHODS)), draw(st.sampled_from(OTHER_PATHS)), body, draw(headers))
    path = draw(st.sampled_from(list(VALID)))
    fields = dict(VALID[path])
    for name, value, drop in draw(mutations):
        if drop:
            fields.pop(name, None)
        else:
            fields[name] = value
    body = json.dumps(fields).encode("utf-8", "surrogatepass")
    if kind == 1:
        body = body[: draw(st.integers(0, len(body)))]
    elif kind == 2:
        body = draw(st.binary(max_size=60) | st.sampled_from([b"[" * 2000, b'{"a":' * 2000, b"null", b"1", b'"x"']))
    usual = "PUT" if path == "/dspark/mode" else "POST"
    method = draw(st.sampled_from(METHODS)) if kind == 3 else usual
    return Fuzzed(method, path, body, {"content-type": "application/json", **draw(headers)})
