"""Every check on made-up facts: silent where all is right, alone in naming its fault, and missed when it is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from made_up import (
    BOUNDS,
    CONFIGS,
    H200,
    MACHINES,
    ROCM_V41,
    TP_CONSENSUS,
    applied,
    failed,
    judge,
    made_up_facts,
    made_up_plan,
    without,
)

from patches.hardware import CUDA_HOPPER, ROCM_GFX950, Hardware
from patches.install import Decision, Installed
from patches.ledger import LEDGER, Status
from serve.errors import ExitCode, InputError
from serve.preflight import Facts, Plan
from serve.preflight.check import Severity
from serve.preflight.checkpoint import Checkpoint
from serve.preflight.checks import TABLE
from serve.preflight.machine import Gpu
from serve.preflight.memory import GIB
from serve.preflight.plan import plan
from serve.preflight.report import Outcome
from serve.profile import Verification, bundled_names, load

V4, V4_TP4 = "deepseek-v4-flash-h200x4", "deepseek-v4-flash-h200x4-tp4"
V41, V41_EP = "deepseek-v4.1-flash-mi355x4", "deepseek-v4.1-flash-mi355x4-ep"
QWEN, TINY = "qwen3-8b-dspark-h200", "tiny-cpu"


def machine(**changes: object) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, machine=replace(facts.machine, **changes))


def target(**changes: object) -> Callable[[Facts], Facts]:
    def change(facts: Facts) -> Facts:
        changed = replace(facts.target, **changes)
        return replace(facts, target=changed, draft=changed if facts.draft == facts.target else facts.draft)

    return change


def draft(**changes: object) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, draft=replace(facts.draft, **changes))


def upstream(**changes: object) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, upstream=replace(facts.upstream, **changes))


def other(**changes: object) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, **changes)


@dataclass
class Case:
    """A fault that one check, and no other, has to name with these words."""

    check: str
    words: tuple[str, ...]
    profile: str = V4
    sets: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    headless: bool = False
    facts: Callable[[Facts], Facts] = lambda facts: facts

    def planned(self) -> Plan:
        return made_up_plan(self.profile, self.sets, self.extra, environment=self.environment, headless=self.headless)


TELEMETRY = next(patch for patch in LEDGER if patch.id == "verification-telemetry")
REFUSED = Installed(
    "0.32.0", CUDA_HOPPER, (Decision(TELEMETRY, Status.REFUSED, "x:y is not the code this was written against"),)
)
CASES = [
    Case(
        "hardware", ("cuda-hopper", "cuda-sm100", "Blackwell"), facts=machine(hardware=Hardware("cuda-sm100", "B200"))
    ),
    Case("gpu-count", ("4 GPUs", "2 x 1 x 2", "3 are visible"), facts=machine(gpus=(Gpu(H200, H200),) * 3)),
    Case(
        "gpu-memory-free",
        ("GPU 2 has 100.0 of 140.0 GiB", "0.92 x 140.0 = 128.8"),
        facts=machine(gpus=(Gpu(H200, H200),) * 2 + (Gpu(H200, 100 * GIB),) * 2),
    ),
    Case(
        "memory",
        ("weights 476.0/4 = 119.0 GiB", "graphs 4.71 GiB", "0.9 x 128.0 = 115.2 GiB"),
        V41,
        facts=machine(gpus=(Gpu(128 * GIB, 128 * GIB),) * 4),
    ),
    Case("memory", ("KV cache 0.25 GiB", "0.01 GiB of memory"), TINY, facts=machine(memory_available=10 << 20)),
    Case("driver", ("CUDA 12.4", "CUDA 13.0"), facts=machine(driver_cuda=12040)),
    Case("device-access", ("/dev/kfd", "--group-add"), V41, facts=machine(closed_devices=("/dev/kfd",))),
    Case("shared-memory", ("4 ranks", "64 MiB", "1024 MiB", "--shm-size"), facts=machine(shared_memory=64 << 20)),
    Case("shared-memory", ("its worker", "64 MiB", "256 MiB"), TINY, facts=machine(shared_memory=64 << 20)),
    Case("open-files", ("1024 files",), facts=machine(open_files=1024)),
    Case("caches", ("HF_HOME /models",), facts=machine(readonly_caches=("HF_HOME /models",))),
    Case("compiler", ("Triton",), facts=machine(compilers=frozenset({"nvcc"}))),
    Case("kernel-compiler", ("hipcc",), V41, facts=machine(compilers=frozenset({"cc"}))),
    Case("port", ("in use", "--port"), facts=other(port="Address already in use")),
    Case("patches", ("verification-telemetry", "not the code"), QWEN, facts=other(patches=REFUSED)),
    Case("plugin", ("'other'", "without our patches"), environment={"VLLM_PLUGINS": "other"}),
    Case("plugin", ("entry point",), facts=other(plugin_installed=False)),
    Case("development-mode", ("VLLM_SERVER_DEV_MODE",), environment={"VLLM_SERVER_DEV_MODE": "1"}),
    Case("server-options", ("--port", "before the --"), extra=["--port", "9"]),
    Case("node", ("node 1 of 2", "--headless"), extra=["--nnodes=2", "--node-rank=1"]),
    Case("node", ("this is node 0", "--node-rank"), extra=["--nnodes", "2"], headless=True),
    Case(
        "gpu-count",
        ("2 GPUs", "2 x 1 x 2, over 2 nodes", "1 are visible"),
        extra=["-n", "2"],
        facts=machine(gpus=(Gpu(H200, H200),)),
    ),
    Case("visible-keys", ("--api-key", "DSPARK_API_KEY"), extra=["--api-key", "abc"]),
    Case("visible-keys", ("environment.VLLM_API_KEY",), sets=["environment.VLLM_API_KEY=abc"]),
    Case("worker-extension", ("mine.Extension",), extra=["--worker-extension-cls", "mine.Extension"]),
    Case("arguments", ("--max-nums-seqs", "did you mean --max-num-seqs"), extra=["--max-nums-seqs", "4"]),
    Case(
        "arguments",
        ("speculative_config.draft_sampling", "did you mean draft_sample_method"),
        extra=["--speculative-config.draft_sampling=greedy"],
    ),
    Case("tensor-parallel-consensus", ("#56831",), facts=other(patches=applied("0.32.0", CUDA_HOPPER))),
    Case(
        "block-rejection",
        ("#60945", "0.32.0"),
        sets=["speculative_config.rejection_sample_method=block"],
        facts=other(release="0.31.0", patches=applied("0.31.0", CUDA_HOPPER, TP_CONSENSUS)),
    ),
    Case(
        "mono-decode-release",
        ("0.31.0 does not know it", "0.32.0 is the first"),
        V41,
        facts=lambda facts: upstream(variables=facts.upstream.variables - {"VLLM_ROCM_MONO_DECODE"})(
            replace(facts, release="0.31.0")
        ),
    ),
    Case(
        "model-config",
        ("cannot be reached", "HF_ENDPOINT"),
        facts=target(config=None, problem="the hub cannot be reached"),
    ),
    Case("hub-token", ("is gated", "no token", "HF_TOKEN"), facts=target(config=None, problem="is gated", gated=True)),
    Case(
        "hub-token",
        ("has no access", "licence"),
        facts=lambda facts: target(config=None, problem="is gated", gated=True)(replace(facts, hub_token=True)),
    ),
    Case(
        "architecture",
        ("DeepseekV41ForCausalLM was not validated on cuda-hopper",),
        facts=target(config=CONFIGS["deepseek-ai/DeepSeek-V4.1-Flash"] | {"dspark_block_size": 7}),
    ),
    Case(
        "architecture",
        ("has no architecture 'Unheard'",),
        facts=target(config=CONFIGS["Qwen/Qwen3-8B"] | {"architectures": ["Unheard"], "block_size": 7}),
    ),
    Case(
        "draft-block",
        ("is 7", "blocks of 5", "#41834"),
        QWEN,
        facts=draft(config={"block_size": 5, "enable_confidence_head": True}),
    ),
    Case(
        "confidence-head",
        ("no confidence head", "online estimator"),
        QWEN,
        facts=draft(config={"block_size": 7, "enable_confidence_head": False}),
    ),
    Case("confidence-head", ("no confidence head",), facts=target(confidence_head=False)),
    Case("speculative-method", ("'eagle3'",), sets=["speculative_config.method=eagle3"]),
    Case("lora", ("LoRA",), sets=["enable_lora=true"]),
    Case("lora", ("LoRA",), extra=["--lora-modules", "a=b"]),
    Case("pipeline-parallel", ("pipeline_parallel_size is 2",), QWEN, sets=["pipeline_parallel_size=2"]),
    Case("enforce-eager", ("full graphs",), extra=["--enforce-eager"]),
    Case("graph-mode", ("PIECEWISE",), extra=["--compilation-config.cudagraph_mode", "PIECEWISE"]),
    Case("routed-experts", ("enable_return_routed_experts",), extra=["--enable-return-routed-experts"]),
    Case("sampling-replay", ("return_sampling_mask",), sets=["return_sampling_mask=true"]),
    Case("mono-decode-expert-parallel", ("enable_expert_parallel",), V41, extra=["--enable-expert-parallel"]),
    Case("mono-decode-expert-parallel", ("mono decode is on",), V41_EP, environment={"VLLM_ROCM_MONO_DECODE": "1"}),
    Case(
        "mono-decode-ranks",
        ("2 or 4", "not 8"),
        V41,
        sets=["tensor_parallel_size=8"],
        facts=machine(gpus=MACHINES[ROCM_GFX950].gpus * 2),
    ),
    Case("mxfp4-indexer", ("mxfp4", "Hopper"), extra=["--attention-config", '{"indexer_kv_dtype": "mxfp4"}']),
    Case(
        "mxfp4-indexer",
        ("only DeepseekV41ForCausalLM",),
        V41,
        extra=["--attention-config.indexer_kv_dtype=mxfp4"],
        facts=target(config={**CONFIGS["deepseek-ai/DeepSeek-V4-Flash-0731"], "dspark_block_size": 5}),
    ),
    Case("mxfp4-indexer", ("mxfp4",), extra=["--attention_config.indexer_kv_dtype=mxfp4"]),
    Case("kv-cache-dtype", ("bfloat16", "kv_cache_dtype=fp8"), sets=["kv_cache_dtype=bfloat16"]),
    Case("max-num-seqs", ("64 x 2 = 128", "wants 256", "max_num_seqs=128"), sets=["max_num_seqs=64"]),
    Case("capture-size", ("128 x (7 + 1) = 1024", "is 512"), extra=["--max-cudagraph-capture-size", "512"]),
    Case(
        "capture-size", ("256 x (7 + 1) = 2048",), V4_TP4, sets=["compilation_config.max_cudagraph_capture_size=1024"]
    ),
]
ELSEWHERE = {"local-argmax", "vllm-release", "device-query-lengths", "varlen-graphs", "draft-block-minimum"}
"""Checks whose faults have tests of their own."""


@pytest.mark.parametrize("name", bundled_names())
@pytest.mark.parametrize("verification", list(Verification))
def test_on_the_right_machine_every_check_of_every_profile_passes(name: str, verification: Verification) -> None:
    planned = made_up_plan(name, verification=verification)
    report = judge(planned, made_up_facts(planned))
    assert failed(report) == {}
    assert [r.check.id for r in report.results if r.outcome is not Outcome.PASSED] == []
    assert report.exit_code is ExitCode.OK


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.check)
def test_a_fault_is_named_by_its_check_and_by_no_other(case: Case) -> None:
    planned = case.planned()
    facts = case.facts(made_up_facts(planned))
    report = judge(planned, facts)
    found = failed(report)
    assert list(found) == [case.check]
    assert all(words in found[case.check] for words in case.words), found
    severity = next(check.severity for check in TABLE if check.id == case.check)
    assert report.exit_code is (ExitCode.BAD_INPUT if severity is Severity.ERROR else ExitCode.OK)
    # Without its check the fault goes unnoticed: nothing else covers it.
    assert failed(judge(planned, facts, table=without(case.check))) == {}


def test_every_check_has_a_fault_here_or_a_test_of_its_own() -> None:
    assert {case.check for case in CASES} | ELSEWHERE == {check.id for check in TABLE}


def test_adaptive_conflicts_are_none_with_fixed_verification() -> None:
    words = ["--enable-lora", "--pipeline-parallel-size=2", "--enforce-eager", "--return-sampling-mask"]
    planned = made_up_plan(QWEN, extra=words, verification=Verification.FIXED)
    facts = made_up_facts(planned)
    assert failed(judge(planned, facts)) == {}


def test_all_failed_checks_are_named_in_one_run() -> None:
    words = ["--enable-lora", "--pipeline-parallel-size=2", "--enforce-eager", "--kv-cache-dtype=bfloat16"]
    planned = made_up_plan(V4, ["max_num_seqs=8"], words, environment={"VLLM_SERVER_DEV_MODE": "1"})
    facts = replace(made_up_facts(planned), port="Address already in use")
    assert set(failed(judge(planned, facts))) == {
        "gpu-count",
        "port",
        "development-mode",
        "lora",
        "pipeline-parallel",
        "enforce-eager",
        "kv-cache-dtype",
        "max-num-seqs",
    }


@pytest.mark.parametrize("release", ["none", "0.27.1", "0.32.1", "0.34.0"])
def test_a_release_that_was_not_validated_is_refused(release: str) -> None:
    planned = made_up_plan(QWEN)
    report = judge(planned, replace(made_up_facts(planned), release=release))
    assert "vllm-release" in failed(report)
    assert "vllm-release" not in failed(
        judge(planned, made_up_facts(planned, release=release), table=without("vllm-release"))
    )


def test_the_local_argmax_needs_a_confidence_head() -> None:
    planned = made_up_plan(QWEN, extra=["--speculative-config.use_local_argmax_reduction=true"])
    facts = made_up_facts(planned)
    assert failed(judge(planned, facts)) == {}
    headless = draft(confidence_head=False)(facts)
    assert set(failed(judge(planned, headless))) == {"local-argmax", "confidence-head"}
    assert set(failed(judge(planned, headless, table=without("local-argmax")))) == {"confidence-head"}


@pytest.mark.parametrize("drafts", [3, 6])
def test_a_release_that_refuses_short_blocks_is_heeded(drafts: int) -> None:
    planned = made_up_plan(QWEN, [f"speculative_config.num_speculative_tokens={drafts}"])
    facts = made_up_facts(planned)
    assert "draft-block-minimum" not in failed(judge(planned, facts))
    refusing = replace(facts, upstream=replace(facts.upstream, refuses_short_blocks=True))
    assert "num_speculative_tokens=7" in failed(judge(planned, refusing))["draft-block-minimum"]
    assert "draft-block-minimum" not in failed(judge(planned, refusing, table=without("draft-block-minimum")))


def test_the_bounds_patch_makes_block_rejection_safe_before_0_32_0() -> None:
    planned = made_up_plan(V4, ["speculative_config.rejection_sample_method=block"])
    patched = applied("0.31.0", CUDA_HOPPER, TP_CONSENSUS, BOUNDS)
    assert failed(judge(planned, made_up_facts(planned, release="0.31.0", patches=patched))) == {}


def test_a_missing_fact_is_told_and_is_no_failure() -> None:
    planned = made_up_plan(V41)
    facts = made_up_facts(planned)
    silent = Checkpoint(facts.target.name, problem="the model hub cannot be reached")
    report = judge(planned, replace(facts, target=silent, draft=silent))
    assert set(failed(report)) == {"model-config"}
    left = {r.check.id for r in report.results if r.outcome is Outcome.NOT_CHECKED}
    layers = {"device-query-lengths", "varlen-graphs"}
    assert left == {"architecture", "draft-block", "confidence-head", *layers}


def test_a_skipped_check_is_reported_and_does_not_fail() -> None:
    planned = made_up_plan(V4, extra=["--enable-lora"])
    report = judge(planned, made_up_facts(planned), skip=["lora"])
    assert report.exit_code is ExitCode.OK
    assert report.as_json()["skipped"] == ["lora"]
    assert any(line.startswith("skipped") and "lora" in line for line in report.lines())


def test_an_unknown_check_cannot_be_skipped() -> None:
    planned = made_up_plan(TINY)
    with pytest.raises(InputError, match="did you mean 'port'"):
        judge(planned, made_up_facts(planned), skip=["prot"])


def test_a_rocm_patch_that_is_refused_does_not_count_as_applied() -> None:
    planned = made_up_plan(V41)
    refused = Installed(
        "0.32.0",
        ROCM_GFX950,
        (Decision(ROCM_V41, Status.REFUSED, "unknown code"), Decision(TP_CONSENSUS, Status.APPLIED)),
    )
    assert set(failed(judge(planned, made_up_facts(planned, patches=refused)))) == {
        "patches",
        "device-query-lengths",
        "varlen-graphs",
    }


def test_ids_are_unique_and_rows_are_complete() -> None:
    ids = [check.id for check in TABLE]
    assert len(set(ids)) == len(ids)
    assert all(text and "\n" not in text for check in TABLE for text in (check.what, check.how, check.remedy))


def test_a_plan_names_every_wrong_value_once_and_at_once() -> None:
    with pytest.raises(InputError) as refused:
        plan(load(TINY), Verification.ADAPTIVE, ["--max-num-seqs=none", "--gpu-memory-utilization=7"], environment={})
    message = (
        "profile tiny-cpu: max_num_seqs takes a whole number of at least 1, not 'none'; gpu_memory_utilization takes"
    )
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (["--data-parallel-size-local", "1"], 2),
        (["-dpl", "2"], 4),
        (["--data-parallel-size", "8", "--data-parallel-size-local", "3"], 6),
        (["--data-parallel-size-local", "0"], 0),  # an API without an engine
        (["--data-parallel-rank", "1"], 2),
        (["--data-parallel-external-lb", "--nnodes", "2"], 2),
        (["--nnodes", "4", "--data-parallel-size-local", "1"], 1),  # two nodes an engine
        (["--nnodes", "2", "--data-parallel-size", "4", "--data-parallel-size-local", "2"], 4),
    ],
)
def test_a_node_that_is_told_how_many_engines_it_runs_needs_gpus_for_those(words: list[str], gpus: int) -> None:
    planned = made_up_plan(V4, extra=words)
    assert (planned.tensor_parallel_size, planned.gpus) == (2, gpus)


def test_too_few_gpus_for_the_engines_of_this_node_are_told() -> None:
    planned = made_up_plan(V4, extra=["--data-parallel-size", "8", "--data-parallel-size-local", "3"])
    said = failed(judge(planned, made_up_facts(planned)))["gpu-count"]
    assert "6 GPUs are needed (tensor x pipeline x data parallel here = 2 x 1 x 3) and 4 are visible" in str(said)


@pytest.mark.parametrize(("rank", "headless"), [("0", False), ("1", True)])
def test_a_node_needs_only_its_own_share_of_the_gpus(rank: str, headless: bool) -> None:
    planned = made_up_plan(V4, extra=["--nnodes", "2", "--node-rank", rank], headless=headless)
    facts = made_up_facts(planned)
    two = replace(facts, machine=replace(facts.machine, gpus=facts.machine.gpus[:2]))
    assert planned.gpus == 2
    assert failed(judge(planned, two)) == {}
