"""The keys that clients must send one of: where they come from."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from serve.errors import InputError

KEY_VARIABLES = ("DSPARK_API_KEY", "VLLM_API_KEY")
"""Variables that hold one key; vLLM's own is taken over."""


def take_keys(environment: MutableMapping[str, str], file: Path | None) -> list[str]:
    """The keys that were given; the variables are removed, so that no process of the engine inherits them.

    Args:
        environment: May hold `KEY_VARIABLES`.
        file: One key a line; empty lines and lines that begin with `#` are left out.

    Raises:
        InputError: the file cannot be read or has no key, or a key cannot be one. No message holds a key.
    """
    found = []
    for variable in KEY_VARIABLES:
        if value := environment.pop(variable, ""):
            key = value.strip()
            if not key:
                raise InputError(f"the key in {variable} is blank: give it one, or leave it unset to ask for none")
            _check(key, variable)
            found.append(key)
    if file is not None:
        in_file = _read(file)
        if not in_file:
            raise InputError(f"{file} has no key: write one a line, or leave --api-key-file out")
        found += in_file
    return list(dict.fromkeys(found))


def _read(file: Path) -> list[str]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InputError(f"the keys in {file} cannot be read: {what}; give --api-key-file a readable file") from error
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if key and not key.startswith("#"):
            _check(key, f"line {number} of {file}")
            keys.append(key)
    return keys


def _check(key: str, where: str) -> None:
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise InputError(f"the key in {where} has a character that no header carries: use visible ASCII, no spaces")
