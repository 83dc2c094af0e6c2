"""`python -m tests.bench.micro_metadata`: the sparse indexer's decode metadata by upstream's code and by one kernel.

Prints a JSON line for each comparison with the reference, then in every round one for each number of requests:
microseconds until the device is done, and until the host may go on. A host slows down for seconds at a time, more than
the batches differ, so one round says little. Each line comes as soon as it is there, and all from one process, since
importing vLLM takes longer than any of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from patches import hardware
from patches.install import vllm_release
from tests.bench.arms import REPOSITORY

PROBE = REPOSITORY / "tests/patches/releases/probes/ragged_metadata.py"
BATCHES = ((1, 8, 64), (16, 8, 64), (32, 8, 64), (64, 8, 64), (128, 4, 64), (128, 8, 64), (128, 8, 2048))
"""(requests, tokens of each, pages of a block table)"""
ROUNDS = 9


def main() -> None:
    on_gpu = torch.cuda.is_available()
    name = hardware.detect().name if on_gpu else hardware.CUDA_HOPPER
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "VLLM_PLUGINS": "none"}
    if not on_gpu:
        environment["TRITON_INTERPRET"] = "1"
    checks = (("adaptive", 0, 1000), ("replay", 1, 200)) if on_gpu else (("adaptive", 0, 20),)
    batches = BATCHES if on_gpu else BATCHES[1:2]
    tasks = [*checks, *(("time", *batch) for _ in range(ROUNDS if on_gpu else 1) for batch in batches)]
    words = " then ".join(" ".join(map(str, task)) for task in tasks).split()
    command = [sys.executable, str(PROBE), vllm_release(), name, "ragged-metadata-kernel", *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answers = (line for line in process.stdout if line.startswith("{"))
        for (task, *numbers), answer in zip(tasks, answers, strict=False):
            found = json.loads(answer)
            if task == "time":
                row = dict(zip(("requests", "tokens", "pages"), numbers, strict=True), costs=found)
            else:
                row = {"check": " ".join(map(str, (task, *numbers))), "found": found}
            print(json.dumps(row), flush=True)
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
