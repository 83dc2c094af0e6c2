"""Asks classes of a vLLM release a question without importing vLLM.

Importing the classes would take seconds and the GPU that they are about; a copied list of answers would be wrong
with the next release. So their own source is run: the definition that a question needs is cut out of the module's
syntax tree, with everything it refers to, and executed with the platform as an argument. What cannot be answered
this way (a name that leads to torch, a local import) is `Unanswerable`, never guessed.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_KEPT_DECORATORS = {"classmethod", "staticmethod"}
"""Methods that are asked of a class itself; instance methods need an engine."""


class Unanswerable(Exception):  # noqa: N818 - an outcome, not an error
    """The source needs something that is not known here."""


class _Outside(Unanswerable):
    """A name leads out of vLLM."""


@dataclass(frozen=True)
class Answer:
    """What a release's own code answered.

    Attributes:
        value: The answer, or None where there is none.
        consulted: Every symbol whose code was run for it, as `module:qualified.name`.
        reason: Why there is no answer.
    """

    value: Any
    consulted: tuple[str, ...] = ()
    reason: str = ""

    @property
    def known(self) -> bool:
        """Whether the release answered."""
        return not self.reason


class Source:
    """The source of one vLLM release, run with given platform objects in the place of its own.

    Args:
        root: The folder that holds the package folder `vllm`.
        given: Name to object, for the names that a platform or an installation decides (`current_platform`).
    """

    def __init__(self, root: Path, given: Mapping[str, Any]) -> None:
        self._root = root
        self._given = given
        self._namespaces: dict[str, _Namespace] = {}
        self.consulted: list[str] = []

    def ask(self, question: Callable[[Source], Any]) -> Answer:
        """Run `question`, which resolves what it needs from this source, and record what it ran."""
        self.consulted.clear()
        try:
            value = question(self)
        except Unanswerable as reason:
            return Answer(None, tuple(self.consulted), str(reason))
        except Exception as error:  # Foreign code, run out of its surroundings: anything it raises is "no answer".
            return Answer(None, tuple(self.consulted), f"{type(error).__name__}: {error}")
        return Answer(value, tuple(dict.fromkeys(self.consulted)))

    def resolve(self, symbol: str) -> Any:
        """The object that `module:name` stands for.

        Raises:
            Unanswerable: the release has no such thing, or it cannot be built here.
        """
        module, _, name = symbol.partition(":")
        if module.partition(".")[0] != "vllm":
            raise _Outside(f"it needs {name} from {module}")
        return self.namespace(module)[name]

    def namespace(self, module: str) -> _Namespace:
        """The lazily filled globals of a module.

        Raises:
            Unanswerable: the release has no such module.
        """
        if module not in self._namespaces:
            self._namespaces[module] = _Namespace(self, module, self._root, self._given)
        return self._namespaces[module]


class _Namespace(dict[str, Any]):
    """Globals of one module: a name is built when the code that runs asks for it."""

    def __init__(self, source: Source, module: str, root: Path, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._source = source
        self._module = module
        self._definitions, self._package = _definitions(root, module)
        self["__name__"] = module
        self["__builtins__"] = {**vars(builtins), "__import__": _no_import}
        self["__consulted__"] = source.consulted.append
        self["__resolve__"] = source.resolve
        self["__unknown__"] = _Unknown

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        statement = self._definitions.get(name)
        if statement is None:
            raise Unanswerable(f"{self._module} has no {name}")
        if isinstance(statement, ast.ImportFrom):
            self[name] = self._imported(statement, name)
        else:
            self._execute(statement)
        return self[name]

    def _imported(self, statement: ast.ImportFrom, name: str) -> Any:
        original = next(alias.name for alias in statement.names if name in (alias.asname, alias.name))
        return self._source.resolve(f"{_home(self._package, statement)}:{original}")

    def _execute(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.ClassDef):
            statement = self._class(statement)
        elif isinstance(statement, ast.FunctionDef):
            statement = self._recorded(statement, statement.name)
        for name in _names(_evaluated_at_once(statement)):
            # Code at class level looks names up past `__missing__`.
            if name not in self and not hasattr(builtins, name):
                self[name] = self[name]
        tree = ast.fix_missing_locations(ast.Module(body=[statement], type_ignores=[]))
        flags = __future__.annotations.compiler_flag
        exec(compile(tree, f"<{self._module}>", "exec", flags=flags, dont_inherit=True), self)

    def _class(self, original: ast.ClassDef) -> ast.ClassDef:
        """A class with its bases in vLLM and what can be asked of it without an instance."""
        bases: list[ast.expr] = []
        for base in original.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if not isinstance(plain, ast.Name):
                continue
            try:
                found = self[plain.id]
            except (_Outside, KeyError):
                continue
            if inspect.isclass(found):
                bases.append(plain)
        body = [kept for member in original.body if (kept := self._member(member, original.name)) is not None]
        return ast.ClassDef(original.name, bases, [], body or [ast.Pass()], [], **_type_parameters())

    def _member(self, member: ast.stmt, owner: str) -> ast.stmt | None:
        """A method or constant of the class itself, or in its place one that is unknown: never its base's instead."""
        kept: ast.stmt
        if isinstance(member, ast.FunctionDef):
            if not _kept_decorators(member):
                return None
            name, kept = member.name, self._recorded(member, f"{owner}.{member.name}")
        else:
            name, value = _assigned(member)
            if value is None:
                return None
            if not isinstance(value, ast.Name | ast.Attribute | ast.Constant):
                return _unknown(name, f"{self._module}:{owner}.{name}")
            kept = ast.Assign([ast.Name(name, ast.Store())], value)
        try:
            for needed in _names(_evaluated_at_once(kept)):
                if not hasattr(builtins, needed):
                    self[needed]
        except Unanswerable as reason:
            return _unknown(name, str(reason))
        return kept

    def _recorded(self, function: ast.FunctionDef, name: str) -> ast.FunctionDef:
        """The function without foreign decorators, telling `__consulted__` that it ran, local imports resolved here."""
        symbol = ast.Constant(f"{self._module}:{name}")
        record = ast.Expr(ast.Call(ast.Name("__consulted__", ast.Load()), [symbol], []))
        body = _LocalImports(self._package).visit(ast.Module(deepcopy(function.body), [])).body
        decorators = _kept_decorators(function)
        return ast.FunctionDef(function.name, function.args, [record, *body], decorators, None, **_type_parameters())


class _Unknown:
    """A class attribute that could not be built: to ask for it is to have no answer."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __get__(self, *_: object) -> Any:
        raise Unanswerable(self._reason)


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """The one name that a statement gives a value to, and the value; None for any other statement."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return "", None
    return (target.id, statement.value) if isinstance(target, ast.Name) else ("", None)


def _unknown(name: str, reason: str) -> ast.stmt:
    """`name = __unknown__(reason)`."""
    value = ast.Call(ast.Name("__unknown__", ast.Load()), [ast.Constant(reason)], [])
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _no_import(name: str, *_: object) -> Any:
    raise Unanswerable(f"it imports {name} when it runs")


def _kept_decorators(function: ast.FunctionDef) -> list[ast.expr]:
    return [d for d in function.decorator_list if isinstance(d, ast.Name) and d.id in _KEPT_DECORATORS]


class _LocalImports(ast.NodeTransformer):
    """`from vllm.x import Y` inside a function, as a call that resolves Y in this source."""

    def __init__(self, package: str) -> None:
        self._package = package

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        return [
            ast.Assign(
                [ast.Name(alias.asname or alias.name, ast.Store())],
                ast.Call(ast.Name("__resolve__", ast.Load()), [symbol], []),
            )
            for alias in node.names
            for symbol in [ast.Constant(f"{_home(self._package, node)}:{alias.name}")]
        ]


def _home(package: str, statement: ast.ImportFrom) -> str:
    """The module that a statement of `package` imports from."""
    if not statement.level:
        return statement.module or ""
    parents = package.split(".")
    return ".".join([*parents[: len(parents) - statement.level + 1], *filter(None, [statement.module])])


def _type_parameters() -> dict[str, Any]:
    """`type_params`, which nodes of Python 3.12 and later carry."""
    return {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}


def _evaluated_at_once(statement: ast.stmt) -> Iterable[ast.expr]:
    """The expressions that run when a definition is executed, not when it is called."""
    if isinstance(statement, ast.FunctionDef):
        yield from statement.args.defaults
        yield from (default for default in statement.args.kw_defaults if default is not None)
    elif isinstance(statement, ast.ClassDef):
        yield from statement.bases
        for member in statement.body:
            yield from _evaluated_at_once(member)
    elif isinstance(statement, ast.Assign):
        yield statement.value


def _names(expressions: Iterable[ast.expr]) -> list[str]:
    nodes = (node for expression in expressions for node in ast.walk(expression))
    return [node.id for node in nodes if isinstance(node, ast.Name)]


@cache
def _definitions(root: Path, module: str) -> tuple[dict[str, ast.stmt], str]:
    """What a module defines or imports by name at its top level, and the package that it is in."""
    stem = root.joinpath(*module.split("."))
    for file, package in ((stem.with_suffix(".py"), module.rpartition(".")[0]), (stem / "__init__.py", module)):
        if file.is_file():
            found: dict[str, ast.stmt] = {}
            for statement in ast.parse(file.read_bytes()).body:
                for name in _defined(statement):
                    found[name] = statement
            return found, package
    raise Unanswerable(f"this vLLM has no module {module}")


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []
