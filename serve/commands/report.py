"""`dspark-serve report`: the report of a validation run, finished or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serve.errors import ExitCode
from serve.validate.here import REPORT_MODULES, check_extra


def report_command(directory: Path, beside: Sequence[str] = ()) -> int:
    """Write the report anew, and print where it is.

    Raises:
        InputError: no run's directory, a record that cannot be used, no such reference table, or nothing to draw with.
    """
    check_extra(REPORT_MODULES)
    from serve.validate.report import write_report

    print(write_report(directory, beside))
    return ExitCode.OK
