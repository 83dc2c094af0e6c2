"""Which modules of an unpacked vLLM bind a name of another module when they are imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def _sources(vllm_root: Path) -> list[tuple[Path, bytes]]:
    return [(path, path.read_bytes()) for path in sorted((vllm_root / "vllm").rglob("*.py"))]


@cache
def _imports(vllm_root: Path, name: str) -> list[tuple[str, str, str, str]]:
    """(importing module, imported module, imported name, bound name) of the `from` imports run at import time.

    Only of modules that mention `name` or import everything of another.
    """
    found = []
    for path, source in _sources(vllm_root):
        if name.encode() not in source and b"import *" not in source:
            continue
        parts = path.relative_to(vllm_root).with_suffix("").parts
        package = parts[:-1]
        module = ".".join(package if parts[-1] == "__init__" else parts)
        for node in _import_time_statements(ast.parse(source).body):
            if isinstance(node, ast.ImportFrom):
                above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
                home = ".".join(filter(None, (above, node.module)))
                found += [(module, home, alias.name, alias.asname or alias.name) for alias in node.names]
    return found


def _import_time_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _import_time_statements(statement.orelse)
            continue
        yield statement
        for inner in ("body", "orelse", "finalbody", "handlers"):
            for child in getattr(statement, inner, []):
                yield from _import_time_statements(child.body if isinstance(child, ast.ExceptHandler) else [child])


def binding_modules(vllm_root: Path, symbol: str) -> set[str]:
    """Modules that bind `module:name`, also through a module that passes it on.

    Raises:
        AssertionError: a module binds it under another name, which `replace_everywhere` would not find.
    """
    home, _, name = symbol.partition(":")
    found: set[str] = set()
    pending = [home]
    while pending:
        source = pending.pop()
        for module, imported_from, imported, bound in _imports(vllm_root, name):
            if imported_from == source and imported in (name, "*") and module not in found | {home}:
                assert bound in (name, "*"), f"{module} binds {symbol} as {bound}"
                found.add(module)
                pending.append(module)
    return found
