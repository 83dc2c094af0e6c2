"""Prompt sets: the built-in one, the user's own JSONL file, and the two that vLLM's benchmark reads itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from serve.errors import InputError

BUILT_IN_NAME = "built-in"
SPEED_BENCH = "speed-bench"
SHAREGPT = "sharegpt"

_VERBS = (
    ("count", "Count the {things} of {source}."),
    ("merge", "Merge two lists of {things} from {source} into one, without repeating any."),
    ("filter", "Keep those {things} of {source} for which the predicate holds."),
    ("sort", "Sort the {things} of {source} by length, longest first."),
    ("parse", "Parse {things} from {source} and raise ValueError for a malformed one."),
    ("group", "Group the {things} of {source} by their first letter."),
    ("validate", "Check that all {things} of {source} are well formed."),
    ("format", "Format the {things} of {source} as a table with aligned columns."),
)
_THINGS = ("words", "lines", "dates", "numbers", "records", "paths", "fields", "tokens")
_SOURCES = ("a file", "a dictionary", "the argument", "standard input", "a queue", "a string", "the cache", "a message")


def _function(verb: str, doc: str, things: str, source: str) -> str:
    argument = source.rsplit(maxsplit=1)[-1]
    return f'def {verb}_{things}({argument}):\n    """{doc.format(things=things, source=source)}"""\n'


BUILT_IN = tuple(
    _function(verb, doc, things, _SOURCES[(row + column) % len(_SOURCES)])
    for (column, things), (row, (verb, doc)) in product(enumerate(_THINGS), enumerate(_VERBS))
)
"""64 beginnings of Python functions, which the tiny pair was trained to go on with. No two are alike."""


@dataclass(frozen=True)
class PromptSet:
    """Where the load's prompts come from.

    Attributes:
        dataset: vLLM's name of the data set's format.
        path: The data set; None for prompts that are written out for every cell.
        prompts: The prompts themselves; empty where vLLM reads them.
    """

    dataset: str
    path: Path | None = None
    prompts: tuple[str, ...] = ()


def prompt_set(name: str) -> PromptSet:
    """The set of a name, as `Protocol.prompts` has it.

    Raises:
        InputError: there is no such set, or a file of it is missing or has a line that is no prompt.
    """
    kind, colon, place = name.partition(":")
    if name == BUILT_IN_NAME:
        return PromptSet("custom", prompts=BUILT_IN)
    if kind == SPEED_BENCH:
        folder = Path(place)
        if not colon or not (folder / "qualitative.jsonl").is_file():
            raise InputError(
                f"--prompts {name}: write {SPEED_BENCH}:FOLDER, with the folder that holds SPEED-Bench's "
                f"qualitative.jsonl (the data set's own prepare script writes it)"
            )
        return PromptSet("speed_bench", folder)
    if kind == SHAREGPT:
        if not colon or not Path(place).is_file():
            raise InputError(f"--prompts {name}: write {SHAREGPT}:FILE, with ShareGPT's JSON file")
        return PromptSet("sharegpt", Path(place))
    return PromptSet("custom", prompts=read_prompts(Path(name)))


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a JSONL file, one `{"prompt": "..."}` a line; empty lines are left out.

    Raises:
        InputError: it cannot be read, has no prompt, or a line is something else; the first such line is named.
    """
    prompts = []
    for number, line in json_lines(path, "--prompts"):
        prompt = line.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError(f'line {number} of {path} has no text as "prompt": write {{"prompt": "..."}} a line')
        prompts.append(prompt)
    if not prompts:
        raise InputError(f'{path} has no prompt: write {{"prompt": "..."}}, one a line')
    return tuple(prompts)


def json_lines(path: Path, option: str) -> list[tuple[int, dict[str, object]]]:
    """The objects of a JSONL file with their line numbers.

    Raises:
        InputError: it cannot be read, or a line is no JSON object.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{option} {path} is not a regular file")
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{option} {path} is not text in UTF-8") from error
    except OSError as error:
        raise InputError(f"{option} {path} cannot be read: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InputError(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InputError(f"line {number} of {path} is no JSON object")
        found.append((number, value))
    return found


def written(prompts: tuple[str, ...], count: int) -> str:
    """A JSONL text of `count` prompts, no two alike.

    A prompt that comes again is led by a comment, so that no cache knows it from before.
    """
    lines = []
    for number in range(count):
        again, index = divmod(number, len(prompts))
        prompt = prompts[index] if not again else f"# Version {again + 1}\n{prompts[index]}"
        lines.append(json.dumps({"prompt": prompt}))
    return "\n".join(lines) + "\n"
