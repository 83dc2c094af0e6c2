"""The driver half of the interpreter backend: never active, so Triton never selects it by itself."""

from typing import NoReturn

from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):  # type: ignore[misc]
    """Answers vLLM's question whether a driver exists; `triton.backends.driver.DriverBase` names the methods."""

    @classmethod
    def is_active(cls) -> bool:
        """Always False: on a host with a GPU the real driver must be the only active one."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        """Refuse: there is no launcher."""
        raise RuntimeError("kernels are interpreted on this CPU: there is no launcher")

    def get_current_target(self) -> NoReturn:
        """Refuse: there is no target."""
        raise RuntimeError("kernels are interpreted on this CPU: there is no compile target")

    def get_active_torch_device(self) -> NoReturn:
        """Refuse: there is no device of Triton's own."""
        raise RuntimeError("kernels are interpreted on this CPU: there is no Triton device")

    def get_benchmarker(self) -> NoReturn:
        """Refuse: interpreted kernels are not tuned."""
        raise RuntimeError("kernels are interpreted on this CPU: there is nothing to benchmark")
