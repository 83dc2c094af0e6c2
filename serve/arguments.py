"""vLLM's command-line arguments: what the installed release calls them, and what a user's words mean.

vLLM's own parser needs torch and several seconds. The names are read from the source of the installed release
instead, so they are that release's names, and words are split as argparse splits them.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from serve.errors import InputError
from serve.plain import plain

_ARGUMENT_CLASSES = {"EngineArgs", "AsyncEngineArgs", "BaseFrontendArgs", "FrontendArgs"}
_SPECULATIVE_CLASS = "SpeculativeConfig"
_SCALARS = {"int": int, "float": float, "bool": bool, "str": str}


@dataclass(frozen=True)
class ArgumentNames:
    """The arguments of one vLLM release.

    Attributes:
        types: Name (with underscores) to the scalar types that its annotation allows; empty where it is not scalar.
        aliases: Short or older option, for example `-tp`, to name.
        speculative: The keys of `speculative_config`; empty where they are not known.
    """

    types: Mapping[str, tuple[type, ...]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    speculative: frozenset[str] = frozenset()

    def closest(self, name: str) -> str | None:
        """The known name that looks most like a misspelt one."""
        return next(iter(difflib.get_close_matches(name, self.types, n=1)), None)

    def unknown_speculative(self, keys: Iterable[object]) -> dict[str, str | None]:
        """The keys that `speculative_config` has not, each with the known one that looks most like it."""
        unknown = [str(key) for key in keys if self.speculative and key not in self.speculative]
        return {key: next(iter(difflib.get_close_matches(key, self.speculative, n=1)), None) for key in unknown}

    def wrong_type(self, name: str, value: object) -> str | None:
        """What an argument takes, where `value` is not that; None where it fits or cannot be told."""
        allowed = self.types.get(name, ())
        if not allowed or value is None:
            return None
        number = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, allowed) and not (isinstance(value, bool) and bool not in allowed):
            return None
        if (number and float in allowed) or str in allowed:
            return None
        if isinstance(value, str) and bool not in allowed and _reads_as(value, allowed):
            return None
        return " or ".join(kind.__name__ for kind in allowed)


def _reads_as(text: str, allowed: tuple[type, ...]) -> bool:
    """Whether argparse would take the word. vLLM also takes `8k` and `auto` for some whole numbers."""
    if text == "auto" or (text[:-1].replace(".", "", 1).isdigit() and text[-1:].lower() in "kmgt"):
        return True
    for kind in allowed:
        try:
            kind(text)
        except ValueError:
            continue
        return True
    return False


@cache
def argument_names(vllm_root: Path) -> ArgumentNames:
    """The arguments of the vLLM under `vllm_root`, from the fields of its argument classes."""
    package = vllm_root / "vllm"
    files = [package / "engine" / "arg_utils.py", *sorted(package.glob("entrypoints/**/cli_args.py"))]
    types: dict[str, tuple[type, ...]] = {}
    aliases: dict[str, str] = {}
    for file in files:
        if not file.is_file():
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ClassDef) and node.name in _ARGUMENT_CLASSES:
                types.update(_fields(node))
            elif isinstance(node, ast.Call):
                aliases.update(_options(node))
    known = {alias: name for alias, name in aliases.items() if alias.startswith("-") and name}
    for name in known.values():
        types.setdefault(name, ())
    return ArgumentNames(types, known, _speculative_keys(package))


def _speculative_keys(package: Path) -> frozenset[str]:
    file = package / "config" / "speculative.py"
    if not file.is_file():
        return frozenset()
    classes = (node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef))
    return frozenset(name for node in classes if node.name == _SPECULATIVE_CLASS for name, _ in _fields(node))


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, tuple[type, ...]]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            words = {word.strip() for word in ast.unparse(statement.annotation).split("|")} - {"None"}
            scalar = words <= _SCALARS.keys()
            yield statement.target.id, tuple(_SCALARS[word] for word in sorted(words)) if scalar else ()


def _options(node: ast.Call) -> Iterator[tuple[str, str]]:
    """Every option of an `add_argument` call with the name it sets."""
    if not (isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"):
        return
    options = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    long = next((option for option in options if option.startswith("--")), None)
    if long is not None:
        for option in options:
            yield option, long.removeprefix("--").replace("-", "_")


def split_words(words: Sequence[str], names: ArgumentNames | None = None) -> dict[str, Any]:
    """What the words after `--` set, by argument name.

    `--a-b v`, `--a-b=v`, `--a-b` (True), `--no-a-b` (False), JSON values, `-O3`, and `--a-b.key v`, which sets one
    key of a mapping. A later word wins, and a whole mapping replaces the keys set before it.

    Raises:
        InputError: a word that is no argument, broken JSON, or `--config`, whose file nobody here would see.
    """
    found: dict[str, Any] = {}
    aliases = names.aliases if names else {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word in ("-", "--") or _is_number(word):
            raise InputError(f"'{word}' is no argument of vLLM: write it as --name value")
        if word.startswith("-O") and len(word) > 2 and not word.startswith("-O."):
            word = f"--optimization-level={word[2:].removeprefix('=')}"
        option, has_value, text = word.partition("=")
        name, *path = option.lstrip("-").split(".")
        name = aliases.get("-" * (len(option) - len(option.lstrip("-"))) + name) or name.replace("-", "_")
        if name == "config":
            raise InputError("--config hides its arguments from preflight: write them into a profile of your own")
        values = [text] if has_value else []
        while not has_value and rest and (not rest[0].startswith("-") or _is_number(rest[0])):
            values.append(rest.pop(0))
        if not values and not path and name.startswith("no_") and _negatable(name, names):
            name, value = name.removeprefix("no_"), False
        else:
            value = _value(name, values)
        _put(found, [name, *path], value)
    return found


def _negatable(name: str, names: ArgumentNames | None) -> bool:
    return names is None or name not in names.types


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _value(name: str, values: list[str]) -> Any:
    if not values:
        return True
    if len(values) > 1:
        return values
    if not values[0].startswith(("{", "[")):
        return scalar(values[0])
    try:
        return json.loads(values[0])
    except (ValueError, RecursionError) as error:
        raise InputError(f"--{name.replace('_', '-')} takes JSON, and {values[0]!r} is not: {error}") from error


def scalar(text: str) -> Any:
    """A word as the number, truth value or null that it spells, else itself."""
    try:
        value = plain(text)
    except ValueError:
        return text
    return value if text and isinstance(value, bool | int | float | None) else text


def _put(found: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    target = found
    for key in parents:
        if not isinstance(target.get(key), dict):
            target[key] = {}
        target = target[key]
    target[last.replace("-", "_") if parents else last] = value
