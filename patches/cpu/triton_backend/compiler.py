"""The compiler half of the interpreter backend: it supports no target and refuses to compile."""

from types import ModuleType
from typing import NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget, Language


class InterpretedCompiler(BaseBackend):  # type: ignore[misc]
    """Stands for 'kernels are interpreted'; `triton.backends.compiler.BaseBackend` names the methods."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """No target: there is nothing to compile for."""
        return False

    def hash(self) -> str:
        """A constant, since no code is ever produced."""
        return "interpreted"

    def parse_options(self, options: dict[str, object]) -> NoReturn:
        """Refuse: a kernel reached the compiler, so the interpreter is off."""
        raise RuntimeError("kernels are interpreted on this CPU: set TRITON_INTERPRET=1 before Triton is imported")

    def add_stages(self, stages: dict[str, object], options: object, language: Language) -> None:
        """No stages."""

    def load_dialects(self, context: object) -> None:
        """No dialects."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """No device libraries."""
        return {}
