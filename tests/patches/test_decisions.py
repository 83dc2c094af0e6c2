"""What becomes of a patch, as a function of facts; and the ledger's own rules."""

import dataclasses
import importlib

import pytest

from patches.fingerprint import fingerprint, read_lock
from patches.hardware import CPU, CUDA_HOPPER, ROCM_GFX950, SERVED
from patches.install import decide, survey, vllm_release, vllm_root
from patches.ledger import LEDGER, RELEASES, Patch, Status

SYMBOL, ANOTHER = "vllm.a:f", "vllm.a:g"
PATCH = Patch(
    id="a-patch",
    what="",
    upstream="",
    hardware=frozenset({CPU}),
    releases=("0.30.0", "0.31.0"),
    module="",
    removal="",
    replaces=(SYMBOL,),
    wraps=(ANOTHER,),
    only_in={ANOTHER: ("0.31.0",)},
)
KNOWN = {SYMBOL: "1", ANOTHER: "2"}


def decision(patch=PATCH, release="0.31.0", hardware=CPU, upstream=None, lock=None, off=()):
    return decide(
        patch,
        release=release,
        hardware_name=hardware,
        upstream=KNOWN if upstream is None else upstream,
        lock={release: KNOWN} if lock is None else lock,
        switched_off=frozenset(off),
    )


def test_applied_where_every_fingerprint_is_known():
    assert decision().status is Status.APPLIED


def test_other_hardware():
    assert decision(hardware=ROCM_GFX950).status is Status.OTHER_HARDWARE


def test_a_release_that_has_it_does_not_need_it():
    assert decision(release="0.32.0").status is Status.NOT_NEEDED


def test_an_unknown_release_is_refused_by_name():
    refused = decision(release="0.34.0")
    assert refused.status is Status.REFUSED
    assert refused.reason == "vLLM 0.34.0 was not validated (validated: 0.28.0 to 0.33.0)"


def test_a_changed_symbol_is_refused_by_name():
    refused = decision(upstream=KNOWN | {ANOTHER: "changed"})
    assert refused.status is Status.REFUSED
    assert refused.reason == f"{ANOTHER} is not the code this patch was written against"


def test_a_missing_symbol_is_refused_by_name():
    refused = decision(upstream={SYMBOL: "1"})
    assert refused.status is Status.REFUSED
    assert refused.reason == f"{ANOTHER} is not in this vLLM"


def test_a_symbol_that_a_release_does_not_have_is_not_asked_for_there():
    assert decision(release="0.30.0", upstream={SYMBOL: "1"}).status is Status.APPLIED


def test_a_release_that_was_never_locked_is_refused():
    assert decision(lock={}).status is Status.REFUSED


def test_only_a_switchable_patch_can_be_switched_off():
    refused = decision(off=["a-patch"])
    assert refused.status is Status.REFUSED
    assert "cannot be switched off" in refused.reason
    switchable = dataclasses.replace(PATCH, switchable=True)
    assert decision(switchable, off=["a-patch"]).status is Status.SWITCHED_OFF
    assert decision(switchable, off=["another"]).status is Status.APPLIED


def test_survey_of_this_environment_applies_what_the_lock_promises():
    here = survey(release=vllm_release(), hardware_name=CPU, vllm_root=vllm_root())
    assert here == survey(release=vllm_release(), hardware_name=CPU, vllm_root=None)
    assert not here.refused
    assert "cpu-engine" in here.applied


def test_survey_answers_for_another_machine_from_the_lock_alone():
    result = survey(release="0.28.0", hardware_name=CUDA_HOPPER, vllm_root=None)
    statuses = {d.patch.id: d.status for d in result.decisions}
    assert statuses["tp-consensus"] is Status.APPLIED
    assert statuses["cpu-engine"] is Status.OTHER_HARDWARE


def test_the_digest_tells_decisions_apart():
    facts = {"release": "0.32.0", "hardware_name": CPU, "vllm_root": None}
    all_on = survey(**facts)
    one_off = survey(**facts, switched_off=frozenset({"verification-telemetry"}))
    assert all_on.digest == survey(**facts).digest
    assert len({all_on.digest, one_off.digest, survey(**facts | {"hardware_name": CUDA_HOPPER}).digest}) == 3


def test_at_most_one_patch_replaces_a_symbol():
    for release in RELEASES:
        for hardware in SERVED:
            replaced = [
                symbol
                for patch in LEDGER
                if hardware in patch.hardware and release in patch.releases
                for symbol in patch.replaces
                if symbol in patch.symbols_of(release)
            ]
            assert len(replaced) == len(set(replaced)), (release, hardware)


@pytest.mark.parametrize("patch", [pytest.param(p, id=p.id) for p in LEDGER])
def test_a_row_is_complete_and_true_to_its_module(patch):
    assert patch.releases
    assert set(patch.releases) <= set(RELEASES)
    assert patch.hardware <= set(SERVED)
    assert all((patch.id, patch.what, patch.upstream, patch.module, patch.removal, patch.symbols))
    assert set(patch.only_in) <= set(patch.symbols)
    hooks = importlib.import_module(patch.module).HOOKS
    upstream_modules = {module for module in hooks if module.startswith("vllm.")}
    touched = {symbol.partition(":")[0] for symbol in patch.symbols}
    assert upstream_modules <= touched, "a hook's module must have a symbol whose fingerprint is checked"


def test_ids_are_unique():
    assert len({patch.id for patch in LEDGER}) == len(LEDGER)


def test_a_fingerprint_does_not_depend_on_the_parser(tmp_path):
    """3.12 adds the field `type_params`, and an empty piece to this format: Python 3.10 to 3.13 gave this value."""
    (tmp_path / "m.py").write_text('def f(a):\n    """Text."""\n    return f"{a!r:>{a}} text"\n')
    expected = "5f49f310c995f67d4b2cd6274bdba9299fa2a08d9309733b56d37c52e5fd4254"
    assert fingerprint(tmp_path, "m:f") == expected


def test_a_fingerprint_sees_an_empty_string_that_is_an_argument(tmp_path):
    (tmp_path / "m.py").write_text('def f(a):\n    a("")\ndef g(a):\n    a()\n')
    assert fingerprint(tmp_path, "m:f") != fingerprint(tmp_path, "m:g")


def test_the_lock_covers_exactly_the_releases():
    assert set(read_lock()) == set(RELEASES)
