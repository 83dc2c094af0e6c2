"""Markdown: text that may hold anything, made safe for a table, a paragraph or a block of code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table; what would break a row is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line(cell).replace("|", "\\|") for cell in row) + " |" for row in lines]


def line(text: str) -> str:
    """Text as one line in which nothing is taken for HTML, a link or code."""
    return re.sub(r"([\\`*\[\]<>])", r"\\\1", " ".join(text.split()))


def fenced(text: str) -> list[str]:
    """A block of code whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}sh", text, fence]
