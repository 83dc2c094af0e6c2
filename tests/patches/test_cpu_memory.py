"""What the CPU engine keeps of batches of every size is bounded."""

import os
import subprocess
import sys
from pathlib import Path

from patches.cpu.engine import KEPT_PRODUCTS

HERE = Path(__file__).parent


def growth(variant: str) -> int:
    """MiB that batches of 41 to 120 rows add to those of 1 to 40."""
    inherited = {name: value for name, value in os.environ.items() if name not in KEPT_PRODUCTS}
    result = subprocess.run(
        [sys.executable, str(HERE / "matrix_products.py"), variant],
        env=inherited | {"PYTHONPATH": str(HERE.parents[1]), "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    before, after = map(int, result.stdout.split()[-2:])
    return after - before


def test_batches_of_every_size_do_not_add_up():
    assert growth("patched") < 16 < growth("stock")
