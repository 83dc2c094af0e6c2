"""YAML as plain values: what JSON could hold as well, so that it can be put on a command line."""

from __future__ import annotations

import json
from typing import Any

import yaml


def plain(text: str) -> Any:
    """The value that a YAML text spells; a date or the like stays what YAML made of it.

    Raises:
        ValueError: not YAML, nested too deeply, or no value that JSON could hold (it contains itself, has a key that
            is no scalar, or an endless number); the message is one line.
    """
    try:
        value = yaml.safe_load(text)
        json.dumps(value, default=str)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    return value
