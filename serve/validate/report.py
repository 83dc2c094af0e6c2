"""The report of a run: `report.json`, `report.md` and `plots/`, made of the run's records alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serve.errors import InputError
from serve.validate.deriving import derive
from serve.validate.findings import Findings
from serve.validate.plots import draw
from serve.validate.reading import read
from serve.validate.text import render
from serve.validate.writing import write_whole


def write_report(directory: Path, beside: Sequence[str] = ()) -> Path:
    """Write the report of a run, finished or not. The same records give the same files.

    Args:
        directory: What `dspark-serve validate` wrote.
        beside: Names of reference tables to lay beside it (`serve.validate.references.table_names`).

    Returns:
        The path of report.md.

    Raises:
        InputError: no run's directory, a record that cannot be used, no such table, or the report cannot be written.
    """
    made = derive(read(directory), beside).model_dump_json(indent=1)
    findings = Findings.model_validate_json(made)
    path = directory / "report.md"
    try:
        write_whole(directory / "report.json", made + "\n")
        drawn = draw(findings, directory / "plots")
        write_whole(path, render(findings, drawn))
    except OSError as error:
        raise InputError(f"the report cannot be written to {error.filename}: {error.strerror}") from error
    return path
