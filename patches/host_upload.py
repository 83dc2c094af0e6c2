"""Small arrays from the host to the device, in stream order."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def upload(values: NDArray[np.int32], out: torch.Tensor) -> None:
    """Copy to the device in stream order, without waiting.

    Args:
        values: [n] on the host; may be reused at once.
        out: [n] int32 on the device.
    """
    host = torch.from_numpy(values)
    # The allocator of pinned memory keeps the staging block until the copy is done.
    out.copy_(host.pin_memory() if out.is_cuda else host, non_blocking=True)
