"""usage: matrix_products.py stock|patched

Products of the kinds that layers of the tiny pair make, of batches of 1 to 120 rows, with vLLM's operators and with
PyTorch's. Prints the process's memory in MiB that no file stands behind, after 40 sizes and after all.
"""

import sys

import psutil
import torch
from vllm import _custom_ops as ops

from patches.cpu.engine import HOOKS
from tests.bench.soak import mib_without_files

SHAPES = [(128, 256), (128, 128), (128, 512), (256, 128), (128, 384), (384, 128)]
LAYERS = 6


if sys.argv[1] == "patched":
    HOOKS["vllm._custom_ops"](ops)
weights = [torch.randn(shape, dtype=torch.bfloat16) for shape in SHAPES * LAYERS]
layers = [(len(weight), ops.create_onednn_mm(weight, 32)) for weight in weights]
found = []
for rows in range(1, 121):
    for columns, layer in layers:
        ops.onednn_mm(layer, torch.randn(rows, columns, dtype=torch.bfloat16), None)
    for weight in weights[: len(SHAPES)]:
        torch.randn(rows, len(weight), dtype=torch.bfloat16) @ weight
    if rows in (40, 120):
        found.append(round(mib_without_files(psutil.Process())))
print(*found)
