"""`dspark-serve preflight`: whether a profile would start here."""

from __future__ import annotations

import json
from collections.abc import Sequence

from serve.overrides import override
from serve.preflight import installed_names, run
from serve.profile import Verification, load


def preflight_command(
    profile: str,
    sets: Sequence[str] = (),
    extra: Sequence[str] = (),
    *,
    as_json: bool = False,
    skip: Sequence[str] = (),
    verification: Verification = Verification.ADAPTIVE,
    host: str = "127.0.0.1",
    port: int | None = None,
    headless: bool = False,
) -> int:
    """Print every failed check with its remedy; returns the exit code.

    Args:
        profile: A bundled profile's name or the path of a YAML file.
        sets: `key=value` words that override the profile.
        extra: The user's own arguments of `vllm serve`.
        as_json: One JSON object instead of lines, every check in it.
        skip: Ids of checks to leave out.
        verification: The verification mode.
        host: Address that the server would listen on.
        port: Its port; None leaves it unchecked.
        headless: This node would have no API.

    Raises:
        InputError: no such profile or check, or a value that cannot be.
    """
    recipe = override(load(profile), sets, installed_names())
    address = None if port is None else (host, port)
    report = run(recipe, verification=verification, extra=extra, skip=skip, address=address, headless=headless)
    print(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines()))
    return int(report.exit_code)
