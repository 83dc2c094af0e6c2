import zipfile

import pytest

from patches import lockfile, releases


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(releases.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def downloads(monkeypatch):
    """Replaces the download by a small wheel; holds what was asked for."""
    asked = []

    def download(release, folder):
        asked.append(release)
        wheel = folder / "vllm.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in ("vllm/__init__.py", "vllm/_C.so", "vllm/v1/core.py", "other/__init__.py"):
                archive.writestr(name, "x = 1\n")
        return wheel

    monkeypatch.setattr(releases, "_download", download)
    return asked


def test_only_vllms_python_files_are_kept_and_fetched_once(cache, downloads):
    root = releases.fetch("0.32.0")
    assert root == releases.fetch("0.32.0") == releases.unpacked("0.32.0")
    assert downloads == ["0.32.0"]
    kept = sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())
    assert kept == ["0.32.0/vllm/__init__.py", "0.32.0/vllm/v1/core.py"]


def test_a_download_that_breaks_off_leaves_nothing(cache, monkeypatch):
    def broken(_release, folder):
        (folder / "vllm.whl").write_bytes(b"half")
        raise releases.ReleaseError("no route")

    monkeypatch.setattr(releases, "_download", broken)
    with pytest.raises(releases.ReleaseError, match="no route"):
        releases.fetch("0.32.0")
    assert list(cache.iterdir()) == []


def test_a_release_that_was_not_fetched_is_named_with_the_command_that_does(cache):
    with pytest.raises(releases.ReleaseError) as raised:
        releases.unpacked("0.30.0")
    assert str(raised.value) == f"vLLM 0.30.0 is not in {cache}: run `make releases`"


def test_a_release_outside_the_ledger_is_not_locked():
    with pytest.raises(SystemExit, match=r"vLLM 0\.27\.1 is not in RELEASES of patches/ledger\.py: add it there first"):
        lockfile.main(["0.27.1"])


@pytest.mark.usefixtures("downloads")
def test_a_locked_symbol_that_a_release_lacks_is_an_error():
    with pytest.raises(SystemExit, match="is not in this vLLM"):
        lockfile.main(["0.32.0"])
