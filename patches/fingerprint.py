"""Fingerprints of upstream symbols: a patch is applied only to code that it was written against.

A fingerprint is the sha256 of a symbol's syntax tree. Comments and layout do not enter it, and neither does the
Python version that parses it: fields that are absent or empty are left out, since newer versions add some, and so
are the empty pieces that 3.12 puts into formatted strings. `upstream.lock` holds one for every (release, symbol) of
the ledger.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

LOCK_FILE = Path(__file__).with_name("upstream.lock")

Lock = dict[str, dict[str, str]]
"""Release -> symbol -> fingerprint."""


class SymbolMissingError(LookupError):
    """A release has no symbol of that name, or no such module."""


def fingerprint(vllm_root: Path, symbol: str) -> str:
    """The fingerprint of `module:qualified.name` in an unpacked vLLM.

    Args:
        vllm_root: The folder that holds the package folder `vllm`.
        symbol: For example `vllm.config.vllm:VllmConfig._validate_adaptive_verification`. A name assigned at
            module level counts as a symbol too.

    Raises:
        SymbolMissingError: the module or the name is not there.
    """
    module, _, name = symbol.partition(":")
    body: list[ast.stmt] = list(_parse(_module_file(vllm_root, module)).body)
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((statement for statement in _flatten(body) if part in _names(statement)), None)
        if node is None:
            raise SymbolMissingError(f"{symbol} is not in this vLLM")
        body = node.body if isinstance(node, ast.ClassDef) else []
    assert node is not None
    return hashlib.sha256(_canonical(node).encode()).hexdigest()


def fingerprints(vllm_root: Path, symbols: Iterable[str]) -> dict[str, str]:
    """Fingerprints of the symbols that exist there; a missing one is left out."""
    found: dict[str, str] = {}
    for symbol in symbols:
        try:
            found[symbol] = fingerprint(vllm_root, symbol)
        except SymbolMissingError:
            continue
    return found


def read_lock(path: Path = LOCK_FILE) -> Lock:
    """The checked-in fingerprints."""
    lock: Lock = json.loads(path.read_text())
    return lock


def write_lock(lock: Lock, path: Path = LOCK_FILE) -> None:
    """Write the lock with sorted keys, one fingerprint a line, so that a diff shows what changed."""
    path.write_text(json.dumps(lock, indent=1, sort_keys=True) + "\n")


def _module_file(vllm_root: Path, module: str) -> Path:
    stem = vllm_root.joinpath(*module.split("."))
    for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
        if candidate.is_file():
            return candidate
    raise SymbolMissingError(f"module {module} is not in this vLLM")


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def _flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, with those that stand under `if` or `try` at the same level."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _flatten(statement.body)
            yield from _flatten(statement.orelse)
        elif isinstance(statement, ast.Try):
            yield from _flatten(statement.body)


def _names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def _canonical(value: object) -> str:
    if isinstance(value, ast.JoinedStr):
        pieces = [p for p in value.values if not (isinstance(p, ast.Constant) and p.value == "")]
        return f"JoinedStr({_canonical(pieces)})"
    if isinstance(value, ast.AST):
        fields = (
            f"{name}={_canonical(field)}"
            for name, field in ast.iter_fields(value)
            if field is not None and field != [] and name not in ("kind", "type_comment")
        )
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    return repr(value)
