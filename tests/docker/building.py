"""Images without a registry and without a Docker engine: buildah builds them on a Debian that debootstrap made."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.images import build_arguments, read_lock

ROOT = Path(__file__).parents[2]
LOCK = read_lock(ROOT / "docker" / "images.lock")
BASE = "localhost/base:bookworm"
KEPT_STORE = os.environ.get("TEST_IMAGE_STORE")
"""A folder that keeps the store from run to run, for who changes a Dockerfile again and again."""
TOOLS = ("buildah", "podman", "runc", "debootstrap")


def why_not() -> str | None:
    """Why no image can be built here, or None."""
    if os.geteuid() != 0:
        return "building images needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (Debian has them)" if missing else None


@dataclass
class Builder:
    """A store of images of its own, and the tools that work in it."""

    folder: Path
    driver: str

    @classmethod
    def in_folder(cls, folder: Path) -> Builder:
        """A store with overlay layers, or whole copies where the kernel has no overlay for us."""
        layers = [folder / name for name in ("lower", "upper", "work", "merged")]
        for layer in layers:
            layer.mkdir(parents=True, exist_ok=True)
        lower, upper, work, merged = layers
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mount = ["mount", "-t", "overlay", "overlay", "-o", options, merged]
        mounted = subprocess.run(mount, capture_output=True, check=False)
        if mounted.returncode == 0:
            subprocess.run(["umount", merged], check=True)
        return cls(folder, "vfs" if mounted.returncode else "overlay")

    @property
    def storage(self) -> list[str]:
        """What every tool needs to work in this store."""
        root, run = self.folder / "store", self.folder / "run"
        return ["--root", str(root), "--runroot", str(run), "--storage-driver", self.driver]

    def buildah(self, *words: str, check: bool = True, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Run buildah; its output is standard output and error together."""
        return _run(["buildah", *self.storage, *words], check, timeout)

    def podman(self, *words: str, check: bool = True, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run podman with runc, which needs no systemd here."""
        return _run(
            ["podman", *self.storage, "--runtime", "runc", "--cgroup-manager", "cgroupfs", *words], check, timeout
        )

    def build(
        self, hardware: str, tag: str, base: str = BASE, check: bool = True, keep: bool = True, **arguments: str
    ) -> subprocess.CompletedProcess[str]:
        """Build a Dockerfile of the repository on a base, with the arguments that make gives.

        With `keep`, each step is kept for the next build, which costs copies of what is in it.
        """
        given = {**build_arguments(hardware, LOCK), "BASE_IMAGE": base, **arguments}
        configuration, volumes = self.pip_access()
        return self.buildah(
            *(
                "bud",
                "--isolation",
                "chroot",
                "--format",
                "docker",
                "--network",
                "host",
                f"--layers={str(keep).lower()}",
            ),
            *("--secret", f"id=pip,src={configuration}", *volumes),
            *(f"--build-arg={name}={value}" for name, value in given.items()),
            *("--tag", tag, "--file", f"docker/{hardware}/Dockerfile", str(ROOT)),
            check=check,
        )

    def pip_access(self) -> tuple[Path, list[str]]:
        """A file with this machine's pip configuration, and the volumes that it needs."""
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        ).stdout
        settings = dict(re.findall(r"^(?:global|user|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
        wanted = ("cert", "find-links", "index-url", "extra-index-url")
        kept = {name: settings[name] for name in wanted if name in settings}
        secret = self.folder / "pip.conf"
        secret.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in kept.items()))
        words = []
        for path in sorted(set(re.findall(r"(?:^|\s|file://)(/[\w./-]+)", " ".join(kept.values())))):
            if Path(path).exists():
                # An index of files points to its neighbours.
                folder = Path(path).parent if Path(path).name == "simple" else Path(path)
                words += ["--volume", f"{folder}:{folder}:ro"]
        return secret, words

    def inspect(self, tag: str) -> dict[str, Any]:
        """The image's configuration."""
        content: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", tag).stdout)["Docker"]
        return content

    def size(self, tag: str) -> int:
        """The image's size in bytes, layers of its base included."""
        return int(json.loads(self.podman("image", "inspect", tag).stdout)[0]["Size"])

    @contextlib.contextmanager
    def mounted(self, tag: str) -> Iterator[Path]:
        """The image's root file system."""
        path = self.podman("image", "mount", tag).stdout.strip()
        try:
            yield Path(path)
        finally:
            self.podman("image", "unmount", tag)

    @contextlib.contextmanager
    def container(self, base: str) -> Iterator[tuple[str, Path]]:
        """A container to change by hand: its name and its root file system."""
        name = self.buildah("from", base).stdout.split()[-1]
        try:
            yield name, Path(self.buildah("mount", name).stdout.split()[-1])
        finally:
            self.buildah("rm", name)

    def remove(self) -> None:
        """Everything of the store, mounts included."""
        self.podman("rm", "--all", "--force", "--time", "0", check=False)
        self.buildah("rm", "--all", check=False)
        self.buildah("rmi", "--all", "--force", check=False)


def make_base(builder: Builder) -> None:
    """Debian with Python, pip and venv, as `BASE`: stands where a slim Python image is."""
    if builder.buildah("inspect", "--type", "image", BASE, check=False).returncode == 0:
        return
    root = builder.folder / "debian"
    packages = "ca-certificates,python3,python3-pip,python3-venv"
    _run(["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root)], True, 600)
    shutil.rmtree(root / "var" / "cache" / "apt")
    shutil.rmtree(root / "var" / "lib" / "apt" / "lists")
    name = builder.buildah("from", "scratch").stdout.split()[-1]
    builder.buildah("add", name, str(root), "/")
    builder.buildah("config", "--cmd", "python3", name)
    builder.buildah("commit", "--rm", name, BASE)
    shutil.rmtree(root)


def make_wheels() -> None:
    """The wheels that the images install; the environment stays as it is."""
    environment = Path(sys.executable).parents[1]
    _run(["make", "wheels", f"VENV={environment}", "--old-file", f"{environment}/.ready"], True, 300)


def _run(command: list[str], check: bool, timeout: float) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        check=False,
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-6000:]}"
    return done
