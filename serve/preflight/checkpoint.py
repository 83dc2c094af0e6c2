"""What a checkpoint's small files say: `config.json` and the weights' index. No weight is read or downloaded.

A remote file comes from the hub's cache, else by one plain request. `huggingface_hub`'s own download waits half a
minute where there is no network, with no setting against it.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_CONNECT_SECONDS, _READ_SECONDS, _ALL_SECONDS = 2.0, 3.0, 5.0
_LARGEST = 1 << 63
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_OFF = ("", "0", "no", "off", "false")


@dataclass(frozen=True)
class Checkpoint:
    """One model's facts.

    Attributes:
        name: Repository or path.
        config: The content of `config.json`; None where it could not be read.
        problem: Why it could not; empty where it was read.
        gated: Whether the hub refuses it without an accepted licence and a token.
        weight_bytes: Size of the weights; None where the index could not be read.
        confidence_head: Whether the index names confidence-head weights; None where it could not be read.
    """

    name: str
    config: Mapping[str, Any] | None = None
    problem: str = ""
    gated: bool = False
    weight_bytes: int | None = None
    confidence_head: bool | None = None

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of the config; empty where there is no config."""
        config = self.config or {}
        nested = config.get("text_config")
        return {**config, **nested} if isinstance(nested, dict) else config

    @property
    def architecture(self) -> str:
        """The first entry of `architectures`, or an empty string."""
        names = (self.config or {}).get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    def number(self, *keys: str) -> int | None:
        """The first of `keys` that the config has as a positive whole number."""
        for key in keys:
            value = self.text_config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31:
                return value
        return None


def read_checkpoints(
    names: Sequence[tuple[str, str | None]], environment: Mapping[str, str]
) -> dict[tuple[str, str | None], Checkpoint]:
    """The facts of every (name, revision), read side by side within five seconds in all."""
    found: dict[tuple[str, str | None], Checkpoint] = {}

    def read(name: str, revision: str | None) -> None:
        found[name, revision] = read_checkpoint(name, revision, environment)

    # Daemon threads: a resolver that hangs must not keep the process from ending.
    threads = [threading.Thread(target=read, args=name, daemon=True) for name in dict.fromkeys(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ALL_SECONDS)
    late = f"the model hub did not answer within {_ALL_SECONDS:.0f} s"
    return {key: found.get(key, Checkpoint(key[0], problem=late)) for key in names}


def read_checkpoint(name: str, revision: str | None, environment: Mapping[str, str]) -> Checkpoint:
    """The facts of one checkpoint, local or on the hub."""
    folder = _folder(name)
    if folder is not None:
        return _local(name, folder)
    if name.startswith(("/", "./", "../", "~")):
        return Checkpoint(name, problem=f"{name} is no folder")
    return _remote(name, revision, environment)


def _folder(name: str) -> Path | None:
    try:
        return Path(name) if Path(name).is_dir() else None
    except (OSError, ValueError):
        return None


def _local(name: str, folder: Path) -> Checkpoint:
    file = folder / CONFIG
    try:
        config = _mapping(file.read_bytes())
    except OSError as error:
        return Checkpoint(name, problem=f"{file} cannot be read: {error.strerror}")
    except ValueError as error:
        return Checkpoint(name, problem=f"{file} is no JSON object: {error}")
    weights: int | None = None
    confidence: bool | None = None
    with contextlib.suppress(OSError, ValueError, struct.error):
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
        confidence = _has_confidence_head(_tensor_names(folder))
    return Checkpoint(name, config, weight_bytes=weights, confidence_head=confidence)


def _tensor_names(folder: Path) -> Sequence[str]:
    index = folder / INDEX
    if index.is_file():
        return _indexed(_mapping(index.read_bytes()))
    with (folder / SINGLE).open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return list(_mapping(file.read(min(length, 100_000_000))))


def _indexed(index: Mapping[str, Any]) -> list[str]:
    """The tensors that an index names.

    Raises:
        ValueError: it has no map of them.
    """
    tensors = index.get("weight_map")
    if not isinstance(tensors, dict):
        raise ValueError("it has no weight_map")
    return list(tensors)


def _has_confidence_head(tensors: Sequence[str]) -> bool:
    return any("confidence_head" in tensor for tensor in tensors)


def _mapping(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}")
    return value


def _remote(name: str, revision: str | None, environment: Mapping[str, str]) -> Checkpoint:
    if not _REPOSITORY.fullmatch(name):
        return Checkpoint(name, problem=f"'{name}' is neither a folder nor a repository name")
    offline = environment.get("HF_HUB_OFFLINE", "").lower() not in _OFF
    fetch = _fetcher(name, revision, environment, offline=offline)
    try:
        config = _mapping(fetch(CONFIG))
    except _Refused as refused:
        return Checkpoint(name, problem=str(refused), gated=refused.gated)
    except ValueError as error:
        return Checkpoint(name, problem=f"its {CONFIG} is no JSON object: {error}")
    weights: int | None = None
    confidence: bool | None = None
    with contextlib.suppress(_Refused, ValueError):
        index = _mapping(fetch(INDEX))
        confidence = _has_confidence_head(_indexed(index))
        metadata = index.get("metadata")
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        weights = size if isinstance(size, int) and 0 < size < _LARGEST else None
    return Checkpoint(name, config, weight_bytes=weights, confidence_head=confidence)


class _Refused(Exception):  # noqa: N818 - an outcome of asking the hub
    def __init__(self, reason: str, *, gated: bool = False) -> None:
        super().__init__(reason)
        self.gated = gated


def _fetcher(
    name: str, revision: str | None, environment: Mapping[str, str], *, offline: bool
) -> Callable[[str], bytes]:
    from huggingface_hub import get_token, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    endpoint = environment.get("HF_ENDPOINT")
    token = environment.get("HF_TOKEN") or get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}

    def fetch(file: str) -> bytes:
        try:
            cached = try_to_load_from_cache(name, file, revision=revision)
            if isinstance(cached, str):
                return Path(cached).read_bytes()
        except HFValidationError as error:
            raise _Refused(f"'{name}' is no repository name") from error
        except OSError as error:
            raise _Refused(f"the cached {file} cannot be read: {error.strerror}") from error
        if offline:
            raise _Refused(f"{file} is not in the model cache, and HF_HUB_OFFLINE forbids to ask for it")
        try:
            response = httpx.get(
                hf_hub_url(name, file, revision=revision, endpoint=endpoint),
                headers=headers,
                timeout=httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS),
                follow_redirects=True,
            )
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise _Refused(f"the model hub cannot be reached ({error}), and {file} is not in the cache") from error
        if response.status_code in (401, 403):
            gated = response.headers.get("x-error-code") == "GatedRepo"
            kind = "is gated" if gated else "does not exist or is private"
            raise _Refused(f"{name} {kind} (HTTP {response.status_code})", gated=gated)
        if response.status_code != 200:
            where = f" at revision {revision}" if revision else ""
            raise _Refused(f"{name} has no {file}{where} (HTTP {response.status_code})")
        return response.content

    return fetch
