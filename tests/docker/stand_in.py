"""Stand-ins for vLLM's own images: Debian with the Python files of the real wheel, which is what our patches touch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from patches.releases import fetch
from serve.images import NO_COMMIT
from tests.docker.building import BASE, LOCK, Builder

RELEASE = LOCK["vllm"]["version"]
SITE = "usr/local/lib/python3.11/dist-packages"
BROUGHT = ("fastapi", "httpx", "huggingface_hub", "jsonschema", "prometheus_client", "psutil", "pydantic", "PyYAML")
BROUGHT += ("typer", "uvicorn", "uvloop")
"""Of our dependencies, what vLLM brings by itself."""

TOOLS = ("cc", "nvcc", "hipcc", "ninja")
"""What just-in-time kernels are built with."""


def make_stand_in(builder: Builder, tag: str) -> None:
    """A base image with vLLM's Python files, what our commands import of its dependencies, and `TOOLS`.

    The tools and Python's header are only there by name, and AITER is an empty package with a folder for built kernels.
    """
    wheel = fetch(RELEASE)
    with builder.container(BASE) as (name, root):
        site = root / SITE
        shutil.copytree(wheel / "vllm", site / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
        information = site / f"vllm-{RELEASE}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}\n")
        (information / "RECORD").touch()
        (site / "aiter" / "jit").mkdir(parents=True)
        (site / "aiter" / "__init__.py").touch()
        header = root / "usr" / "include" / "python3.11" / "Python.h"
        header.parent.mkdir(parents=True)
        header.touch()
        for tool in TOOLS:
            program = root / "usr" / "bin" / tool
            program.write_text("#!/bin/sh\n")
            program.chmod(0o755)
        for distribution in distributions(BROUGHT):
            copy(distribution, site)
        builder.buildah("config", "--entrypoint", '["vllm", "serve"]', "--cmd", "", name)
        builder.buildah("commit", name, tag)


def distributions(names: Iterable[str]) -> list[metadata.Distribution]:
    """What is installed here under some names, with everything that it needs."""
    found: dict[str, metadata.Distribution] = {}
    wanted = list(names)
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name not in found:
            found[name] = metadata.distribution(name)
            needs = map(Requirement, found[name].requires or ())
            wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return list(found.values())


def copy(distribution: metadata.Distribution, site: Path) -> None:
    """Copy what a distribution has in its site folder; this Python is of the same version as the stand-in's."""
    for file in distribution.files or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), target)


def altered(builder: Builder, base: str, tag: str, module: str, old: str, new: str) -> None:
    """The stand-in with one line of vLLM changed."""
    with builder.container(base) as (name, root):
        change(root / SITE / Path(*module.split(".")).with_suffix(".py"), old, new)
        builder.buildah("commit", name, tag)


def change(path: Path, old: str, new: str) -> None:
    """Change text that is there exactly once."""
    text = path.read_text()
    assert text.count(old) == 1, f"{path} has {text.count(old)} of {old!r}"
    path.write_text(text.replace(old, new))


def commit_of(wheel: Path) -> str:
    """The commit in the wheel's own version file."""
    found = re.search(r"__commit_id__ = commit_id = 'g(\w+)'", (wheel / "vllm" / "_version.py").read_text())
    return found[1] if found else NO_COMMIT
