"""The format of `/metrics`, as the scraper asks for it.

prometheus_client takes a scraper that names no escaping, as Prometheus 2 does, for one that cannot read every name, and
its OpenMetrics encoder then writes samples of `vllm:x` as `vllm_x`. Names here are letters, digits, `_` and `:`, which
everyone reads: nothing is escaped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.registry import Collector

OPENMETRICS = "application/openmetrics-text"


def choose_format(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """The encoder and the content type for an `Accept` header."""
    encode, content_type = choose_encoder(accept)
    if content_type.startswith(OPENMETRICS):
        return partial(openmetrics, escaping=ALLOWUTF8), f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
    return encode, content_type
