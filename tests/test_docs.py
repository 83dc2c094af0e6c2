"""Everything a user can set or read has its place in the README."""

import re
from pathlib import Path

import pytest

from serve.app import OWN_PATHS, build_own_app
from serve.lifecycle import Lifecycle
from serve.metrics import Combined
from serve.modes import ModeSwitch
from serve.profile import Profile, Verification

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SOURCES = [path for folder in ("serve", "patches") for path in (ROOT / folder).rglob("*.py")]


def names(pattern: str) -> set[str]:
    """Every match of a pattern in the package's source."""
    return {match for path in SOURCES for match in re.findall(pattern, path.read_text())}


@pytest.mark.parametrize("variable", sorted(names(r"\bDSPARK_[A-Z_]+\b")))
def test_every_environment_variable_is_explained(variable: str) -> None:
    assert f"`{variable}`" in README


@pytest.mark.parametrize("series", sorted(names(r'(?:Counter|Gauge|Histogram|Info)MetricFamily\(\s*"(dspark_\w+)"')))
def test_every_metric_is_explained(series: str) -> None:
    assert f"`{series}" in README


def test_every_explained_metric_exists() -> None:
    made = names(r'"(dspark_\w+)"')
    for series in re.findall(r"^\| `(dspark_\w+)", README, re.MULTILINE):
        assert re.sub(r"(_total|_info)$", "", series) in made


def test_every_path_of_ours_is_explained() -> None:
    life = Lifecycle()
    app = build_own_app(life, Combined(), dict, {}, ModeSwitch(life, Verification.ADAPTIVE))
    routes = {route.path for route in app.routes}  # type: ignore[attr-defined]
    for path in routes:
        assert f"`{path}`" in README, path
        assert any(path == own or path.startswith(own + "/") for own in OWN_PATHS)


def test_every_key_of_a_profile_is_described() -> None:
    assert [name for name, key in Profile.model_fields.items() if not key.description] == []


def test_the_make_targets_it_names_exist() -> None:
    makefiles = "\n".join(p.read_text() for p in [ROOT / "Makefile", *(ROOT / "make").glob("*.mk")])
    for target in re.findall(r"`make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefiles, re.MULTILINE), target


def test_no_placeholder_is_left() -> None:
    assert re.findall(r"^[A-Z_]{4,}$", README, re.MULTILINE) == []


def test_the_readme_leads_with_the_two_commands() -> None:
    blocks = re.findall(r"```console\n\$ (make \w+)", README)
    assert blocks[:2] == ["make serve", "make test"]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()
