"""Profiles: a recipe of model, engine arguments and environment under one name.

A profile is one YAML file, bundled in `serve/profiles/` or the user's own. Engine arguments carry vLLM's own names.
`serve/profiles/profile.schema.json` is the JSON Schema of this model (`python -m serve.profile` writes it).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve.errors import InputError
from serve.plain import plain

PROFILES = Path(__file__).with_name("profiles")
SCHEMA = PROFILES / "profile.schema.json"
BUNDLED = "bundled:"
"""Prefix of a model path inside this package, for example `bundled:tiny/target`."""

_DOTTED = re.compile(r"--?([A-Za-z][\w-]*)\.([\w.-]+)(?:=(.*))?", re.DOTALL)
_SPECULATIVE = re.compile(r"(--speculative[-_]config|-sc)\b")
_SHORT = {"cc": "compilation_config", "sc": "speculative_config", "ac": "attention_config"}
"""vLLM's short options for mappings."""

ArgumentName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]
VariableName = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
VariableValue = Annotated[str, Field(pattern="^[^\\x00]*$")]
Text = Annotated[str, Field(min_length=1, pattern="^[^\\x00]*$")]


class Verification(StrEnum):
    """How drafts are verified, chosen at start."""

    ADAPTIVE = "adaptive"
    FIXED = "fixed"
    OFF = "off"


class Profile(BaseModel):
    """One recipe. Unknown keys are refused, so that a misspelt one is not lost."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="dspark-serve profile")

    name: Text = Field(description="What it is called, the file's name without its ending.")
    description: Text = Field(description="One line for the list of profiles.")
    hardware: Text = Field(description="Hardware it is for: `cuda-hopper`, `rocm-gfx950` or `cpu`.")
    gpus: int = Field(default=0, ge=0, le=1024, description="GPUs it uses, all data-parallel ranks together.")
    model: Text = Field(description="Model name, path, or `bundled:` path.")
    revision: Text | None = Field(default=None, description="Branch, tag or commit of the model repository.")
    checkpoint_gib: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Size of the weights in GiB, used where the checkpoint's index is out of reach.",
    )
    concurrency: int | None = Field(default=None, ge=1, description="Requests meant to run at the same time.")
    engine_args: dict[ArgumentName, Any] = Field(
        default_factory=dict, description="vLLM's arguments by their own names, with underscores."
    )
    speculative_config: dict[ArgumentName, Any] = Field(
        description="vLLM's speculative configuration; the verification mode is added to it at start."
    )
    environment: dict[VariableName, VariableValue] = Field(
        default_factory=dict, description="Environment of the engine; a variable that is already set wins."
    )
    source: Text = Field(description="Where the recipe comes from and where it was run.")

    def speculation(self, verification: Verification) -> dict[str, Any] | None:
        """vLLM's `speculative_config` for a mode, bundled paths resolved; None without speculation."""
        if verification is Verification.OFF:
            return None
        config = dict(self.speculative_config)
        config["enable_adaptive_verification"] = verification is Verification.ADAPTIVE
        if isinstance(config.get("model"), str):
            config["model"] = resolve_model(config["model"])
        return config

    def command_line(self, verification: Verification, extra: Sequence[str] | None = None) -> list[str]:
        """The arguments of `vllm serve` that this profile stands for, then the user's own.

        `--speculative-config.key value` and its like are folded into the profile's mapping: vLLM's parser would
        collect them into a second mapping that replaces the profile's.

        Raises:
            InputError: a word sets up speculation, which the mode leaves off.
        """
        mappings: dict[str, dict[str, Any]] = {}
        for name, value in self.engine_args.items():
            if isinstance(value, dict):
                mappings[name] = dict(value)
        speculation = self.speculation(verification)
        if speculation is not None:
            mappings["speculative_config"] = speculation
        words = _fold_dotted(list(extra or []), mappings)
        if speculation is None and (word := next(filter(_SPECULATIVE.match, words), None)) is not None:
            raise InputError(f"verification is off, and {word} sets speculation up: leave one of them out")

        arguments = [resolve_model(self.model)]
        if self.revision is not None:
            arguments += ["--revision", self.revision]
        for name, value in self.engine_args.items():
            arguments += flag(name, mappings.pop(name, value))
        for name, mapping in mappings.items():
            arguments += flag(name, mapping)
        return arguments + words

    def shell_line(self, verification: Verification, extra: Sequence[str] | None = None) -> str:
        """The `vllm serve` line a person could run instead."""
        return shlex.join(["vllm", "serve", *self.command_line(verification, extra)])


def _fold_dotted(words: list[str], mappings: dict[str, dict[str, Any]]) -> list[str]:
    """Set the keys that `--name.key value` words name in `mappings`; returns the other words."""
    from serve.arguments import scalar

    kept: list[str] = []
    while words:
        word = words.pop(0)
        found = _DOTTED.fullmatch(word)
        name = _SHORT.get(found[1], found[1].replace("-", "_")) if found else ""
        if found is None or name not in mappings:
            kept.append(word)
            continue
        text = found[3]
        if text is None:
            text = words.pop(0) if words and not words[0].startswith("--") else "true"
        *parents, last = found[2].replace("-", "_").split(".")
        target = mappings[name]
        for key in parents:
            below = target.get(key)
            target[key] = target = dict(below) if isinstance(below, dict) else {}
        target[last] = scalar(text)
    return kept


def flag(name: str, value: Any) -> list[str]:
    """One engine argument as command-line words: `max_num_seqs: 16` is `--max-num-seqs 16`."""
    option = "--" + name.replace("_", "-")
    if value is None:
        return []
    if value is True:
        return [option]
    if value is False:
        return ["--no-" + name.replace("_", "-")]
    if isinstance(value, dict | list):
        return [option, json.dumps(value, default=str)]
    return [option, str(value)]


def resolve_model(model: str) -> str:
    """A `bundled:` path as a real one; anything else as it is."""
    if model.startswith(BUNDLED):
        return str(Path(__file__).parent / model.removeprefix(BUNDLED))
    return model


def load(name: str) -> Profile:
    """A bundled profile by name, or the user's own by the path of its YAML file.

    Raises:
        InputError: no such profile, unreadable YAML, or a field that is missing, unknown or wrong.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    try:
        # A pipe or a device would be read without end.
        if path.exists() and not path.is_file():
            raise InputError(f"profile {path} is not a regular file: give the path of a .yaml file")
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise InputError(f"profile {path} is not text in UTF-8") from error
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        known = ", ".join(bundled_names())
        missing = "" if path.parent == PROFILES else ", for there is no such file"
        raise InputError(
            f"no profile '{name}'{missing}: use one of {known}, or the path of your own .yaml file"
        ) from error
    except OSError as error:
        raise InputError(f"profile {path} cannot be read: {error.strerror}") from error
    try:
        content = plain(text)
    except ValueError as error:
        raise InputError(f"profile {path} is not YAML: {error}") from error
    return validated(content, str(path))


def validated(content: object, origin: str) -> Profile:
    """The profile that a mapping spells out.

    Raises:
        InputError: a field is missing, unknown or wrong; the message starts with `origin`.
    """
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise InputError(f"profile {origin} is not valid: {wrong}") from error


def bundled_names() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def json_schema() -> str:
    """The JSON Schema of a profile file, as text."""
    return json.dumps(Profile.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(json_schema())
