"""`python -m patches.releases [VERSION ...]`: the Python files of vLLM's released wheels, to hold the ledger against.

A wheel is a few hundred megabytes of kernels around a few tens of readable code, and only the code is needed. Each
release is fetched once, its `.py` files are kept in `<cache>/<version>/`, and the wheel is deleted. The cache is
`.cache/releases` under the current folder, or what `DSPARK_RELEASES_CACHE` names.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from patches.ledger import RELEASES

CACHE_VARIABLE = "DSPARK_RELEASES_CACHE"

_PYTHON = ("--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:")
_GLIBC_MINORS = (39, 38, 37, 36, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
"""Wheels name the oldest glibc they run on; nothing is run here, so every one is welcome."""


class ReleaseError(RuntimeError):
    """A release could not be fetched or is not in the cache."""


def cache_folder() -> Path:
    """Where unpacked releases lie."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.cwd() / ".cache" / "releases").absolute()


def unpacked(release: str) -> Path:
    """The folder that holds a cached release's package folder `vllm`.

    Raises:
        ReleaseError: the release was not fetched yet.
    """
    root = cache_folder() / release
    if not (root / "vllm").is_dir():
        raise ReleaseError(f"vLLM {release} is not in {cache_folder()}: run `make releases`")
    return root


def fetch(release: str) -> Path:
    """Download and unpack a release unless the cache has it; returns what `unpacked` returns.

    A release enters the cache by one rename, so that an interrupted download leaves nothing that looks like one.

    Raises:
        ReleaseError: there is no such release, or it could not be downloaded.
    """
    root = cache_folder() / release
    if root.is_dir():
        return unpacked(release)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=f"{release}-") as work:
        wheel = _download(release, Path(work))
        kept = Path(work) / "kept"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(kept, [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")])
        # Someone else may have fetched it meanwhile; theirs is as good.
        if not root.is_dir():
            kept.rename(root)
    return unpacked(release)


def _download(release: str, folder: Path) -> Path:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS] + ["manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", *_PYTHON]
    for platform in platforms:
        command += ["--platform", platform]
    result = subprocess.run(
        [*command, "--dest", str(folder), f"vllm=={release}"], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        said = result.stderr.strip().splitlines() or ["pip said nothing"]
        raise ReleaseError(f"vLLM {release} could not be downloaded: {said[-1]}")
    return wheels[0]


def main(releases: list[str]) -> None:
    """Fetch the named releases, or every release that the ledger knows."""
    for release in releases or RELEASES:
        try:
            print(f"vLLM {release}: {fetch(release)}", flush=True)
        except ReleaseError as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main(sys.argv[1:])
