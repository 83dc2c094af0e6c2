"""What is asked of an OpenAI server over HTTP: its model, its mode, its counters, and single completions."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serve.keys import KEY_VARIABLES
from serve.validate.results import Arm, Drafts
from serve.validate.stopping import unless_stopped

logger = logging.getLogger("dspark-serve")

TIMEOUT_SECONDS = 600
"""A request may wait for many others and for kernels that are compiled at first use."""
PUT_BACK_SECONDS = 60
"""A run that ends waits no longer for the mode. Switches asked for before come first, each takes 30 s at most."""

_SERIES = {
    "proposed": "dspark_proposed_draft_tokens_total",
    "verified": "dspark_verified_draft_tokens_total",
    "accepted": "dspark_accepted_draft_tokens_total",
    "expected": "dspark_expected_accepted_draft_tokens_total",
    "steps": "dspark_acceptance_length_count",
    "emitted": "dspark_acceptance_length_sum",
    "width": "dspark_verified_length_sum",
}
_SPECULATING = "vllm:spec_decode_num_drafts_total"
"""vLLM's own series, there where it speculates."""


_NO_SUCH_PATH = (
    httpx.codes.UNAUTHORIZED,
    httpx.codes.FORBIDDEN,
    httpx.codes.NOT_FOUND,
    httpx.codes.METHOD_NOT_ALLOWED,
    httpx.codes.NOT_IMPLEMENTED,
)
READINGS = 3
"""Of `/metrics`, until one is answered."""
RETRY_SECONDS = 1.0


class EndpointError(Exception):
    """A server did not answer as it should; the message is one line."""


class NoSuchModelError(EndpointError):
    """The server serves no model of that name."""


@dataclass(frozen=True)
class Model:
    """What `/v1/models` says of the first model, or of the named one.

    Attributes:
        name: What requests call it.
        root: The checkpoint that it was loaded from, where the server says so.
    """

    name: str
    root: str


def key_in(environment: Mapping[str, str], variables: Sequence[str] = KEY_VARIABLES) -> str | None:
    """The key that servers are asked with, from the environment alone.

    Args:
        environment: May hold one.
        variables: Where it is looked for, first to last: by default where servers that are started here look.
    """
    return next((value for name in variables if (value := environment.get(name, "").strip())), None)


class Endpoint:
    """A server at a URL. Threads may share one. Whatever asks it raises `StoppedError` when the run is told to stop."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            base_url=self.url,
            timeout=TIMEOUT_SECONDS,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        self._wanted = model
        self._model: Model | None = None

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def ready(self) -> bool:
        """Whether the model answers."""
        try:
            return self._client.get("/readyz", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    @property
    def model(self) -> Model:
        """The served model.

        Raises:
            NoSuchModelError: the server has none of that name.
            EndpointError: it does not answer.
        """
        if self._model is None:
            cards = self._json("GET", "/v1/models").get("data", [])
            card = next((c for c in cards if self._wanted in (None, c.get("id"))), None)
            if card is None:
                names = ", ".join(str(c.get("id")) for c in cards) or "none"
                raise NoSuchModelError(f"{self.url} has no model '{self._wanted}': it has {names}")
            self._model = Model(card["id"], card.get("root") or card["id"])
        return self._model

    def chats(self) -> bool:
        """Whether the model takes chat requests, as one with a chat template does."""
        body = {"model": self.model.name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        return self._send("POST", "/v1/chat/completions", json=body).status_code == httpx.codes.OK

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one completion.

        Raises:
            EndpointError: anything but an answer.
        """
        return self._json("POST", "/v1/completions", json={"model": self.model.name, **body})

    def mode(self) -> Arm | None:
        """The verification mode in force; None where the server knows no modes."""
        mode = self._facts("/dspark/mode").get("mode")
        return next((arm for arm in Arm if arm.value == mode), None)

    def switches(self) -> bool:
        """Whether the mode can be set while the server runs."""
        return self._facts("/dspark/mode").get("switchable") is True

    def switch(self, mode: Arm) -> None:
        """Set the verification mode, once every engine has confirmed it.

        Raises:
            EndpointError: the server does not switch.
        """
        if self.mode() is not mode:
            self._json("PUT", "/dspark/mode", json={"mode": mode.value})

    def put_back(self, mode: Arm) -> None:
        """Set the verification mode, also when the run was told to stop and left a switch to itself.

        Raises:
            EndpointError: the server does not switch, or not in time.
        """
        body = {"mode": mode.value}
        self._json("PUT", "/dspark/mode", json=body, heeds_stops=False, timeout=PUT_BACK_SECONDS)

    def likely_arm(self) -> Arm:
        """The arm that a server runs: what it says, else `fixed` where vLLM counts drafts and `off` where not."""
        return self.mode() or (Arm.FIXED if _SPECULATING in self._metrics() else Arm.OFF)

    def version(self) -> dict[str, Any]:
        """What `/version` says; empty where the server has no such path."""
        return self._facts("/version")

    def drafts(self) -> Drafts | None:
        """The server's draft counters as they stand; None where it does not answer.

        All are 0 where it has no such series, or nothing to count yet.
        """
        try:
            text = self._metrics()
        except EndpointError as error:
            logger.warning("the drafts of what is measured now are not counted: %s", error)
            return None
        sums = dict.fromkeys(_SERIES.values(), 0.0)
        # What is not Prometheus's text has no such series either.
        with contextlib.suppress(ValueError):
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name in sums:
                        sums[sample.name] += sample.value
        return Drafts(**{field: sums[series] for field, series in _SERIES.items()})

    def _metrics(self) -> str:
        """What `/metrics` says; nothing where the server has no such path, or not for this key.

        Raises:
            EndpointError: it did not answer, `READINGS` times.
        """
        for left in reversed(range(READINGS)):
            try:
                response = self._send("GET", "/metrics")
                if response.status_code == httpx.codes.OK:
                    return response.text
                if response.status_code in _NO_SUCH_PATH:
                    return ""
                error = EndpointError(f"GET {self.url}/metrics was answered {response.status_code}")
            except EndpointError as caught:
                error = caught
            if left:
                time.sleep(RETRY_SECONDS)
        raise error

    def _facts(self, path: str) -> dict[str, Any]:
        """The JSON object at a path that not every server has; empty where there is none."""
        response = self._send("GET", path)
        try:
            body = response.json() if response.status_code == httpx.codes.OK else {}
        except ValueError:
            return {}
        return body if isinstance(body, dict) else {}

    def _json(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        response = self._send(method, path, **arguments)
        if response.status_code != httpx.codes.OK:
            said = " ".join(response.text.split())[:300]
            raise EndpointError(f"{method} {self.url}{path} was answered {response.status_code}: {said}")
        try:
            body: dict[str, Any] = response.json()
        except ValueError as error:
            raise EndpointError(f"{method} {self.url}{path} was not answered with JSON") from error
        return body

    def _send(self, method: str, path: str, *, heeds_stops: bool = True, **arguments: Any) -> httpx.Response:
        ask = functools.partial(self._client.request, method, path, **arguments)
        try:
            return unless_stopped(ask) if heeds_stops else ask()
        except httpx.HTTPError as error:
            raise EndpointError(f"{method} {self.url}{path}: {error or type(error).__name__}") from error


def growth(before: Drafts | None, after: Drafts | None) -> Drafts | None:
    """What happened between two readings.

    Returns:
        None where one of them failed, nothing was verified, or a counter fell: the server was started anew between.
    """
    if before is None or after is None:
        return None
    earlier = before.model_dump()
    grown = {field: value - earlier[field] for field, value in after.model_dump().items()}
    return Drafts(**grown) if grown["steps"] > 0 and min(grown.values()) >= 0 else None
