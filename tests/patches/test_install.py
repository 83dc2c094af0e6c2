"""Installing in real processes: hooks, failures, bindings, fork and spawn."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

REPOSITORY = Path(__file__).parents[2]

UPSTREAM = {
    "upstream_home": "def planned(): return 'upstream'",
    "upstream_user": "from upstream_home import planned",
    "upstream_early": "from upstream_home import planned",
    "upstream_swallows": "try:\n    import upstream_home\nexcept Exception:\n    pass",
}
PATCHES = {
    "a_patch": """
        from patches.install import replace_everywhere
        runs = []
        def ours(): return "ours"
        def hook(module):
            runs.append(module.__name__)
            replace_everywhere("planned", ours, module, ("upstream_early",))
        HOOKS = {"upstream_home": hook}
    """,
    "a_patch_that_raises": """
        def hook(module): raise ValueError("no such attribute")
        HOOKS = {"upstream_home": hook}
    """,
    "a_patch_that_forgets": """
        HOOKS = {"upstream_home": lambda module: setattr(module, "planned", None)}
    """,
    "a_patch_that_does_not_import": "import no_such_module",
}
PREAMBLE = """
    import os, sys
    from patches.install import Decision, Installed, PatchError, apply, install, is_applied, report
    from patches.ledger import EVERYWHERE, Patch, Status
    def apply_only(module, bound_in=()):
        patch = Patch("p", "what", "upstream", EVERYWHERE, ("0.32.0",), module, "never",
                      bound_in={"upstream_home:planned": bound_in})
        return apply(Installed("0.32.0", "cpu", (Decision(patch, Status.APPLIED),)))
"""


@pytest.fixture
def run(tmp_path):
    """Run code in a process of its own that can import the modules above; returns the finished process."""
    for name, source in (UPSTREAM | PATCHES).items():
        (tmp_path / f"{name}.py").write_text(dedent(source))

    def run_code(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(dedent(PREAMBLE) + dedent(code))
        search_path = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
        return subprocess.run(
            [sys.executable, str(script)],
            env=os.environ | {"PYTHONPATH": search_path} | environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run_code


def test_every_binding_is_ours_whether_imported_before_or_after(run):
    done = run("""
        import upstream_early
        apply_only("a_patch", ("upstream_user", "upstream_early"))
        import upstream_home, upstream_user, a_patch
        assert upstream_home.planned() == upstream_user.planned() == upstream_early.planned() == "ours"
        assert a_patch.runs == ["upstream_home"]
        assert is_applied("p") and report()["applied"] == ["p"] and report()["digest"]
    """)
    assert done.returncode == 0, done.stderr


def test_a_hook_that_raises_ends_the_process(run):
    done = run("""
        apply_only("a_patch_that_raises")
        import upstream_home
        print("went on")
    """)
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert "PatchError: dspark patch p could not be installed in upstream_home: no such attribute" in done.stderr


def test_a_failure_that_upstream_swallows_is_still_reported(run):
    done = run("""
        apply_only("a_patch_that_raises")
        import upstream_swallows
        assert report()["digest"] is None
        assert report()["failure"] == "dspark patch p could not be installed in upstream_home: no such attribute"
        try:
            install()
        except PatchError as error:
            print(error)
    """)
    assert done.returncode == 0, done.stderr
    assert "could not be installed in upstream_home" in done.stdout


def test_a_patch_module_that_does_not_import_ends_the_process(run):
    done = run('apply_only("a_patch_that_does_not_import")')
    assert done.returncode == 1
    assert "dspark patch p could not be installed in a_patch_that_does_not_import: No module named" in done.stderr


def test_a_binding_that_is_not_ours_ends_the_process(run):
    done = run("""
        apply_only("a_patch_that_forgets", ("upstream_user",))
        import upstream_user
    """)
    assert done.returncode == 1
    assert "upstream_user.planned is not the replacement of upstream_home:planned" in done.stderr


def test_installing_twice_changes_nothing(run):
    done = run("""
        first = install()
        import vllm.config.vllm as config
        validate = vars(config.VllmConfig)["_validate_adaptive_verification"]
        assert install() is first and not first.refused, first.refused
        assert vars(config.VllmConfig)["_validate_adaptive_verification"] is validate
        assert not hasattr(validate.__wrapped__, "__wrapped__"), "wrapped twice"
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_reports_the_same_digest(run, method):
    done = run(f"""
        import multiprocessing
        def child(queue):
            install()
            queue.put(report())
        if __name__ == "__main__":
            expected = install().digest
            context = multiprocessing.get_context("{method}")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            answer = queue.get(timeout=60)
            process.join()
            assert answer["digest"] == expected, answer
    """)
    assert done.returncode == 0, done.stderr


def test_a_refused_patch_is_loud_and_named(run):
    done = run(
        """
        import logging
        logging.basicConfig()
        assert [d.patch.id for d in install().refused] == ["tp-consensus"]
        """,
        DSPARK_PATCHES_OFF="tp-consensus",
    )
    assert done.returncode == 0, done.stderr
    assert "ERROR:vllm.dspark:dspark patch tp-consensus refused" in done.stderr


def test_the_entry_point_imports_nothing_that_can_fail():
    source = (REPOSITORY / "patches" / "plugin.py").read_text()
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert imports == []
