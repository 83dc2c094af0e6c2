"""Profiles: a recipe of model, engine arguments and environment under one name.

A profile is one YAML file, bundled in `serve/profiles/` or the user's own. Engine arguments carry vLLM's own names.
"""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve.errors import InputError

PROFILES = Path(__file__).with_name("profiles")
BUNDLED = "bundled:"
"""Prefix of a model path inside this package, for example `bundled:tiny/target`."""


class Verification(StrEnum):
    """How drafts are verified, chosen at start."""

    ADAPTIVE = "adaptive"
    FIXED = "fixed"
    OFF = "off"


class Profile(BaseModel):
    """One recipe. Unknown keys are refused, so that a misspelt one is not lost."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str
    hardware: str = Field(description="Hardware it is for, a name of patches.hardware.")
    model: str = Field(description="Model name, path, or `bundled:` path.")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="vLLM's arguments by their own names.")
    speculative_config: dict[str, Any] = Field(description="vLLM's speculative configuration, for adaptive mode.")
    environment: dict[str, str] = Field(default_factory=dict)
    source: str = Field(description="Where the recipe comes from and where it was run.")

    def speculation(self, verification: Verification) -> dict[str, Any] | None:
        """vLLM's `speculative_config` for a mode, bundled paths resolved; None without speculation."""
        if verification is Verification.OFF:
            return None
        config = dict(self.speculative_config)
        config["enable_adaptive_verification"] = verification is Verification.ADAPTIVE
        if "model" in config:
            config["model"] = resolve_model(config["model"])
        return config

    def command_line(self, verification: Verification, extra: list[str] | None = None) -> list[str]:
        """The arguments of `vllm serve` that this profile stands for, then the user's own."""
        arguments = [resolve_model(self.model)]
        for name, value in self.engine_args.items():
            arguments += flag(name, value)
        speculation = self.speculation(verification)
        if speculation is not None:
            arguments += ["--speculative-config", json.dumps(speculation)]
        return arguments + (extra or [])

    def shell_line(self, verification: Verification, extra: list[str] | None = None) -> str:
        """The `vllm serve` line a person could run instead."""
        return shlex.join(["vllm", "serve", *self.command_line(verification, extra)])


def flag(name: str, value: Any) -> list[str]:
    """One engine argument as command-line words: `max_num_seqs: 16` is `--max-num-seqs 16`."""
    option = "--" + name.replace("_", "-")
    if value is True:
        return [option]
    if value is False:
        return ["--no-" + name.replace("_", "-")]
    if isinstance(value, dict | list):
        return [option, json.dumps(value)]
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
    if not path.is_file():
        known = ", ".join(bundled_names())
        raise InputError(f"no profile '{name}': use one of {known}, or the path of your own .yaml file")
    try:
        return Profile.model_validate(yaml.safe_load(path.read_text()))
    except yaml.YAMLError as error:
        raise InputError(f"profile {path} is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise InputError(f"profile {path} is not valid: {wrong}") from error


def bundled_names() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))
