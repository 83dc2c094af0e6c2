"""`make chart`: what the chart carries of the rest of the repository, since Helm packs no file from outside of it.

`files/rules` and `files/dashboards` are copies, `files/profiles.yaml` tells the chart what each bundled profile needs,
`files/refused_arguments.json` what may not stand in extraArgs, and the table of values in the chart's README is made
from the comments in values.yaml.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from serve.preflight import installed_names
from serve.preflight.checks.software import DECIDED_HERE
from serve.profile import bundled_names, load

DEPLOY = Path(__file__).parents[1]
CHART = Path(__file__).with_name("dspark-serve")
COPIES = {
    "rules": (DEPLOY / "prometheus" / "rules", "*.yaml"),
    "dashboards": (DEPLOY / "grafana" / "dashboards", "*.json"),
}
DECIDING = {
    **{"host": "host", "port": "port", "uds": "port", "api_key": "apiKey"},
    **dict.fromkeys(("uvicorn_log_level", "disable_uvicorn_access_log"), "accessLog"),
    "disable_access_log_for_endpoints": "accessLog",
    **dict.fromkeys(("headless", "nnodes", "node_rank", "master_addr"), "nodes"),
}
"""Arguments of vLLM that a value of the chart decides."""
REFUSED = {
    **DECIDED_HERE,
    "config": "spell its arguments out in customProfile",
    "worker_extension_cls": "its one place is taken by the server's own",
}
"""Arguments that the server refuses wherever they stand, and what to do instead."""
START, END = "<!-- values -->", "<!-- /values -->"
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
HARDWARE = "cuda-hopper"
"""The entry of perHardware whose comments stand for all."""


def chart_files() -> dict[Path, str]:
    """Every generated file of the chart, by its path within the chart."""
    files = {Path("files/profiles.yaml"): profiles(), Path("files/refused_arguments.json"): refused_arguments()}
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
        sizes = {name: profile.engine_args[name] for name in PARALLEL_SIZES if name in profile.engine_args}
        facts[profile.name] = {
            "hardware": profile.hardware,
            "gpus": profile.gpus,
            "models": models,
            "engine_args": sizes,
        }
    return "# Written by `make chart`.\n" + yaml.safe_dump(facts)


def refused_arguments() -> str:
    """Why a word may not stand in extraArgs, by its name and by every short one that this vLLM has for it."""
    reasons = {name: f"which the server refuses ({instead})" for name, instead in REFUSED.items()}
    reasons |= {name: f"which {value} decides" for name, value in DECIDING.items()}
    names = installed_names()
    for alias, name in (names.aliases if names else {}).items():
        if name in reasons and not alias.startswith("--"):
            reasons[alias.lstrip("-")] = reasons[name]
    return json.dumps(reasons, indent=1, sort_keys=True) + "\n"


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
