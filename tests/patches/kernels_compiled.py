"""Compiles every kernel of ours for the hardware that images are built for, without that hardware.

Prints `kernel constants target` for each that compiled; the first that does not ends the process.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from patches.flattened_rows import _flatten_kernel
from patches.ranking import _allot_kernel

TARGETS = (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx950", 64))
VARIANTS: tuple[tuple[Any, dict[str, int], int], ...] = (
    (_flatten_kernel, {"REQUESTS": 1, "COLUMNS": 1024}, 4),
    (_flatten_kernel, {"REQUESTS": 256, "COLUMNS": 1024}, 4),
    (_allot_kernel, {"STEPS": 7, "REQUESTS": 16, "COLUMNS": 8}, 1),
    (_allot_kernel, {"STEPS": 7, "REQUESTS": 256, "COLUMNS": 8}, 8),
    (_allot_kernel, {"STEPS": 16, "REQUESTS": 1024, "COLUMNS": 16}, 16),
)


def kind(name: str, constants: dict[str, int]) -> str:
    if name in constants:
        return "constexpr"
    if not name.endswith("_ptr"):
        return "i32"
    return "*fp32" if name == "confidences_ptr" else "*i32"


def main() -> None:
    for kernel, constants, num_warps in VARIANTS:
        source = ASTSource(
            kernel,
            {name: kind(name, constants) for name in kernel.arg_names},
            constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        )
        for target in TARGETS:
            triton.compile(source, target=target, options={"num_warps": num_warps})
            print(kernel.__name__, constants, target.arch, flush=True)


if __name__ == "__main__":
    main()
