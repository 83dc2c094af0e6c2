"""Preflight: everything that would make a start fail, said in seconds, before the first byte of weights.

`run` gathers facts once and gives them to every check of `checks.TABLE`; no check sees another, so all that fail are
named together.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping, Sequence

from patches import install
from serve.arguments import ArgumentNames, argument_names
from serve.errors import InputError
from serve.preflight.check import Check
from serve.preflight.checks import TABLE
from serve.preflight.facts import Facts, gather
from serve.preflight.plan import Plan, plan
from serve.preflight.report import Outcome, Report, Result
from serve.profile import Profile, Verification

__all__ = ["Facts", "Plan", "Report", "installed_names", "judge", "run"]


def run(
    profile: Profile,
    *,
    verification: Verification = Verification.ADAPTIVE,
    extra: Sequence[str] = (),
    skip: Sequence[str] = (),
    address: tuple[str, int] | None = None,
    environment: Mapping[str, str] | None = None,
    headless: bool = False,
) -> Report:
    """Check whether `profile` would start here. Neither vLLM nor torch is imported, and no weight is read.

    Args:
        profile: What would be started, `--set` applied.
        verification: The verification mode.
        extra: The user's own arguments of `vllm serve`.
        skip: Ids of checks to leave out.
        address: Host and port to listen on; None leaves the port unchecked.
        environment: Instead of this process's.
        headless: This node would have no API.

    Raises:
        InputError: an unknown check in `skip`, or an argument that cannot be read or has the wrong type.
    """
    started = time.monotonic()
    _known(skip, TABLE)
    names = installed_names()
    planned = plan(profile, verification, extra, names=names, environment=environment, headless=headless)
    facts = gather(planned, names=names, address=address)
    return judge(planned, facts, skip=skip, started=started)


def judge(
    planned: Plan,
    facts: Facts,
    *,
    skip: Sequence[str] = (),
    table: Sequence[Check] = TABLE,
    started: float | None = None,
) -> Report:
    """Every check of `table` on given facts.

    Args:
        planned: What would be started.
        facts: What is so.
        skip: Ids of checks to leave out.
        table: The checks.
        started: `time.monotonic()` when the facts began to be gathered.

    Raises:
        InputError: an unknown check in `skip`.
    """
    begun = time.monotonic() if started is None else started
    left_out = _known(skip, table)
    results = tuple(
        Result(check, Outcome.SKIPPED) if check.id in left_out else Result.of(check, check.run(facts, planned))
        for check in table
    )
    return Report(
        profile=planned.profile.name,
        verification=planned.verification.value,
        hardware=facts.machine.hardware.name,
        vllm=facts.release,
        seconds=time.monotonic() - begun,
        results=results,
        patches=facts.patches,
    )


def installed_names() -> ArgumentNames | None:
    """The argument names of the installed vLLM, or None where there is none."""
    root = install.vllm_root()
    return None if root is None else argument_names(root)


def _known(skip: Sequence[str], table: Sequence[Check]) -> frozenset[str]:
    ids = [check.id for check in table]
    for name in skip:
        if name not in ids:
            closest = next(iter(difflib.get_close_matches(name, ids, n=1)), None)
            hint = f"did you mean '{closest}'?" if closest else f"the checks are {', '.join(ids)}"
            raise InputError(f"--skip {name}: there is no such check; {hint}")
    return frozenset(skip)
