"""The releases' own classes, asked through their source, against what upstream's releases are known to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_up import (
    HOPPER_INDEXER,
    RELEASE_TREES,
    ROCM_V41,
    ROOT,
    TP_CONSENSUS,
    applied,
    failed,
    judge,
    made_up_facts,
    made_up_plan,
    upstream,
    without,
)

from patches.hardware import CUDA_HOPPER, ROCM_GFX950
from patches.install import survey
from patches.ledger import LEDGER, Patch
from serve.arguments import argument_names
from serve.preflight.report import Outcome
from serve.preflight.source import Answer, Source
from serve.preflight.upstream import LayerAnswer, Upstream, ask

V4, V41 = "DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"
BOTH = {"device-query-lengths", "varlen-graphs"}
OTHERS = {"tensor-parallel-consensus"}
"""Named as well until the ledger has its row."""


def tree(release: str) -> Path:
    if release == "0.32.0":
        assert ROOT is not None
        return ROOT
    root = RELEASE_TREES / release
    if not (root / "vllm").is_dir():
        pytest.skip(f"the Python files of vLLM {release} are not unpacked in {RELEASE_TREES.name}")
    return root


def refusals(answers: Upstream) -> set[str]:
    """`kind: device lengths` and `kind: graphs` for every layer that says no."""
    assert answers.layers
    assert all(layer.device_lengths.known and layer.graphs.known for layer in answers.layers), answers
    lengths = {f"{layer.kind}: lengths" for layer in answers.layers if not layer.device_lengths.value}
    return lengths | {f"{layer.kind}: graphs" for layer in answers.layers if layer.graphs.value != "ALWAYS"}


ROCM_BEFORE = {"indexer: lengths", "sparse MLA: graphs", "sparse SWA: graphs"}


@pytest.mark.parametrize(
    ("release", "hardware", "architecture", "expected"),
    [
        ("0.28.0", CUDA_HOPPER, V4, {"indexer: lengths", "indexer: graphs"}),
        ("0.29.0", CUDA_HOPPER, V4, set()),
        ("0.32.0", CUDA_HOPPER, V4, set()),
        ("0.33.0", CUDA_HOPPER, V4, set()),
        ("0.28.0", ROCM_GFX950, V4, {*ROCM_BEFORE, "indexer: graphs"}),
        ("0.30.0", ROCM_GFX950, V4, ROCM_BEFORE),
        ("0.31.0", ROCM_GFX950, V4, set()),
        ("0.32.0", ROCM_GFX950, V4, set()),
        ("0.30.0", ROCM_GFX950, V41, ROCM_BEFORE),
        ("0.31.0", ROCM_GFX950, V41, ROCM_BEFORE),
        ("0.32.0", ROCM_GFX950, V41, ROCM_BEFORE),
        ("0.33.0", ROCM_GFX950, V41, set()),
    ],
)
def test_a_release_says_itself_what_it_refuses(
    release: str, hardware: str, architecture: str, expected: set[str]
) -> None:
    assert refusals(upstream(tree(release), hardware, architecture, 5)) == expected


def test_the_hopper_failure_of_0_28_0_is_caught_without_the_patch_and_gone_with_it() -> None:
    """vllm#47808, repaired upstream by #52795."""
    planned = made_up_plan("deepseek-v4-flash-h200x4")
    facts = made_up_facts(planned, root=tree("0.28.0"), release="0.28.0")
    bare = replace(facts, patches=applied("0.28.0", CUDA_HOPPER, TP_CONSENSUS))
    found = failed(judge(planned, bare))
    assert set(found) == BOTH
    assert "indexer backend of DeepseekV4ForCausalLM in vLLM 0.28.0" in found["device-query-lengths"]
    patched = applied("0.28.0", CUDA_HOPPER, TP_CONSENSUS, HOPPER_INDEXER)
    assert failed(judge(planned, replace(facts, patches=patched))) == {}


def test_the_hopper_failure_as_facts_alone() -> None:
    """The same without the wheel of 0.28.0: what its classes answer, written down."""
    consulted = HOPPER_INDEXER.symbols
    layer = LayerAnswer("indexer", Answer(False, consulted), Answer("UNIFORM_BATCH", consulted))
    planned = made_up_plan("deepseek-v4-flash-h200x4")
    facts = made_up_facts(planned)
    answers = replace(facts.upstream, layers=(layer,))
    bare = replace(facts, release="0.28.0", upstream=answers, patches=applied("0.28.0", CUDA_HOPPER, TP_CONSENSUS))
    assert set(failed(judge(planned, bare))) == BOTH
    for check in BOTH:
        assert set(failed(judge(planned, bare, table=without(check)))) == BOTH - {check}
    assert failed(judge(planned, replace(facts, upstream=answers))) == {}


def test_a_layer_that_does_not_answer_is_told_and_hides_no_refusal() -> None:
    planned = made_up_plan("deepseek-v4.1-flash-mi355x4")
    facts = made_up_facts(planned)
    silent = LayerAnswer("extra", Answer(None, reason="it imports torch"), Answer(None, reason="it imports torch"))
    layers = facts.upstream.layers if facts.upstream else ()
    patched = replace(facts, upstream=replace(facts.upstream, layers=(*layers, silent)))
    found = {r.check.id: r for r in judge(planned, patched).results if r.check.id in BOTH}
    assert {r.outcome for r in found.values()} == {Outcome.NOT_CHECKED}
    assert all("extra (it imports torch)" in r.found for r in found.values())
    bare = replace(patched, patches=applied("0.32.0", ROCM_GFX950, TP_CONSENSUS))
    assert set(failed(judge(planned, bare))) == BOTH


@pytest.mark.parametrize("name", ["deepseek-v4.1-flash-mi355x4", "deepseek-v4.1-flash-mi355x4-ep"])
def test_both_rocm_v41_failures_of_0_32_0_are_named_in_one_run(name: str) -> None:
    """vllm#58151: the second used to show only after the first was worked around."""
    planned = made_up_plan(name)
    facts = made_up_facts(planned)
    bare = replace(facts, patches=applied("0.32.0", ROCM_GFX950, TP_CONSENSUS))
    found = failed(judge(planned, bare))
    assert set(found) == BOTH
    assert "indexer backend" in found["device-query-lengths"]
    assert "sparse MLA and sparse SWA" in found["varlen-graphs"]
    patched = applied("0.32.0", ROCM_GFX950, TP_CONSENSUS, ROCM_V41)
    assert failed(judge(planned, replace(facts, patches=patched))) == {}


def test_recipes_963_v4_on_rocm_is_refused_by_two_checks_before_0_31_0() -> None:
    planned = made_up_plan("deepseek-v4.1-flash-mi355x4-ep", ["model=deepseek-ai/DeepSeek-V4-Flash-0731"])
    planned = replace(planned, num_speculative_tokens=7)
    facts = made_up_facts(planned, root=tree("0.30.0"), release="0.30.0")
    bare = replace(facts, patches=applied("0.30.0", ROCM_GFX950, TP_CONSENSUS))
    assert set(failed(judge(planned, bare))) - {"arguments"} == BOTH


@pytest.mark.parametrize(
    ("row", "release", "name"),
    [
        (HOPPER_INDEXER, "0.28.0", "deepseek-v4-flash-h200x4"),
        (ROCM_V41, "0.32.0", "deepseek-v4.1-flash-mi355x4"),
    ],
    ids=["hopper", "rocm"],
)
def test_the_ledger_itself_repairs_what_the_release_refuses(row: Patch, release: str, name: str) -> None:
    """The rows as they are and the release's own code: nothing made up but the machine and the checkpoint."""
    if row not in LEDGER:
        pytest.skip(f"the ledger has no row {row.id} yet")
    planned = made_up_plan(name)
    facts = made_up_facts(planned, root=tree(release), release=release)
    hardware = planned.profile.hardware
    decided = survey(release=release, hardware_name=hardware, vllm_root=tree(release))
    bare = replace(decided, decisions=tuple(d for d in decided.decisions if d.patch.id != row.id))
    assert set(failed(judge(planned, replace(facts, patches=bare)))) - OTHERS == BOTH
    assert set(failed(judge(planned, replace(facts, patches=decided)))) - OTHERS == set()


def test_a_patch_for_another_symbol_repairs_nothing() -> None:
    planned = made_up_plan("deepseek-v4.1-flash-mi355x4")
    unrelated = replace(ROCM_V41, replaces=("vllm.v1.attention.backends.mla.indexer:unrelated",), wraps=())
    facts = made_up_facts(planned, patches=applied("0.32.0", ROCM_GFX950, TP_CONSENSUS, unrelated))
    assert set(failed(judge(planned, facts))) == BOTH


@pytest.mark.parametrize(
    ("release", "variable", "argument"),
    [("0.28.0", False, False), ("0.31.0", False, False), ("0.32.0", True, False), ("0.33.0", False, True)],
)
def test_mono_decode_came_as_a_variable_and_became_an_argument(release: str, variable: bool, argument: bool) -> None:
    known = upstream(tree(release), ROCM_GFX950, V41, 5).variables
    assert ("VLLM_ROCM_MONO_DECODE" in known) is variable
    assert ("monokernel" in argument_names(tree(release)).types) is argument
    assert "VLLM_PLUGINS" in known


def test_the_variable_of_mono_decode_is_refused_by_the_release_that_dropped_it() -> None:
    planned = made_up_plan("deepseek-v4.1-flash-mi355x4")
    found = failed(judge(planned, made_up_facts(planned, root=tree("0.33.0"), release="0.33.0")))
    assert set(found) == {"mono-decode-release"}
    assert "monokernel=true" in found["mono-decode-release"]


@pytest.mark.parametrize(
    ("guard", "refuses"),
    [
        ("if self.num_speculative_tokens < block_size:\n            raise ValueError", True),
        ("if self.num_speculative_tokens < block_size:\n            self.width = block_size", False),
        ("pass", False),
    ],
)
def test_a_guard_against_short_blocks_is_found_in_the_source(tmp_path: Path, guard: str, refuses: bool) -> None:
    config = tmp_path / "vllm" / "config"
    config.mkdir(parents=True)
    (config / "speculative.py").write_text(
        f"class SpeculativeConfig:\n    def __post_init__(self, block_size):\n        {guard}\n"
    )
    answers = ask(tmp_path, hardware=CUDA_HOPPER, architecture=V4, num_speculative_tokens=3)
    assert answers.refuses_short_blocks is refuses


def test_no_validated_release_refuses_short_blocks() -> None:
    assert upstream(tree("0.32.0"), CUDA_HOPPER, V4, 5).refuses_short_blocks is False


def module(tmp_path: Path, text: str) -> Source:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "layer.py").write_text(text)
    (package / "base.py").write_text(
        "LIMIT = 3\n\n\nclass Base:\n    @classmethod\n    def answer(cls): return LIMIT\n"
    )
    return Source(tmp_path, {"given": "hopper"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("from vllm.base import Base\nclass A(Base):\n    pass\n", 3),
        ("from .base import Base\nclass A(Base):\n @classmethod\n def answer(cls): return super().answer() + 1\n", 4),
        ("import torch\nclass A(torch.nn.Module):\n    @staticmethod\n    def answer(): return given\n", "hopper"),
        ("def f(): return 5\nclass A:\n    @staticmethod\n    def answer():\n        from vllm.base import LIMIT\n"
         "        return f() + LIMIT\n", 8),
        ("class A:\n @staticmethod\n def answer():\n  from .base import LIMIT as top\n  return top\n", 3),
        ("class A:\n    kind: int = 2\n    @classmethod\n    def answer(cls): return cls.kind\n", 2),
    ],
)  # fmt: skip
def test_source_runs_what_a_question_needs_and_nothing_else(tmp_path: Path, text: str, value: object) -> None:
    source = module(tmp_path, text)
    answer = source.ask(lambda s: s.resolve("vllm.layer:A").answer())
    assert (answer.value, answer.reason) == (value, "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import torch\nclass A:\n    @staticmethod\n    def answer(): return torch.cuda.is_available()\n", "torch"),
        ("from torch import cuda\nclass A:\n    @staticmethod\n    def answer(): return cuda.count()\n", "from torch"),
        (
            "class A:\n    @staticmethod\n    def answer():\n        import torch\n        return torch\n",
            "imports torch",
        ),
        ("class A:\n    @staticmethod\n    def answer(): return 1 / 0\n", "ZeroDivisionError"),
        ("class B: pass\n", "has no A"),
        # What a class says itself and cannot be built here is unknown, and never what its base says.
        ("from .base import Base\nclass A(Base):\n    answer = object()\n", "layer:A.answer"),
        (
            "import os\nfrom .base import Base\nclass A(Base):\n @classmethod\n def answer(cls, x=os): ...\n",
            "has no os",
        ),
        ("from .gone import Base\nclass A(Base):\n    pass\n", "no module vllm.gone"),
    ],
)
def test_source_says_why_it_has_no_answer(tmp_path: Path, text: str, reason: str) -> None:
    answer = module(tmp_path, text).ask(lambda s: s.resolve("vllm.layer:A").answer())
    assert not answer.known
    assert reason in answer.reason
