"""`dspark-serve profiles`: what there is, what runs here, and what a profile stands for."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from patches import hardware
from serve.overrides import override
from serve.preflight import installed_names
from serve.preflight.effective import effective_lines
from serve.preflight.machine import survey_machine
from serve.preflight.plan import plan
from serve.profile import Profile, Verification, bundled_names, load


@dataclass(frozen=True)
class Fit:
    """Whether this machine can run a profile, and why not."""

    profile: Profile
    reason: str

    @property
    def runs_here(self) -> bool:
        """Whether hardware and GPU count are right; `preflight` checks the rest."""
        return not self.reason


def fit(profile: Profile, here: hardware.Hardware, gpus: int) -> Fit:
    """Compare a profile with the hardware and GPU count of a machine."""
    if profile.hardware != here.name:
        return Fit(profile, f"needs {profile.hardware}")
    if profile.gpus > gpus:
        return Fit(profile, f"needs {profile.gpus} GPUs, {gpus} here")
    return Fit(profile, "")


def profiles_command(*, as_json: bool = False) -> int:
    """Print every bundled profile and whether this machine can run it; returns the exit code."""
    machine = survey_machine(os.environ)
    fits = [fit(load(name), machine.hardware, len(machine.gpus)) for name in bundled_names()]
    if as_json:
        rows = [
            {
                "name": f.profile.name,
                "hardware": f.profile.hardware,
                "gpus": f.profile.gpus,
                "model": f.profile.model,
                "description": f.profile.description,
                "runs_here": f.runs_here,
                "reason": f.reason,
            }
            for f in fits
        ]
        print(json.dumps(rows, indent=2))
        return 0
    table = Table(box=None, pad_edge=False)
    for heading in ("profile", "runs here", "description"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "profile")
    for f in fits:
        table.add_row(f.profile.name, "yes" if f.runs_here else f.reason, f.profile.description)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\nthis machine: {machine.hardware.name} ({machine.hardware.detail})")
    if machine.hardware.why_not_served:
        console.print(f"not served: {machine.hardware.why_not_served}")
    return 0


def profiles_show_command(
    name: str,
    sets: Sequence[str] = (),
    extra: Sequence[str] = (),
    verification: Verification = Verification.ADAPTIVE,
) -> int:
    """Print what a profile stands for: environment and `vllm serve` line, to run by hand, and what results.

    Raises:
        InputError: no such profile, or a `--set` or an argument that cannot be.
    """
    names = installed_names()
    profile = override(load(name), sets, names)
    planned = plan(profile, verification, extra, names=names)
    print(f"# {profile.name}: {profile.description}")
    print(f"# source: {profile.source}")
    for variable in profile.environment:
        print(f"export {variable}={shlex.quote(planned.environment[variable])}")
    print(profile.shell_line(verification, list(extra)))
    for line in effective_lines(planned):
        print(f"# {line}")
    return 0
