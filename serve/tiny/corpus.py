"""Python source text to train on, taken from the interpreter's own standard library.

Files are split by a stable hash of their path relative to the library, so the same file lands on
the same side on every machine and a held-out file is never trained on, whichever Python runs this.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 0.08
# Test suites would drown everything else, and tables of constants look like no program.
SKIPPED_PACKAGES = frozenset({"test", "tests", "encodings", "pydoc_data", "site-packages", "idle_test"})
SMALLEST_FILE = 400


@dataclass(frozen=True)
class SourceFile:
    """One file: its path relative to the standard library, and its text."""

    name: str
    text: str


def split_of(name: str) -> Split:
    """The side of the split that a relative path belongs to."""
    digest = hashlib.sha256(name.encode()).digest()
    return "held_out" if int.from_bytes(digest[:4]) < HELD_OUT_SHARE * 2**32 else "train"


def read_sources(split: Split, library: Path | None = None) -> list[SourceFile]:
    """Every usable file of one side, ordered by name. Files that cannot be read are left out."""
    root = library or Path(sysconfig.get_path("stdlib"))
    sources = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_PACKAGES.isdisjoint(relative.parts) and split_of(relative.as_posix()) == split:
            text = _read(path)
            if len(text) >= SMALLEST_FILE:
                sources.append(SourceFile(relative.as_posix(), text))
    return sources


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
