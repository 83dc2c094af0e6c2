"""The ledger: every patch, why it is allowed to exist, and when it goes away. Data only.

`install` reads it to decide what applies here; `dspark-serve patches` prints it; a test holds every row against
the real wheels of the releases it names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from patches.hardware import CPU, CUDA_HOPPER, ROCM_GFX950

RELEASES = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""The vLLM releases with adaptive verification that were validated. Nothing else is opted in by a pattern."""

EVERYWHERE = frozenset({CUDA_HOPPER, ROCM_GFX950, CPU})
GPUS = frozenset({CUDA_HOPPER, ROCM_GFX950})


class Status(StrEnum):
    """What became of a patch on a release and a hardware."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    OTHER_HARDWARE = "not for this hardware"
    SWITCHED_OFF = "switched off"
    REFUSED = "refused"


@dataclass(frozen=True)
class Patch:
    """One row of the ledger.

    Attributes:
        id: Stable name, used in metrics and settings.
        what: What it fixes, in a sentence.
        upstream: The upstream change or report, and the release that has it.
        hardware: Hardware names it is for.
        releases: vLLM releases that need it.
        replaces: Upstream symbols it replaces, as `module:qualified.name`. A symbol has at most one such patch.
        wraps: Upstream symbols it calls through to, or whose behaviour it relies on.
        module: The module here that implements it; imported only where the patch applies.
        removal: When the row can be deleted.
        switchable: Whether `DSPARK_PATCHES_OFF` may name it (to measure it); a correctness patch may not.
        bound_in: Per symbol, every upstream module that binds it by name in one of the releases.
        only_in: Symbol -> the releases that have it, for a symbol that not all of `releases` have.
    """

    id: str
    what: str
    upstream: str
    hardware: frozenset[str]
    releases: tuple[str, ...]
    module: str
    removal: str
    replaces: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    switchable: bool = False
    bound_in: dict[str, tuple[str, ...]] = field(default_factory=dict)
    only_in: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Every upstream symbol that it touches, in any release."""
        return self.replaces + self.wraps

    def symbols_of(self, release: str) -> tuple[str, ...]:
        """The symbols whose fingerprints must be known before it is applied to a release."""
        return tuple(symbol for symbol in self.symbols if release in self.only_in.get(symbol, self.releases))


_RUNNER = "vllm.v1.worker.gpu.model_runner"
_ADAPTIVE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
_INPUT_BATCH = "vllm.v1.worker.gpu.input_batch"
_OUTPUTS = "vllm.v1.worker.gpu.async_utils"
_CORE = "vllm.v1.engine.core"
_ATTENTION = "vllm.v1.worker.gpu.attn_utils"
_INDEXER = "vllm.v1.attention.backends.mla.indexer"
_INDEXER_BUILDER = f"{_INDEXER}:DeepseekV32IndexerMetadataBuilder"
_DSV41_ROCM = "vllm.models.deepseek_v41.amd.rocm"
_DSV41_MLA = "vllm.models.deepseek_v41.sparse_mla"
_SWA = "vllm.v1.attention.backends.mla.sparse_swa"
_REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_CONFIG = "vllm.config.vllm:VllmConfig"
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager"

LEDGER: tuple[Patch, ...] = (
    Patch(
        id="adaptive-manager",
        what="The one manager whose stages choose the budget: placeholder drafts take none of it",
        upstream="the scheduler pads new decodes with -1 drafts and a fresh request's confidence of 1.0 admits them",
        hardware=EVERYWHERE,
        releases=RELEASES,
        module="patches.adaptive",
        removal="when upstream leaves padded drafts out of its budget",
        replaces=(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.get_num_tokens",
            f"{_ADAPTIVE}:AdaptiveVerificationManager.reallocate_drafts",
        ),
        wraps=(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.__init__",
            f"{_ADAPTIVE}:AdaptiveVerificationManager.compact_batch",
            f"{_ADAPTIVE}:AdmittedDraftCounts",
            f"{_RUNNER}:GPUModelRunner.gather_batch_req_state",
        ),
        bound_in={f"{_ADAPTIVE}:AdaptiveVerificationManager": (_RUNNER,)},
        only_in={f"{_ADAPTIVE}:AdmittedDraftCounts": ("0.33.0",)},
    ),
    Patch(
        id="tp-consensus",
        what="Tensor-parallel ranks plan from rank 0's acceptance estimates and break ties alike",
        upstream="#56831, open: every rank plans from its own estimates and may choose another budget",
        hardware=EVERYWHERE,
        releases=RELEASES,
        module="patches.consensus",
        removal="when upstream shares its estimates and ranks them with a stable order",
        replaces=(
            f"{_ADAPTIVE}:_assign_draft_token_budget",
            f"{_ADAPTIVE}:_assign_draft_token_budget_compiled",
        ),
        wraps=(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.record_confidences",
            f"{_ADAPTIVE}:AdaptiveVerificationManager.add_request",
            f"{_ADAPTIVE}:AdaptiveVerificationManager.set_cost_curves",
            f"{_ADAPTIVE}:AdaptiveVerificationManager.reallocate_drafts",
            "vllm.distributed.parallel_state:GroupCoordinator.broadcast",
        ),
    ),
    Patch(
        id="unblocked-confidences",
        what="The budget reads confidences one record older, so that the host never waits for the device",
        upstream="none: each step waits for the copy that the step before started",
        hardware=EVERYWHERE,
        releases=RELEASES,
        module="patches.confidence_ring",
        removal="when upstream's budgets no longer wait for the device",
        replaces=(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.record_confidences",
            f"{_ADAPTIVE}:AdaptiveVerificationManager.add_request",
        ),
        wraps=(f"{_ADAPTIVE}:AdaptiveVerificationManager.__init__",),
        switchable=True,
    ),
    Patch(
        id="unbound-budget-shortcut",
        what="A budget that takes every draft, or none, skips the ranking and the kernels that only ranking needs",
        upstream="none: boundaries that the host knows are computed on the device in every step",
        hardware=EVERYWHERE,
        releases=RELEASES,
        module="patches.unbound_budget",
        removal="when upstream leaves the chain out where the budget does not bind",
        wraps=(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.compact_batch",
            f"{_ADAPTIVE}:AdaptiveVerificationManager.reallocate_drafts",
            f"{_RUNNER}:GPUModelRunner.prepare_inputs",
        ),
        switchable=True,
    ),
    Patch(
        id="fused-ranking",
        what="Ranks drafts and writes every boundary in one kernel, ties broken alike on every rank",
        upstream="none: a dozen launches, and a top-k that promises nothing about ties",
        hardware=EVERYWHERE,
        releases=RELEASES,
        module="patches.ranking",
        removal="when upstream ranks in one kernel",
        wraps=(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.__init__",
            f"{_ADAPTIVE}:AdaptiveVerificationManager.reallocate_drafts",
            f"{_ADAPTIVE}:_assign_draft_token_budget",
        ),
        switchable=True,
    ),
    Patch(
        id="chunked-full-budgets",
        what="A budget that takes every draft may be as large as fixed verification's, and is sampled in chunks",
        upstream="none: a budget has to fit into one chunk of the rejection sampler, 2**30 bytes of logits",
        hardware=EVERYWHERE,
        releases=RELEASES,
        module="patches.full_budgets",
        removal="when upstream samples a trimmed batch in chunks",
        wraps=(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.compact_batch",
            f"{_ADAPTIVE}:AdaptiveVerificationManager.reallocate_drafts",
            f"{_RUNNER}:GPUModelRunner.prepare_inputs",
            f"{_SAMPLER}:RejectionSampler._verify_in_chunks",
            f"{_SAMPLER}:RejectionSampler._get_logprobs_tensors",
            f"{_SAMPLER}:RejectionSampler.__call__",
            f"{_SAMPLER}:_iter_request_chunks",
            f"{_SAMPLER}:get_max_chunk_logits",
        ),
        switchable=True,
    ),
    Patch(
        id="request-aware-costs",
        what="A step is priced by its tokens and its requests, so that a draft does not cost what a request costs",
        upstream="none: the profile has as many requests as tokens, each with a context of its own to read",
        hardware=GPUS,
        releases=RELEASES,
        module="patches.step_costs",
        removal="when upstream's profile knows how many requests a step has",
        replaces=(f"{_ADAPTIVE}:AdaptiveVerificationManager.set_initial_cost_curves",),
        wraps=(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.batches_to_profile",
            f"{_ADAPTIVE}:AdaptiveVerificationManager.set_cost_curves",
            f"{_ADAPTIVE}:build_cost_tables_from_curves",
            f"{_OUTPUTS}:StepTimingSample",
            f"{_RUNNER}:GPUModelRunner._dummy_run",
            f"{_INPUT_BATCH}:set_dummy_context",
            f"{_RUNNER}:GPUModelRunner.capture_model",
        ),
        switchable=True,
    ),
    Patch(
        id="coarser-capture-grid",
        what="Captures no graph where the next larger one pads a batch by at most a sixteenth",
        upstream="none: a graph every 16 tokens up to the largest, and a profile of each",
        hardware=GPUS,
        releases=RELEASES,
        module="patches.capture_grid",
        removal="when upstream's steps grow with the size",
        wraps=(f"{_CONFIG}._set_cudagraph_sizes",),
        switchable=True,
    ),
    Patch(
        id="full-batch-graphs",
        what="A batch that keeps all its drafts replays a graph of as many requests, as under fixed verification",
        upstream="none: every decode graph of T tokens has T requests, most of them empty, or as many as are served",
        hardware=GPUS,
        releases=RELEASES,
        module="patches.full_batch_graphs",
        removal="when upstream's graphs of decode batches have no more requests than the batch",
        wraps=(
            f"{_GRAPHS}._init_candidates",
            f"{_GRAPHS}.captured_token_counts",
            f"{_GRAPHS}.dispatch",
            "vllm.v1.worker.gpu.cudagraph_utils:_is_compatible",
            "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor",
            f"{_RUNNER}:GPUModelRunner.gather_batch_req_state",
            "vllm.v1.worker.utils:get_uniform_decode_token_count",
            "vllm.v1.worker.utils:is_uniform_query_len",
        ),
        switchable=True,
    ),
    Patch(
        id="cpu-engine",
        what="Runs the V2 model runner, DSpark and adaptive verification on a CPU, kernels interpreted",
        upstream="none: upstream's CPU platform forces graphs off and adaptive verification insists on them",
        hardware=frozenset({CPU}),
        releases=("0.32.0",),
        module="patches.cpu.engine",
        removal="when upstream serves adaptive verification on its CPU platform",
        replaces=(
            f"{_ATTENTION}:get_varlen_cudagraph_unsupported_backend",
            f"{_ADAPTIVE}:resolve_adaptive_cudagraph_mode",
        ),
        wraps=(
            f"{_ADAPTIVE}:_assign_draft_token_budget",
            f"{_ADAPTIVE}:_assign_draft_token_budget_compiled",
            f"{_ADAPTIVE}:maybe_create_adaptive_verification_manager",
            f"{_ADAPTIVE}:AdaptiveVerificationManager.set_cost_curves",
            f"{_CONFIG}._validate_adaptive_verification",
            "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
            "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
            "vllm._custom_ops:create_onednn_mm",
            "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        ),
        bound_in={
            f"{_ATTENTION}:get_varlen_cudagraph_unsupported_backend": (_ADAPTIVE,),
            f"{_ADAPTIVE}:resolve_adaptive_cudagraph_mode": (_RUNNER,),
            f"{_ADAPTIVE}:maybe_create_adaptive_verification_manager": (_RUNNER,),
        },
    ),
    Patch(
        id="patch-report",
        what="Lets the server ask every engine core which patches it has, before it says that it is ready",
        upstream="none: upstream swallows a plugin that fails to import and serves without it",
        hardware=EVERYWHERE,
        releases=RELEASES,
        module="patches.engine_report",
        removal="when upstream reports the plugins that every process has loaded",
        wraps=(
            f"{_CORE}:EngineCoreProc._handle_client_request",
            f"{_CORE}:EngineCoreProc._invoke_utility_method",
        ),
    ),
    Patch(
        id="verification-telemetry",
        what="Counts proposed, verified, accepted and expected drafts where they are decided, in the worker",
        upstream="#51303: upstream counts scheduled drafts, so its acceptance rate falls when the budget trims",
        hardware=EVERYWHERE,
        releases=RELEASES,
        module="patches.telemetry.patch",
        removal="when upstream exports what the budget admitted",
        wraps=(
            f"{_RUNNER}:GPUModelRunner.__init__",
            f"{_RUNNER}:GPUModelRunner.prepare_inputs",
            f"{_RUNNER}:GPUModelRunner.execute_model",
            f"{_RUNNER}:GPUModelRunner.postprocess_sampled",
            f"{_RUNNER}:GPUModelRunner.sample_tokens",
            f"{_OUTPUTS}:AsyncOutput.__init__",
            f"{_OUTPUTS}:AsyncOutput.get_output",
            f"{_OUTPUTS}:StepTimingCollector.forward_start",
        ),
        switchable=True,
    ),
    Patch(
        id="hopper-flattened-indexer",
        what="Adaptive verification with DeepSeek's sparse indexer on Hopper: rows built from device boundaries",
        upstream="#52795, in 0.29.0",
        hardware=frozenset({CUDA_HOPPER}),
        releases=("0.28.0",),
        module="patches.hopper_indexer",
        removal="when 0.28.0 is no longer supported",
        wraps=(
            f"{_INDEXER}:DeepseekV32IndexerBackend.supports_device_cpu_query_lens_mismatch",
            f"{_INDEXER_BUILDER}.get_cudagraph_support",
            f"{_INDEXER_BUILDER}.__init__",
            f"{_INDEXER_BUILDER}._prepare_decode_tensors",
            f"{_INDEXER_BUILDER}.build",
        ),
    ),
    Patch(
        id="ragged-metadata-kernel",
        what="Rows of the sparse indexer's decode metadata by one kernel, whatever the requests' lengths",
        upstream="none: ragged lengths take a chain of torch operations, three times as long as even ones",
        hardware=GPUS,
        releases=RELEASES,
        module="patches.ragged_metadata",
        removal="when upstream builds ragged rows in one kernel on these devices",
        wraps=(f"{_INDEXER_BUILDER}.__init__", f"{_INDEXER_BUILDER}._prepare_decode_tensors"),
        switchable=True,
    ),
    Patch(
        id="rocm-dsv41-adaptive",
        what="Adaptive verification of DeepSeek-V4.1 on gfx950: device lengths in the indexer, graphs of any shape",
        upstream="#58151, in 0.33.0; for 0.30.0 also #52362, in 0.31.0",
        hardware=frozenset({ROCM_GFX950}),
        releases=("0.30.0", "0.31.0", "0.32.0"),
        module="patches.rocm_dsv41",
        removal="when 0.32.0 is no longer supported",
        replaces=(f"{_DSV41_ROCM}:DeepseekV4ROCMAiterMLASparseBackend.get_builder_cls",),
        wraps=(
            f"{_INDEXER}:DeepseekV41IndexerBackend",
            f"{_INDEXER}:_use_flattening",
            f"{_INDEXER_BUILDER}.get_cudagraph_support",
            f"{_INDEXER_BUILDER}.__init__",
            f"{_INDEXER_BUILDER}._prepare_decode_tensors",
            f"{_DSV41_MLA}:DeepseekV4SparseMLAMetadataBuilder",
            f"{_DSV41_ROCM}:DeepseekV4ROCMAiterSparseSWAMetadataBuilder",
            f"{_SWA}:DeepseekSparseSWAMetadataBuilder.build",
        ),
    ),
    Patch(
        id="block-rejection-bounds",
        what="Block verification no longer reads past the last row when the last request is trimmed",
        upstream="#60945, in 0.32.0",
        hardware=EVERYWHERE,
        releases=("0.28.0", "0.29.0", "0.30.0", "0.31.0"),
        module="patches.rejection_bounds",
        removal="when 0.31.0 is no longer supported",
        wraps=(
            f"{_REJECTION}:rejection_sample",
            f"{_REJECTION}:_compute_local_residual_mass_kernel",
        ),
        bound_in={
            f"{_REJECTION}:rejection_sample": (
                "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
                "vllm.v1.watermarking.spec_decode",
            ),
        },
    ),
)
"""In the order of installation: a later patch wraps what an earlier one left."""
