"""The Hopper and ROCm Dockerfiles, through every step, on bases that carry the real wheel's Python files.

`make test-images` builds Hopper's whole, and ROCm's up to the check that refuses an altered vLLM; `make test-slow` the
other way round too.
"""

from pathlib import Path

import pytest

from patches.hardware import CUDA_HOPPER, ROCM_GFX950
from patches.install import survey
from serve.profile import load
from tests.docker.building import LOCK, Builder
from tests.docker.stand_in import RELEASE, SITE, altered, commit_of, fetch, make_stand_in

pytestmark = [pytest.mark.images, pytest.mark.timeout(900)]

STAND_IN = "localhost/vllm:stand-in"
INDEXER = "vllm.v1.attention.backends.mla.indexer"
MANAGER = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"


@pytest.fixture(scope="module")
def stand_in(builder: Builder) -> str:
    make_stand_in(builder, STAND_IN)
    return STAND_IN


@pytest.fixture(scope="module", params=[CUDA_HOPPER, pytest.param(ROCM_GFX950, marks=pytest.mark.slow)])
def hardware(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def image(builder: Builder, stand_in: str, hardware: str) -> str:
    tag = f"localhost/dspark-serve:{hardware}"
    builder.build(hardware, tag, stand_in)
    return tag


def test_the_labels_say_what_is_in_it(builder: Builder, image: str, hardware: str) -> None:
    labels = builder.inspect(image)["config"]["Labels"]
    patches = survey(release=RELEASE, hardware_name=hardware, vllm_root=None)
    assert labels["dspark-serve.hardware"] == hardware
    assert labels["dspark-serve.vllm.version"] == RELEASE
    assert labels["dspark-serve.vllm.commit"] == LOCK["vllm"]["commit"] == commit_of(fetch(RELEASE))
    assert labels["dspark-serve.patches"].split(",") == list(patches.applied)
    assert labels["dspark-serve.patchset"] == patches.digest


def test_it_serves_its_hardwares_profile_as_no_root(builder: Builder, image: str, hardware: str) -> None:
    config = builder.inspect(image)["config"]
    environment = dict(variable.split("=", 1) for variable in config["Env"])
    assert load(environment["DSPARK_PROFILE"]).hardware == hardware
    assert config["User"] == "1001:0"
    assert config["Entrypoint"] == ["tini", "--", "dspark-serve"]
    assert config["Cmd"] == ["up"]
    caches = {name: value for name, value in environment.items() if "CACHE" in name or name.endswith(("DIR", "BASE"))}
    assert len(caches) >= 6
    assert all(value == "/cache" or value.startswith("/cache/") for value in caches.values())


def test_it_adds_less_than_60_mb_and_no_cache(builder: Builder, stand_in: str, image: str) -> None:
    added = builder.size(image) - builder.size(stand_in)
    print(f"{image} adds {added / 1e6:.1f} MB to its base")
    assert added < 60e6
    with builder.mounted(image) as root:
        for absent in ("root/.cache", "sbom", "dist", "base.txt", "etc/pip.conf"):
            assert not (root / absent).exists(), absent
        assert (root / "usr/share/sbom/python.cdx.json").exists()


def test_it_finds_the_kernels_that_its_base_was_built_with(builder: Builder, hardware: str, image: str) -> None:
    if hardware != ROCM_GFX950:
        pytest.skip("AITER is on ROCm only")
    kernels = f"/{SITE}/aiter/jit"
    script = f"import sys; print(sys.path.index('/{SITE}') < sys.path.index('{kernels}'))"
    run = ("run", "--rm", "--no-healthcheck", "--network", "host")
    limits = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000")
    assert builder.podman(*run, *limits, "--entrypoint", "python3", image, "-c", script).stdout == "True\n"


@pytest.mark.parametrize(
    ("hardware", "module", "old", "new", "patch"),
    [
        pytest.param(
            CUDA_HOPPER,
            MANAGER,
            "req_ids = list(num_tokens_per_req)",
            "req_ids = [*num_tokens_per_req]",
            "adaptive-manager",
            marks=pytest.mark.slow,
        ),
        (ROCM_GFX950, INDEXER, "next_n = 1 + vllm_config", "next_n = vllm_config", "rocm-dsv41-adaptive"),
    ],
)
def test_the_build_fails_where_one_upstream_symbol_is_another(
    builder: Builder, stand_in: str, hardware: str, module: str, old: str, new: str, patch: str
) -> None:
    base = f"localhost/vllm:altered-{hardware}"
    altered(builder, stand_in, base, module, old, new)
    done = builder.build(hardware, "localhost/never:built", base, check=False)
    assert done.returncode != 0
    assert f"dspark-serve: the patch {patch} is refused: {module}:" in done.stdout
    assert "is not the code this patch was written against" in done.stdout
    assert builder.buildah("inspect", "--type", "image", "localhost/never:built", check=False).returncode != 0


def test_the_build_fails_where_a_label_would_not_be_true(builder: Builder, stand_in: str) -> None:
    done = builder.build(CUDA_HOPPER, "localhost/never:built", stand_in, check=False, PATCHSET="0123456789abcdef")
    assert done.returncode != 0
    assert "PATCHSET is '0123456789abcdef' and the image has '" in done.stdout


@pytest.mark.slow
def test_the_build_fails_without_the_kernels_compiler(builder: Builder, stand_in: str) -> None:
    base = "localhost/vllm:no-nvcc"
    with builder.container(stand_in) as (name, root):
        Path(root / "usr/bin/nvcc").unlink()
        builder.buildah("commit", name, base)
    done = builder.build(CUDA_HOPPER, "localhost/never:built", base, check=False)
    assert done.returncode != 0
    assert "nvcc: not found" in done.stdout
