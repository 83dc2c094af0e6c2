"""What Triton's interpreter lacks to run vLLM's kernels, and what makes it fast enough to watch.

Triton symbols are named for 3.9.0, which the CPU engine pins.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from patches.install import Hook


def _repair(interpreter: ModuleType) -> None:
    _accept_integer_masks(interpreter)
    _remap_language_once(interpreter)


def _accept_integer_masks(interpreter: ModuleType) -> None:
    """`_interpreter.load` and `store` take boolean masks only, and vLLM's kernels combine masks into integers."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask: Any) -> Any:
        if mask.data.dtype == np.bool_:
            return mask
        return interpreter.TensorHandle(mask.data.astype(np.bool_), interpreter.tl.int1)

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        """`InterpreterBuilder.create_masked_load` with the mask as booleans."""
        return load(self, ptrs, as_bool(mask), *rest)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        """`InterpreterBuilder.create_masked_store` with the mask as booleans."""
        return store(self, ptrs, value, as_bool(mask), *rest)

    builder.create_masked_load = masked_load
    builder.create_masked_store = masked_store


def _remap_language_once(interpreter: ModuleType) -> None:
    """Keep `triton.language` remapped between launches.

    `_patch_lang` walks every member of `triton.language` at each launch and at each device-function call, and puts
    it back after the launch. Nothing is ever compiled in a process that interprets, so the first remapping of a
    language module can stay: about a third of a step's time.
    """
    remap = interpreter._patch_lang
    kept: set[frozenset[int]] = set()

    class KeptScope:
        """Stands in for `_LangPatchScope` and restores nothing."""

        def restore(self) -> None:
            """Keep the remapping."""

    def remap_once(fn: Any) -> KeptScope:
        """`_patch_lang`, once for each set of language modules that a kernel sees."""
        core = (interpreter.tl, interpreter.tl.core)
        seen = frozenset(id(value) for value in fn.__globals__.values() if any(value is lang for lang in core))
        if seen not in kept:
            remap(fn)
            kept.add(seen)
        return KeptScope()

    interpreter._patch_lang = remap_once  # type: ignore[attr-defined]


def _supply_log1p(libdevice: ModuleType) -> None:
    """`libdevice.log1p` is an empty stub outside a compiler; block verification's residual needs it."""
    from triton.runtime.interpreter import TensorHandle

    def log1p(value: Any) -> Any:
        """log(1 + value), elementwise."""
        import triton.language as tl

        # Masked-off lanes may hold anything; the kernel drops them afterwards.
        with np.errstate(all="ignore"):
            result = np.log1p(value.handle.data)
        return tl.core.tensor(TensorHandle(result, value.handle.dtype), value.type)

    libdevice.log1p = log1p  # type: ignore[attr-defined]


HOOKS: Mapping[str, Hook] = {
    "triton.runtime.interpreter": _repair,
    "triton.language.extra.libdevice": _supply_log1p,
}
