"""Prompts from real Python files: the beginnings of functions in modules of the standard library."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

MODULES = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "csv.py",
    "dataclasses.py",
    "fractions.py",
    "heapq.py",
    "ipaddress.py",
    "queue.py",
    "random.py",
    "shlex.py",
    "statistics.py",
    "string.py",
    "tempfile.py",
    "textwrap.py",
    "zipfile.py",
)
LINES = 6


def _beginning(path: Path) -> str:
    source = path.read_text()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    longest = max(functions, key=lambda node: (node.end_lineno or 0) - node.lineno)
    return "\n".join(source.splitlines()[longest.lineno - 1 : longest.lineno - 1 + LINES]) + "\n"


# Read at import, by one thread: Python 3.11 cannot build two syntax trees at once.
_PROMPTS = tuple(_beginning(Path(sysconfig.get_path("stdlib")) / module) for module in MODULES)


def python_prompts() -> list[str]:
    """One prompt a module: the first lines of its longest function."""
    return list(_PROMPTS)
