"""Every row of the ledger against the code of every release, from the real wheels."""

import ast

import pytest

from patches.fingerprint import fingerprint, fingerprints, read_lock
from patches.hardware import SERVED
from patches.install import Status, decide, survey
from patches.ledger import LEDGER, RELEASES
from patches.releases import unpacked
from tests.patches.releases.bindings import binding_modules

NEEDED = [(patch, release) for patch in LEDGER for release in patch.releases]


def named(cases):
    return [pytest.param(patch, release, id=f"{patch.id}-{release}") for patch, release in cases]


@pytest.mark.parametrize("hardware", SERVED)
def test_what_is_needed_applies_and_the_rest_is_reported_as_not_needed(release, vllm_root, hardware):
    result = survey(release=release, hardware_name=hardware, vllm_root=vllm_root)
    for decision in result.decisions:
        if hardware not in decision.patch.hardware:
            assert decision.status is Status.OTHER_HARDWARE
        elif release in decision.patch.releases:
            assert (decision.status, decision.reason) == (Status.APPLIED, "")
        else:
            assert decision.status is Status.NOT_NEEDED
    from_the_lock = survey(release=release, hardware_name=hardware, vllm_root=None)
    assert from_the_lock == result


def test_the_lock_holds_what_the_ledger_names_and_nothing_else(release, vllm_root):
    named_symbols = {s for patch in LEDGER if release in patch.releases for s in patch.symbols_of(release)}
    assert read_lock()[release] == fingerprints(vllm_root, named_symbols)
    assert set(read_lock()) == set(RELEASES)


def change_one_token(source: str, name: str) -> str:
    """The source with the last name that the symbol's code mentions replaced by another."""
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        node = next(
            child
            for child in ast.walk(node)
            if part == getattr(child, "name", None)
            or part in [getattr(target, "id", None) for target in getattr(child, "targets", [])]
        )
    mentioned = (child for child in ast.walk(node) if isinstance(child, ast.Name))
    token = max(mentioned, key=lambda child: (child.lineno, child.col_offset))
    lines = source.encode().splitlines(keepends=True)
    line = lines[token.lineno - 1]
    lines[token.lineno - 1] = line[: token.col_offset] + b"another_name" + line[token.end_col_offset :]
    return b"".join(lines).decode()


@pytest.mark.parametrize(("patch", "release"), named(NEEDED))
def test_one_changed_token_in_a_symbol_makes_its_patch_refuse(patch, release, vllm_root, tmp_path):
    genuine = fingerprints(vllm_root, patch.symbols_of(release))
    for number, symbol in enumerate(patch.symbols_of(release)):
        module, _, name = symbol.partition(":")
        path = vllm_root.joinpath(*module.split(".")).with_suffix(".py")
        copied = tmp_path / str(number) / path.relative_to(vllm_root)
        copied.parent.mkdir(parents=True)
        copied.write_text(change_one_token(path.read_text(), name))
        upstream = genuine | {symbol: fingerprint(tmp_path / str(number), symbol)}
        decision = decide(
            patch,
            release=release,
            hardware_name=min(patch.hardware),
            upstream=upstream,
            lock=read_lock(),
        )
        assert decision.status is Status.REFUSED
        assert decision.reason == f"{symbol} is not the code this patch was written against"


def test_a_comment_and_another_layout_do_not_refuse(vllm_root, tmp_path):
    symbol = LEDGER[0].symbols[0]
    path = vllm_root.joinpath(*symbol.partition(":")[0].split(".")).with_suffix(".py")
    copied = tmp_path / path.relative_to(vllm_root)
    copied.parent.mkdir(parents=True)
    copied.write_text("# A comment.\n" + ast.unparse(ast.parse(path.read_text())))
    assert fingerprint(tmp_path, symbol) == fingerprint(vllm_root, symbol)


def test_an_unknown_release_refuses_everything(vllm_root):
    for hardware in SERVED:
        result = survey(release="0.99.0", hardware_name=hardware, vllm_root=vllm_root)
        assert len(result.refused) == len(LEDGER)
        assert all("0.99.0 was not validated" in decision.reason for decision in result.refused)


def test_every_module_that_binds_a_replaced_name_is_in_the_ledger(release, vllm_root):
    for patch in LEDGER:
        if release not in patch.releases:
            continue
        module_level = {s for s in patch.replaces if "." not in s.partition(":")[2]} | set(patch.bound_in)
        for symbol in module_level:
            assert binding_modules(vllm_root, symbol) <= set(patch.bound_in.get(symbol, ())), symbol


@pytest.mark.parametrize("patch", [pytest.param(p, id=p.id) for p in LEDGER])
def test_every_binding_in_the_ledger_exists_in_some_release(patch):
    for symbol, modules in patch.bound_in.items():
        bound = set().union(*(binding_modules(unpacked(release), symbol) for release in patch.releases))
        assert set(modules) <= bound, symbol
