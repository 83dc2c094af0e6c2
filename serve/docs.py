"""`python -m serve.docs --write README.md`: the tables of a Markdown file that are made from data.

A table stands between `<!-- profiles -->` and `<!-- /profiles -->`, or the same with another name of `TABLES`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from patches.ledger import EVERYWHERE, LEDGER
from serve.cli import app
from serve.errors import EXIT_MEANINGS, ExitCode, InputError
from serve.preflight.checks import TABLE
from serve.profile import bundled_names, load


def profiles_table() -> str:
    """The bundled profiles."""
    rows = []
    for name in bundled_names():
        profile = load(name)
        gpus = str(profile.gpus) if profile.gpus else "none"
        drafts = str(profile.speculative_config["num_speculative_tokens"])
        rows.append((f"`{name}`", profile.description, f"`{profile.hardware}`", gpus, drafts, profile.source))
    return _table(("profile", "what", "hardware", "GPUs", "K", "source"), rows)


def checks_table() -> str:
    """The preflight checks."""
    rows = [(f"`{check.id}`", check.severity.value, check.what, check.how, check.remedy) for check in TABLE]
    return _table(("check", "severity", "what has to be so", "how it is told", "remedy"), rows)


def patches_table() -> str:
    """The ledger."""
    rows = [
        (
            f"`{patch.id}`",
            patch.what,
            ", ".join(sorted(patch.hardware)) if patch.hardware != EVERYWHERE else "all",
            releases_text(patch.releases),
            patch.upstream,
            patch.removal,
        )
        for patch in LEDGER
    ]
    return _table(("patch", "what", "hardware", "vLLM", "upstream", "goes"), rows)


def releases_text(releases: Sequence[str]) -> str:
    """A run of releases as `first to last`."""
    return releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"


def settings_table() -> str:
    """Options of `dspark-serve up` and its profile, with the environment variable that sets each."""
    return _options_table("up")


def validate_table() -> str:
    """Options of `dspark-serve validate`."""
    return _options_table("validate")


def bench_table() -> str:
    """Options of `dspark-serve bench`."""
    return _options_table("bench")


def _options_table(name: str) -> str:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    profiles = [parameter for parameter in command.params if parameter.name == "profile"]
    rows = [("`PROFILE`", f"`{profile.envvar}`", "", profile.help) for profile in profiles] + [
        (
            f"`{'`, `'.join((*parameter.opts, *parameter.secondary_opts))}`",
            f"`{parameter.envvar}`" if parameter.envvar else "",
            "" if parameter.default is None else f"`{parameter.default}`",
            parameter.help or "",
        )
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    ]
    return _table(("option", "variable", "default", "meaning"), rows)


def exits_table() -> str:
    """Exit codes."""
    rows = [(str(int(code)), meaning) for code, meaning in EXIT_MEANINGS.items()]
    return _table(("exit code", "meaning"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "profiles": profiles_table,
    "checks": checks_table,
    "patches": patches_table,
    "settings": settings_table,
    "validate": validate_table,
    "bench": bench_table,
    "exits": exits_table,
}


def rendered(text: str) -> str:
    """The text with every marked table made anew.

    Raises:
        InputError: a start marker without its end.
    """
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = text.partition(start)
        if not found:
            continue
        _, closed, after = rest.partition(end)
        if not closed:
            raise InputError(f"the text has {start} and no {end} after it")
        text = f"{before}{start}\n{table()}\n{end}{after}"
    return text


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def main(words: Sequence[str]) -> int:
    """Write the named file's tables; returns the exit code."""
    if len(words) != 2 or words[0] != "--write":
        print(__doc__, file=sys.stderr)
        return ExitCode.BAD_INPUT
    path = Path(words[1])
    try:
        path.write_text(rendered(path.read_text()))
    except (OSError, InputError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
