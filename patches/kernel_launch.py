"""Launching a Triton kernel at the cost of the launch.

`kernel[grid](...)` binds and specialises every argument anew to find the variant that it compiled earlier; with a
dozen arguments that takes longer than a small kernel runs. A variant that holds for all values of its arguments can
be kept and launched by itself. It does where no argument is specialised: name the integers in `do_not_specialize`
and the pointers in `do_not_specialize_on_alignment`, and let no argument change its type.
"""

from __future__ import annotations

from typing import Any


class Launcher:
    """One kernel for one owner, whose tensors keep their types and their device."""

    def __init__(self, kernel: Any) -> None:
        """Launch `kernel`, a `triton.jit` function whose constexpr parameters come last."""
        self._kernel = kernel
        self._variants: dict[tuple[int, ...], Any] = {}

    def launch(self, grid: int, arguments: tuple[Any, ...], constants: tuple[int, ...], num_warps: int) -> None:
        """Launch `grid` programs.

        Args:
            grid: Programs, at least one.
            arguments: The parameters that are not constexpr, in order.
            constants: The constexpr parameters, in order. With `num_warps` they name the variant.
            num_warps: The same for the same `constants`.
        """
        variant = self._variants.get(constants)
        if variant is None:
            # Compiles where this process has not yet; the interpreter keeps nothing and returns None.
            compiled = self._kernel[(grid,)](*arguments, *constants, num_warps=num_warps)
            if compiled is not None:
                self._variants[constants] = compiled
        else:
            variant[(grid, 1, 1)](*arguments, *constants)
