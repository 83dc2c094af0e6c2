"""What our code reads and overrides of upstream's classes is there in every release, with the same parameters.

The expectations are derived from our own source, so that a new use is checked without anyone listing it.
"""

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import patches
from patches.install import vllm_release
from patches.releases import unpacked

PATCHES = Path(patches.__file__).parent
GPU = "vllm/v1/worker/gpu"
ADAPTIVE = f"{GPU}/spec_decode/adaptive_verification.py"

OURS = {
    "calibration",
    "live_confidences",
    "mode",
    "plan",
    "batch",
    "row",
    "_shares_estimates",
    "_ring",
    "_ranking",
    "_batches",
    "_takes_shortcut",
    "_chunks_full_budgets",
    "_prices_requests",
    "_host_ends",
    "_captured",
    "_profiled",
    "_shares_context",
    "_boundaries",
    "_counts_on_host",
}
"""What our manager puts on itself, and its plan on itself."""

READ = [
    # our module, its variable, upstream's file, upstream's class, what we put on the object ourselves
    ("manager.py", "self", ADAPTIVE, "AdaptiveVerificationManager", OURS),
    ("manager.py", "states", f"{GPU}/states.py", "RequestState", set()),
    ("step_costs.py", "sample", f"{GPU}/async_utils.py", "StepTimingSample", set()),
    ("manager.py", "input_batch", f"{GPU}/input_batch.py", "InputBatch", set()),
    ("telemetry/patch.py", "runner", f"{GPU}/model_runner.py", "GPUModelRunner", set()),
    ("telemetry/recorder.py", "batch", f"{GPU}/input_batch.py", "InputBatch", set()),
    ("telemetry/recorder.py", "runner", f"{GPU}/model_runner.py", "GPUModelRunner", set()),
    ("telemetry/recorder.py", "output", f"{GPU}/async_utils.py", "AsyncOutput", set()),
    ("telemetry/recorder.py", "manager", ADAPTIVE, "AdaptiveVerificationManager", OURS),
]
OVERRIDDEN = [
    "add_request",
    "batches_to_profile",
    "compact_batch",
    "get_num_tokens",
    "reallocate_drafts",
    "record_confidences",
    "set_initial_cost_curves",
]


def class_body(vllm_root: Path, file: str, name: str) -> ast.ClassDef:
    body = ast.parse((vllm_root / file).read_bytes()).body
    return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)


def attributes(node: ast.ClassDef) -> set[str]:
    """Methods, annotated fields and everything that a method assigns to self."""
    found = {child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)}
    found |= {child.target.id for child in node.body if isinstance(child, ast.AnnAssign)}
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            found.add(child.attr)
    return found


def attributes_read(source: str, variable: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == variable
    }


@pytest.mark.parametrize(("module", "variable", "file", "name", "ours"), READ)
def test_every_attribute_that_is_read_exists(vllm_root, module, variable, file, name, ours):
    read = attributes_read((PATCHES / module).read_text(), variable) - ours
    dunder = {attribute for attribute in read if attribute.startswith("__")}
    assert read - dunder, "the variable must be used, or this checks nothing"
    assert read - dunder <= attributes(class_body(vllm_root, file, name))


@pytest.mark.parametrize("method", OVERRIDDEN)
def test_an_override_takes_what_upstream_passes(vllm_root, method):
    theirs = class_body(vllm_root, ADAPTIVE, "AdaptiveVerificationManager")
    ours = class_body(PATCHES.parent, "patches/manager.py", "AdaptiveManager")
    expected, got = (
        next(child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == method)
        for node in (theirs, ours)
    )
    assert [a.arg for a in got.args.args] == [a.arg for a in expected.args.args]


def test_the_ranking_takes_what_upstream_passes(vllm_root):
    from patches.consensus import admit_best_drafts

    module = ast.parse((vllm_root / ADAPTIVE).read_bytes())
    calls = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_assign_draft_token_budget_compiled"
    ]
    assert calls
    for call in calls:
        assert not call.keywords
        assert len(call.args) == len(inspect.signature(admit_best_drafts).parameters)


def test_estimates_enter_through_record_confidences_alone(vllm_root):
    """tp-consensus shares what this one call brings, so there must be no other."""
    calls = []
    for path in sorted((vllm_root / GPU).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "record_confidences":
                calls.append(ast.unparse(node))
    assert calls == [
        "self.adaptive_verification.record_confidences(self.speculator.draft_token_confidence_probs, input_batch)"
    ]


def test_pools_know_how_many_steps_are_under_way_before_the_manager_makes_one(vllm_root):
    """Ours has as many places as upstream's default says when it is made, and a place is written once a step."""
    runner = class_body(vllm_root, f"{GPU}/model_runner.py", "GPUModelRunner")
    methods = {child.name: child for child in runner.body if isinstance(child, ast.FunctionDef)}
    callers = {
        name: [ast.unparse(node) for node in ast.walk(method) if isinstance(node, ast.Call)]
        for name, method in methods.items()
    }
    assert "set_default_max_concurrency(vllm_config.max_concurrent_batches)" in callers["__init__"]
    makers = [
        name
        for name, calls in callers.items()
        if any(call.startswith("maybe_create_adaptive_verification_manager(") for call in calls)
    ]
    assert makers
    assert "__init__" not in makers


@pytest.mark.parametrize("steps", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_two_ranks_plan_alike(release, vllm_root, plans_of_two_ranks, steps):
    """The real class of each release; the pinned one runs where it is installed (tests/patches)."""
    if release == vllm_release():
        vllm_root = None
    slow = ("fused-ranking", "unbound-budget-shortcut")
    expected, _ = plans_of_two_ranks(release, steps=steps, estimates="shared", off=slow, vllm_root=vllm_root)
    first, second = plans_of_two_ranks(release, steps=steps, estimates="shared", vllm_root=vllm_root)
    assert (first == second).all()
    assert first[:, 1].any()
    assert (first == expected).all(), "faster, but the same plans"


def test_placeholders_are_not_counted_for_batch_sharded_sampling():
    """From 0.33.0 on ranks size an all-to-all by the admitted counts on the host."""
    root = unpacked("0.33.0")
    paths = [str(root), str(PATCHES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"DSPARK_TEST_RELEASE": "0.33.0", "VLLM_PLUGINS": "", "VLLM_TARGET_DEVICE": "cpu"}
    process = subprocess.run(
        [sys.executable, str(PATCHES.parent / "tests/patches/placeholders_on_host.py")],
        env=os.environ | settings | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    assert json.loads(process.stdout.splitlines()[-1]) == [[4, 0], [4, 0]]


def test_the_handshake_reaches_every_engine(vllm_root):
    handshake = PATCHES.parent / "serve" / "handshake.py"
    file = "vllm/v1/engine/core_client.py"
    reachable = attributes(class_body(vllm_root, file, "MPClient"))
    reachable |= attributes(class_body(vllm_root, file, "AsyncMPClient"))
    assert attributes_read(handshake.read_text(), "core_client") <= reachable
    assert "engine_core" in attributes(class_body(vllm_root, "vllm/v1/engine/async_llm.py", "AsyncLLM"))
