"""The bundled tables: as printed, and every percentage that is quoted of them worked out here by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from serve.errors import InputError
from serve.validate.references import Agrees, Checked, check, delta_percent, find, references, table_names
from serve.validate.results import Arm

CHECKED = {each.claim: each for reference in references() for each in check(reference)}

QUOTED = {
    "adaptive throughput at concurrency 1, uniform metadata reused": ("+1.4 %", 240.2 / 236.9, Agrees.YES),
    "vllm-52795: adaptive against fixed, C1": ("-6.35 %", 240.2 / 256.5, Agrees.YES),
    # The printed cells give 5.786; with 1520.95 instead of 1520.9 it is below 5.785.
    "vllm-52795: adaptive against fixed, C16": ("+5.78 %", 1608.9 / 1520.9, Agrees.ROUNDING),
    "vllm-52795: adaptive against fixed, C64": ("+13.85 %", 3032.5 / 2663.6, Agrees.YES),
    "vllm-58151-ep: adaptive against fixed, C4": ("-1.9 %", 806.5 / 822.3, Agrees.YES),
    # 3.551 from the printed cells.
    "vllm-58151-ep: adaptive against fixed, least of C16 to C256": ("+3.5 %", 2265.7 / 2188.0, Agrees.ROUNDING),
    "vllm-58151-ep: adaptive against fixed, greatest of C16 to C256": ("+13.2 %", 7448.9 / 6579.9, Agrees.YES),
    "vllm-58151-ep: adaptive against off, C128": ("+27.7 %", 7448.9 / 5832.9, Agrees.YES),
    "vllm-58151-ep: adaptive against off, C256": ("+14.2 %", 9475.1 / 8297.5, Agrees.YES),
    "vllm-58151: adaptive against fixed, C4": ("-2.2 %", 802.8 / 821.1, Agrees.YES),
    "vllm-58151: adaptive against fixed, least of C16 to C256": ("+4.7 %", 2255.6 / 2154.7, Agrees.YES),
    "vllm-58151: adaptive against fixed, greatest of C16 to C256": ("+15.0 %", 9235.4 / 8031.1, Agrees.YES),
    "vllm-58151-mono: adaptive against fixed, C4": ("-1.6 %", 1093.8 / 1111.4, Agrees.YES),
    "vllm-58151-mono: adaptive against fixed, least of C16 to C256": ("+4.6 %", 2277.1 / 2177.5, Agrees.YES),
    "vllm-58151-mono: adaptive against fixed, greatest of C16 to C256": ("+11.7 %", 9210.9 / 8243.4, Agrees.YES),
    "vllm-58151-mono: off against off of vllm-58151, C4": ("+76.5 %", 818.0 / 463.5, Agrees.YES),
    "vllm-58151-mono: fixed against fixed of vllm-58151, C4": ("+35.4 %", 1111.4 / 821.1, Agrees.YES),
    # 36.248 from the printed cells.
    "vllm-58151-mono: adaptive against adaptive of vllm-58151, C4": ("+36.3 %", 1093.8 / 802.8, Agrees.ROUNDING),
}


@pytest.mark.parametrize("claim", QUOTED)
def test_a_quoted_percentage_is_recomputed_from_the_printed_cells(claim: str) -> None:
    quoted, ratio, agrees = QUOTED[claim]
    digits = len(quoted.removesuffix(" %").partition(".")[2]) + 1
    assert CHECKED[claim] == Checked(
        claim=claim, quoted=quoted, recomputed=f"{100 * (ratio - 1):+.{digits}f} %", agrees=agrees
    )


def test_what_else_is_claimed_is_checked_and_nothing_is_left_out() -> None:
    faster = [f"vllm-58151{which}: adaptive faster than off" for which in ("-ep", "", "-mono")]
    scores = "every difference of scores within a configuration, and of one arm between configurations"
    complete = "cells without a failed request"
    assert CHECKED.keys() == {*QUOTED, *faster, scores, complete}
    assert all(CHECKED[claim].recomputed == "at 6 of 6" for claim in faster)
    # The largest: adaptive less no speculation without EP and mono decode, strict match.
    assert CHECKED[scores].recomputed == f"largest of 36: {(0.9310 - 0.9189) / math.hypot(0.0070, 0.0075):.2f}"
    assert CHECKED[complete].recomputed == "54 of 54 printed"
    assert {CHECKED[claim].agrees for claim in (*faster, scores, complete)} == {Agrees.YES}


def test_a_wrong_quotation_would_be_told() -> None:
    reference, _ = find("vllm-52795")
    claims = tuple(claim.model_copy(update={"quoted_percent": "+9.99"}) for claim in reference.claims)
    found = check(reference.model_copy(update={"claims": claims, "measured": ()}))
    assert [each.agrees for each in found] == [Agrees.NO] * 3


def test_mono_decode_changes_little_above_concurrency_4_as_the_note_says() -> None:
    mono, plain = find("vllm-58151-mono")[1].throughput, find("vllm-58151")[1].throughput
    deltas = [
        100 * (mono[arm][number] / plain[arm][number] - 1)
        for arm in (Arm.FIXED, Arm.ADAPTIVE)
        for number in (16, 32, 64, 128, 256)
    ]
    assert sum(abs(delta) <= 2 for delta in deltas) == 9
    assert max(deltas) == pytest.approx(2.6, abs=0.05)


def test_every_table_says_where_it_comes_from_and_has_every_cell() -> None:
    assert table_names() == ["vllm-52795", "vllm-58151-ep", "vllm-58151", "vllm-58151-mono"]
    for reference in references():
        assert reference.source.startswith("vllm-project/vllm#")
        assert reference.protocol
        assert reference.hardware_class in ("cuda-hopper", "rocm-gfx950")
        for table in reference.tables:
            assert len({frozenset(cells) for cells in table.throughput.values()}) == 1


def test_an_unprinted_delta_is_none_and_an_unknown_table_is_refused() -> None:
    _, table = find("vllm-52795")
    assert delta_percent(table, Arm.ADAPTIVE, Arm.OFF, 16) is None
    assert delta_percent(table, Arm.ADAPTIVE, Arm.FIXED, 16) == pytest.approx(5.786, abs=1e-3)
    with pytest.raises(InputError, match="no reference table 'hopper': use one of vllm-52795, vllm-58151-ep"):
        find("hopper")


def test_the_readme_lists_every_table_and_counts_what_agrees() -> None:
    readme = " ".join((Path(__file__).parents[3] / "README.md").read_text().split())
    for name in table_names():
        assert f"| `{name}` | vllm#" in readme or f"| `{name}` | the same" in readme
    exact = sum(each.agrees is Agrees.YES for each in CHECKED.values())
    rounding = [each.quoted for each in CHECKED.values() if each.agrees is Agrees.ROUNDING]
    assert f"of {len(CHECKED)} statements {exact} agree to the last digit" in readme
    assert f"({rounding[0]}, {rounding[1]} and {rounding[2]}, where the cells give" in readme
