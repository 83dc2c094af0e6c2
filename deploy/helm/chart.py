"""`make chart`: what the chart carries of the rest of the repository, since Helm packs no file from outside of it.

`files/rules` and `files/dashboards` are copies, `files/profiles.yaml` tells the chart what each bundled profile needs,
and the table of values in the chart's README is made from the comments in values.yaml.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from serve.profile import bundled_names, load

DEPLOY = Path(__file__).parents[1]
CHART = Path(__file__).with_name("dspark-serve")
COPIES = {
    "rules": (DEPLOY / "prometheus" / "rules", "*.yaml"),
    "dashboards": (DEPLOY / "grafana" / "dashboards", "*.json"),
}
START, END = "<!-- values -->", "<!-- /values -->"
HARDWARE = "cuda-hopper"
"""The entry of perHardware whose comments stand for all."""


def chart_files() -> dict[Path, str]:
    """Every generated file of the chart, by its path within the chart."""
    files = {Path("files/profiles.yaml"): profiles()}
    for folder, (origin, pattern) in COPIES.items():
        for path in sorted(origin.glob(pattern)):
            files[Path("files") / folder / path.name] = path.read_text()
    readme = (CHART / "README.md").read_text()
    before, _, rest = readme.partition(START)
    files[Path("README.md")] = f"{before}{START}\n{values_table()}\n{END}{rest.partition(END)[2]}"
    return files


def profiles() -> str:
    """What the chart must know of each bundled profile."""
    facts = {}
    for profile in map(load, bundled_names()):
        models = [{"repository": profile.model, "revision": profile.revision or ""}]
        draft = profile.speculative_config
        if "model" in draft:
            models.append({"repository": draft["model"], "revision": draft.get("revision", "")})
        facts[profile.name] = {"hardware": profile.hardware, "gpus": profile.gpus, "models": models}
    return "# Written by `make chart`.\n" + yaml.safe_dump(facts)


def values_table() -> str:
    """The README's table: every value, its default and what its comment in values.yaml says."""
    text = (CHART / "values.yaml").read_text()
    rows = list(documented(text.splitlines(), yaml.compose(text), yaml.safe_load(text), ""))
    cells = [("value", "default", "meaning"), ("---", "---", "---"), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells)


def documented(lines: list[str], node: Any, values: Any, prefix: str) -> Iterator[tuple[str, str, str]]:
    """A row for each value below a mapping of values.yaml."""
    for key, below in node.value:
        path = f"{prefix}{key.value}"
        value = values[key.value]
        comment = comment_above(lines, key.start_mark.line)
        if prefix == "perHardware.":
            if key.value == HARDWARE:
                yield from documented(lines, below, value, "perHardware.HARDWARE.")
        elif isinstance(value, dict) and value and not is_kubernetes(path):
            if comment:
                yield f"`{path}`", "", comment
            yield from documented(lines, below, value, f"{path}.")
        else:
            shown = "per hardware" if prefix.startswith("perHardware") else f"`{json.dumps(value)}`"
            yield f"`{path}`", shown, comment


def is_kubernetes(path: str) -> bool:
    """Whether a mapping has Kubernetes' own keys, or the user's, instead of values of the chart."""
    return path.rpartition(".")[2] in ("resources", "labels", "annotations")


def comment_above(lines: list[str], line: int) -> str:
    """The comment that ends right above a line."""
    found: list[str] = []
    while line and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].lstrip("# "))
    return " ".join(found)


def main() -> int:
    """Write every generated file, and remove what has no origin any more."""
    files = chart_files()
    for folder in COPIES:
        for path in (CHART / "files" / folder).glob("*"):
            if path.relative_to(CHART) not in files:
                path.unlink()
    for path, text in files.items():
        (CHART / path).parent.mkdir(parents=True, exist_ok=True)
        (CHART / path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
