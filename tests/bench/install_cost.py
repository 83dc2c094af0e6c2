"""`python -m tests.bench.install_cost`: what the plugin costs a process at start, in CPU time.

Where nothing applies, the plugin detects the hardware, reads the lock and decides. Where patches apply, it also parses
the upstream modules that they touch and imports the patches; torch is imported before it is measured, since vLLM has
imported it by then.
"""

import os
import statistics
import subprocess
import sys

PROCESSES = 9
MEASURE = """
import importlib.metadata, time
importlib.metadata.entry_points(group="vllm.general_plugins")  # how vLLM found the plugin
{before}
start = time.process_time()
from patches.plugin import register
register()
print((time.process_time() - start) * 1e3)
"""
CASES = {
    "nothing applies": "from patches import hardware; hardware.detect = lambda: hardware.Hardware('none', '')",
    "this machine": "import torch, vllm.envs",
}


def milliseconds(before: str) -> list[float]:
    """CPU time of `register` in processes of its own."""
    command = [sys.executable, "-c", MEASURE.format(before=before)]
    runs = [
        subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True) for _ in range(PROCESSES)
    ]
    return [float(run.stdout.split()[-1]) for run in runs]


if __name__ == "__main__":
    for name, before in CASES.items():
        measured = milliseconds(before)
        print(f"{name}: median {statistics.median(measured):.1f} ms, least {min(measured):.1f} ms")
