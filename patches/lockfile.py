"""`python -m patches.lockfile RELEASE ROOT`: put a release's fingerprints into `upstream.lock`."""

from __future__ import annotations

import sys
from pathlib import Path

from patches.fingerprint import LOCK_FILE, fingerprints, read_lock, write_lock
from patches.ledger import LEDGER


def lock_release(release: str, vllm_root: Path, path: Path = LOCK_FILE) -> int:
    """Lock every symbol of the ledger that the unpacked release has; returns how many those are.

    Raises:
        SystemExit: the folder holds no vLLM.
    """
    if not (vllm_root / "vllm").is_dir():
        raise SystemExit(f"{vllm_root} holds no package folder 'vllm'; give the folder that a wheel was unpacked into")
    symbols = sorted({symbol for patch in LEDGER if release in patch.releases for symbol in patch.symbols})
    lock = read_lock(path) if path.exists() else {}
    lock[release] = fingerprints(vllm_root, symbols)
    write_lock(lock, path)
    return len(lock[release])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    print(f"locked {lock_release(sys.argv[1], Path(sys.argv[2]))} symbols of vLLM {sys.argv[1]}")
