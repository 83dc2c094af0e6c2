"""What every probe shares: the release it runs in, and the ledger's patches installed for a hardware of choice."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import wrapt

# A release is its Python tree. Let a GPU build's be imported without shared objects, which nothing here calls.
for extension in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
    sys.modules.setdefault(extension, ModuleType(extension))

import vllm  # noqa: E402

from patches.cpu import interpreter  # noqa: E402
from patches.install import survey  # noqa: E402
from patches.ledger import Status  # noqa: E402

ROOT = Path(vllm.__file__).parents[1]


def tasks(words: list[str]) -> Iterator[list[str]]:
    """The tasks on a probe's command line, `then` between them: to import a release takes longer than to ask it."""
    task: list[str] = []
    for word in (*words, "then"):
        if word == "then":
            yield task
            task = []
        else:
            task.append(word)


def interpret() -> None:
    """Repair Triton's interpreter, as the CPU engine does."""
    for module, hook in interpreter.HOOKS.items():
        wrapt.register_post_import_hook(hook, module)


def install(version: str, hardware: str, patch_id: str) -> None:
    """Hang one patch on this process's imports, as `patches.install` does, decided for another hardware."""
    decisions = {d.patch.id: d for d in survey(release=version, hardware_name=hardware, vllm_root=ROOT).decisions}
    decision = decisions[patch_id]
    assert decision.status is Status.APPLIED, f"{patch_id}: {decision.status}: {decision.reason}"
    for module, hook in importlib.import_module(decision.patch.module).HOOKS.items():
        wrapt.register_post_import_hook(hook, module)


def platform(*, cuda_family: int | None = None, rocm: bool = False) -> SimpleNamespace:
    """A platform that answers what the backends under test ask."""
    return SimpleNamespace(
        is_cuda=lambda: cuda_family is not None,
        is_rocm=lambda: rocm,
        is_cpu=lambda: False,
        is_device_capability_family=lambda family: cuda_family == family,
    )


def speculation(drafts: int, *, adaptive: bool) -> SimpleNamespace:
    return SimpleNamespace(
        num_speculative_tokens=drafts, enable_adaptive_verification=adaptive, parallel_drafting=False
    )
