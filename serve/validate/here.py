"""What a run is made with: software, hardware and patches, as `run.json` says it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from patches.install import Installed
from serve.errors import InputError
from serve.preflight.machine import Machine
from serve.validate.plan import NEEDLE_TASK
from serve.validate.prompts import SHAREGPT
from serve.validate.results import Protocol, Run, Skipped

PACKAGES = ("dspark-serve", "vllm", "torch", "triton", "transformers", "lm_eval")
GIB = 1 << 30

REPORT_MODULES = ("matplotlib", "scipy")
REMEDY = "pip install '.[validate]' in dspark-serve's source folder (`make setup-validate` there makes .venv with it)"


def modules_of(protocol: Protocol) -> tuple[str, ...]:
    """What a protocol's parts import: vLLM's load generator, lm_eval's tasks, the report."""
    # vLLM reads JSONL with pandas, ShareGPT's JSON without.
    found = ["vllm", *([] if protocol.prompts.startswith(f"{SHAREGPT}:") else ["pandas"]), *REPORT_MODULES]
    if protocol.tasks:
        found += ["lm_eval", "datasets"]
    if any(NEEDLE_TASK.fullmatch(task) for task in protocol.tasks):
        found += ["nltk", "wonderwords"]
    return tuple(found)


def check_extra(modules: Sequence[str]) -> None:
    """Refuse to begin without what a run needs.

    Raises:
        InputError: a module is missing.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not installed: {REMEDY}")


def run_here(
    command: Sequence[str], protocol: Protocol, patches: Installed, machine: Machine, skipped: Sequence[Skipped]
) -> Run:
    """A run of servers of this environment, beginning now."""
    return Run(
        started=_now(),
        command=tuple(command),
        protocol=protocol,
        versions=versions(),
        hardware=patches.hardware,
        machine=machine_words(machine),
        patches={decision.patch.id: decision.status.value for decision in patches.decisions},
        patch_set=patches.digest,
        skipped=tuple(skipped),
    )


def run_there(command: Sequence[str], protocol: Protocol, version: Mapping[str, Any]) -> Run:
    """A run against a server elsewhere, beginning now.

    Args:
        command: The command line.
        protocol: What is measured.
        version: What its `/version` says; a server other than ours says less.
    """
    ours = version.get("dspark_serve")
    ours = ours if isinstance(ours, dict) else {}
    there = {"server: vllm": version.get("version"), "server: dspark-serve": ours.get("version")}
    return Run(
        started=_now(),
        command=tuple(command),
        protocol=protocol,
        versions={**versions(), **{name: str(number) for name, number in there.items() if number}},
        hardware=str(ours.get("hardware", "unknown")),
        machine="the server's own; the load came from " + processor_words(),
        patches={str(patch): "applied" for patch in ours.get("patches", ())},
        patch_set=str(ours.get("patchset", "unknown")),
    )


def versions() -> dict[str, str]:
    """The versions of what is installed here of `PACKAGES`, and Python's."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine_words(machine: Machine) -> str:
    """Cards, processor and memory in words."""
    if not machine.gpus:
        return processor_words()
    cards = f"{len(machine.gpus)} x {machine.hardware.detail} of {machine.gpus[0].total / GIB:.0f} GiB"
    return f"{cards}; {processor_words()}"


def processor_words() -> str:
    """Processor and memory of this machine in words."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    cores = len(psutil.Process().cpu_affinity() or ())
    return f"{cores} cores of {name}, {psutil.virtual_memory().total / GIB:.0f} GiB of memory"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
