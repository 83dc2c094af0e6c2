"""`--set key=value`: one value of a profile replaced on the command line, typed and checked."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from serve.arguments import ArgumentNames
from serve.errors import InputError
from serve.plain import plain
from serve.profile import Profile, validated

_MAPPINGS = ("engine_args", "speculative_config", "environment")


def override(profile: Profile, sets: Sequence[str], names: ArgumentNames | None = None) -> Profile:
    """The profile with every `key=value` applied, in order.

    A key is a field of the profile (`gpus`), a dotted path (`speculative_config.num_speculative_tokens`,
    `engine_args.compilation_config.mode`), or an engine argument alone (`max_num_seqs`). A value is read as YAML,
    an environment variable's as text.

    Args:
        profile: What to start from.
        sets: Words of the form `key=value`.
        names: The installed vLLM's arguments; None where no vLLM is installed, and names cannot be checked.

    Raises:
        InputError: no `=`, an unknown key (the closest known one is named), or a value of the wrong type.
    """
    content = profile.model_dump()
    for word in sets:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise InputError(f"--set '{word}' is not of the form key=value")
        _put(content, _path(key, names), text)
    changed = validated(content, f"{profile.name} with --set") if sets else profile
    if names is not None:
        _check_types(changed, names)
    return changed


def _path(key: str, names: ArgumentNames | None) -> list[str]:
    first, *rest = key.split(".")
    if not all([first, *rest]):
        raise InputError(f"--set {key}: a part of the key is empty")
    if first in Profile.model_fields:
        path = [first, *rest]
        if rest and first not in _MAPPINGS:
            raise InputError(f"--set {key}: '{first}' is a single value; write --set {first}=...")
        if not rest and first in _MAPPINGS:
            raise InputError(f"--set {key}: name one key of '{first}', for example --set {first}.key=value")
    else:
        path = ["engine_args", first.replace("-", "_"), *rest]
    if names is not None and path[0] == "speculative_config":
        for unknown, closest in names.unknown_speculative(path[1:2]).items():
            hint = f"; did you mean '{closest}'?" if closest else ""
            raise InputError(f"--set {key}: this vLLM's speculative_config has no '{unknown}'{hint}")
    if path[0] == "engine_args" and names is not None and path[1] not in names.types:
        known = [*names.types, *Profile.model_fields]
        closest = next(iter(difflib.get_close_matches(path[1], known, n=1)), None)
        hint = f"; did you mean '{closest}'?" if closest else "; see `vllm serve --help=all`"
        raise InputError(f"--set {key}: this vLLM has no argument '{path[1]}'{hint}")
    return path


def _put(content: dict[str, Any], path: list[str], text: str) -> None:
    *parents, last = path
    target: Any = content
    for key in parents:
        below = target.get(key)
        target[key] = target = dict(below) if isinstance(below, dict) else {}
    target[last] = text if path[0] == "environment" else _typed(".".join(path), text)


def _typed(key: str, text: str) -> Any:
    try:
        value = plain(text)
    except ValueError as error:
        raise InputError(f"--set {key}: {error}") from error
    # A date or a set is no JSON value; what was typed is meant as text then.
    return value if isinstance(value, str | bool | int | float | dict | list | None) else text


def _check_types(profile: Profile, names: ArgumentNames) -> None:
    wrong = [
        f"{name} takes {takes}, not {value!r}"
        for name, value in profile.engine_args.items()
        if (takes := names.wrong_type(name, value)) is not None
    ]
    if wrong:
        raise InputError(f"profile {profile.name}: {'; '.join(wrong)}")
