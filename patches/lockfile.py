"""`python -m patches.lockfile [RELEASE ...]`: put the fingerprints of releases into `upstream.lock`.

Whoever runs this has read what changed in the symbols: a locked fingerprint says that the patches fit that code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from patches.fingerprint import LOCK_FILE, SymbolMissingError, fingerprint, read_lock, write_lock
from patches.ledger import LEDGER, RELEASES
from patches.releases import ReleaseError, fetch


def lock_release(release: str, vllm_root: Path, path: Path = LOCK_FILE) -> int:
    """Lock every symbol of the ledger for an unpacked release; returns how many those are.

    Raises:
        SymbolMissingError: the ledger names a symbol for this release that the release does not have.
    """
    symbols = {symbol for patch in LEDGER if release in patch.releases for symbol in patch.symbols_of(release)}
    lock = read_lock(path) if path.exists() else {}
    lock[release] = {symbol: fingerprint(vllm_root, symbol) for symbol in symbols}
    write_lock(lock, path)
    return len(symbols)


def main(releases: list[str]) -> None:
    """Lock the named releases, or every release of the ledger, fetching what the cache lacks."""
    for release in releases or RELEASES:
        if release not in RELEASES:
            raise SystemExit(f"vLLM {release} is not in RELEASES of patches/ledger.py: add it there first")
        try:
            count = lock_release(release, fetch(release))
        except (ReleaseError, SymbolMissingError) as error:
            raise SystemExit(str(error)) from error
        print(f"locked {count} symbols of vLLM {release}")


if __name__ == "__main__":
    main(sys.argv[1:])
