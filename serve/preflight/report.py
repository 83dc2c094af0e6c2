"""What preflight found, as values, as JSON and as lines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from patches.install import Installed
from serve.errors import ExitCode
from serve.preflight.check import Check, Finding, Problem, Severity, Unknown


class Outcome(StrEnum):
    """What became of one check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Named by `--skip`."""
    NOT_CHECKED = "not checked"
    """A fact that it needs is not known."""


@dataclass(frozen=True)
class Result:
    """One check's outcome, with what was found and what to do about it."""

    check: Check
    outcome: Outcome
    found: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, check: Check, finding: Finding) -> Result:
        """The result that a finding makes."""
        if isinstance(finding, Problem):
            return cls(check, Outcome.FAILED, finding.found, finding.remedy or check.remedy)
        if isinstance(finding, Unknown):
            return cls(check, Outcome.NOT_CHECKED, f"not known: {finding.missing}")
        return cls(check, Outcome.PASSED)

    @property
    def line(self) -> str:
        """What failed and what to do about it."""
        return f"{self.check.id}: {self.found}; {self.remedy}"

    def as_json(self) -> dict[str, str]:
        """All of it, for machines."""
        return {
            "id": self.check.id,
            "severity": self.check.severity,
            "outcome": self.outcome,
            "what": self.check.what,
            "found": self.found,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Report:
    """The results of one preflight, in the table's order."""

    profile: str
    verification: str
    hardware: str
    vllm: str
    seconds: float
    results: tuple[Result, ...]
    patches: Installed

    @property
    def errors(self) -> tuple[Result, ...]:
        """Failed checks that nothing is started with."""
        return self._failed(Severity.ERROR)

    @property
    def warnings(self) -> tuple[Result, ...]:
        """Failed checks that do not keep it from starting."""
        return self._failed(Severity.WARNING)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Ids of the checks that `--skip` named."""
        return tuple(result.check.id for result in self.results if result.outcome is Outcome.SKIPPED)

    @property
    def exit_code(self) -> ExitCode:
        """`BAD_INPUT` with an error, else `OK`."""
        return ExitCode.BAD_INPUT if self.errors else ExitCode.OK

    def as_json(self) -> dict[str, Any]:
        """All of it, for `--json` and `/dspark/status`."""
        return {
            "profile": self.profile,
            "verification": self.verification,
            "hardware": self.hardware,
            "vllm": self.vllm,
            "seconds": round(self.seconds, 3),
            "ok": not self.errors,
            "exit_code": int(self.exit_code),
            "skipped": list(self.skipped),
            "results": [result.as_json() for result in self.results],
        }

    def lines(self) -> list[str]:
        """For people: what failed with its remedy, what was left out, and a last line with the counts."""
        lines = [f"{result.check.severity:<8} {result.line}" for result in (*self.errors, *self.warnings)]
        lines += [f"skipped  {check}: as asked for with --skip" for check in self.skipped]
        lines += [
            f"unknown  {result.check.id}: {result.found}"
            for result in self.results
            if result.outcome is Outcome.NOT_CHECKED
        ]
        passed = sum(result.outcome is Outcome.PASSED for result in self.results)
        lines.append(
            f"preflight of {self.profile} ({self.verification}) on {self.hardware} with vLLM {self.vllm}:"
            f" {passed} of {len(self.results)} checks passed, errors: {len(self.errors)},"
            f" warnings: {len(self.warnings)}, {self.seconds:.1f} s"
        )
        return lines

    def _failed(self, severity: Severity) -> tuple[Result, ...]:
        return tuple(r for r in self.results if r.outcome is Outcome.FAILED and r.check.severity is severity)
