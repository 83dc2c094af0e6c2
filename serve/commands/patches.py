"""`dspark-serve patches`: the ledger, for this machine or for another.

For this machine the installed vLLM is read and compared with the lock. For another release or hardware the lock alone
answers: it says what the patched backend does there when that vLLM is the released one.
"""

from __future__ import annotations

import json
import sys

from patches import hardware
from patches.install import (
    Decision,
    Installed,
    PatchError,
    survey,
    switched_off_ids,
    vllm_release,
    vllm_root,
)
from patches.ledger import RELEASES, Status
from serve.errors import ExitCode, InputError


def patches_command(vllm: str | None, hardware_name: str | None, check: bool, as_json: bool) -> int:
    """Print what becomes of every patch, in the order of installation.

    Args:
        vllm: A release to answer for, for example `0.28.0`; None: the installed one.
        hardware_name: Hardware to answer for, one of `patches.hardware.SERVED`; None: this machine's.
        check: Whether a needed patch that is refused makes the command fail, with a line on standard error for each.
        as_json: Whether to print JSON instead of lines to read.

    Returns:
        `ExitCode.OK`, or `ExitCode.START_FAILED` where `check` found a refused patch.

    Raises:
        InputError: an unknown release, hardware or id in `DSPARK_PATCHES_OFF`, or no vLLM to answer for.
    """
    result = _survey(vllm, hardware_name)
    print(_as_json(result) if as_json else _as_text(result))
    if check:
        for decision in result.refused:
            print(f"dspark-serve: the patch {decision.patch.id} is refused: {decision.reason}", file=sys.stderr)
    return ExitCode.START_FAILED if check and result.refused else ExitCode.OK


def _survey(vllm: str | None, hardware_name: str | None) -> Installed:
    if vllm is not None and vllm not in RELEASES:
        raise InputError(f"vLLM {vllm} was not validated: use one of {', '.join(RELEASES)}")
    if hardware_name is not None and hardware_name not in hardware.SERVED:
        raise InputError(f"no hardware '{hardware_name}': use one of {', '.join(hardware.SERVED)}")
    here = vllm_release()
    if vllm is None and here == "none":
        raise InputError("no vLLM is installed here: install one, or name a release with --vllm")
    try:
        switched_off = switched_off_ids()
    except PatchError as error:
        raise InputError(str(error)) from error
    return survey(
        release=vllm or here,
        hardware_name=hardware_name or hardware.detect().name,
        vllm_root=vllm_root() if vllm in (None, here) else None,
        switched_off=switched_off,
    )


def _as_json(result: Installed) -> str:
    rows = [
        {
            "id": decision.patch.id,
            "status": decision.status.value,
            "reason": _reason(decision),
            "what": decision.patch.what,
            "upstream": decision.patch.upstream,
            "hardware": sorted(decision.patch.hardware),
            "releases": list(decision.patch.releases),
            "removal": decision.patch.removal,
        }
        for decision in result.decisions
    ]
    facts = {"vllm": result.release, "hardware": result.hardware, "digest": result.digest}
    return json.dumps(facts | {"patches": rows}, indent=2)


def _as_text(result: Installed) -> str:
    lines = [f"vLLM {result.release} on {result.hardware}: {len(result.applied)} patches applied"]
    for decision in result.decisions:
        patch = decision.patch
        reason = _reason(decision)
        lines += [
            "",
            f"{patch.id}: {decision.status}" + (f" ({reason})" if reason else ""),
            f"  what      {patch.what}",
            f"  upstream  {patch.upstream}",
        ]
    return "\n".join(lines)


def _reason(decision: Decision) -> str:
    """The installer's reason; for a patch that is not needed, the releases that need it."""
    if decision.status is not Status.NOT_NEEDED:
        return decision.reason
    first, last = decision.patch.releases[0], decision.patch.releases[-1]
    return f"needed by vLLM {first} only" if first == last else f"needed by vLLM {first} to {last} only"
