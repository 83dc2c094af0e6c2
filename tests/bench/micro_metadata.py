"""`python -m tests.bench.micro_metadata`: the sparse indexer's decode metadata by upstream's code and by one kernel.

Prints a JSON line for each comparison with the reference, then one for every number of requests: microseconds until
the device is done, and until the host may go on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

from patches import hardware
from patches.install import vllm_release
from tests.bench.arms import REPOSITORY

PROBE = REPOSITORY / "tests/patches/releases/probes/ragged_metadata.py"
BATCHES = ((1, 8, 64), (16, 8, 64), (32, 8, 64), (64, 8, 64), (128, 4, 64), (128, 8, 64), (128, 8, 2048))
"""(requests, tokens of each, pages of a block table)"""


def main() -> None:
    on_gpu = torch.cuda.is_available()
    name = hardware.detect().name if on_gpu else hardware.CUDA_HOPPER
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "VLLM_PLUGINS": "none"}
    if not on_gpu:
        environment["TRITON_INTERPRET"] = "1"

    def probe(*task: object) -> Any:
        process = subprocess.run(
            [sys.executable, str(PROBE), vllm_release(), name, "ragged-metadata-kernel", *map(str, task)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if process.returncode:
            sys.exit(process.stderr[-3000:])
        return json.loads(process.stdout.strip().splitlines()[-1])

    checks = (("adaptive", 0, 1000), ("replay", 1, 200)) if on_gpu else (("adaptive", 0, 20),)
    for check in checks:
        print(json.dumps({"check": " ".join(map(str, check)), "found": probe(*check)}), flush=True)
    for batch in BATCHES if on_gpu else BATCHES[1:2]:
        costs = probe("time", *batch)
        print(json.dumps(dict(zip(("requests", "tokens", "pages"), batch, strict=True), costs=costs)), flush=True)


if __name__ == "__main__":
    main()
