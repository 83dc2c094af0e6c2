"""The generated tables, and that README's are current once it has the markers."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.docs import TABLES, checks_table, main, profiles_table, rendered
from serve.errors import InputError
from serve.preflight.checks import TABLE
from serve.profile import bundled_names

README = Path(__file__).parents[2] / "README.md"


def test_every_profile_and_every_check_has_a_row() -> None:
    assert [line.split("`")[1] for line in profiles_table().splitlines()[2:]] == bundled_names()
    assert [line.split("`")[1] for line in checks_table().splitlines()[2:]] == [check.id for check in TABLE]
    for table in (profiles_table(), checks_table()):
        assert len({line.count("|") - line.count("\\|") for line in table.splitlines()}) == 1


def test_tables_are_put_between_their_markers_and_nothing_else_changes() -> None:
    text = "a\n<!-- profiles -->\nstale\n<!-- /profiles -->\nb\n<!-- checks --><!-- /checks -->\nc\n"
    made = rendered(text)
    assert made.startswith("a\n<!-- profiles -->\n| profile |")
    assert made.endswith("<!-- /checks -->\nc\n")
    assert "stale" not in made
    assert rendered(made) == made
    assert rendered("no markers") == "no markers"


def test_a_marker_without_an_end_is_refused() -> None:
    with pytest.raises(InputError, match="profiles"):
        rendered("<!-- /profiles --> <!-- profiles -->")


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "README.md"
    file.write_text("<!-- checks --><!-- /checks -->")
    assert main(["--write", str(file)]) == 0
    assert file.read_text() == rendered(file.read_text())
    assert checks_table() in file.read_text()
    assert main(["--write", str(tmp_path / "missing.md")]) == 2
    assert main(["README.md"]) == 2
    assert "python -m serve.docs --write" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(TABLES))
def test_readme_is_current(name: str) -> None:
    text = README.read_text()
    assert f"<!-- {name} -->" in text
    assert rendered(text) == text, "run: python -m serve.docs --write README.md"
