"""The engines that `never_slower` compares: one process each, on one device, driven one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

FASTER = (
    "unblocked-confidences",
    "unbound-budget-shortcut",
    "fused-ranking",
    "ragged-metadata-kernel",
    "chunked-full-budgets",
    "request-aware-costs",
    "coarser-capture-grid",
    "full-batch-graphs",
)

SHAPES = {
    # layers, hidden, intermediate, heads, KV heads, head, vocabulary, tapped layers, draft layers, Markov rank
    "tiny": (4, 512, 1024, 8, 4, 64, 8192, [1, 3], 2, 32),
    "4b": (36, 2560, 9728, 32, 8, 128, 151936, [1, 9, 17, 25, 33], 5, 256),
    "8b": (36, 4096, 12288, 32, 8, 128, 151936, [1, 9, 17, 25, 33], 5, 256),
}
DRAFTS = 7
PROMPT = 32
"""Tokens of a prompt."""

PLUGIN_METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: dspark-bench\nVersion: 0\n",
    "entry_points.txt": "[vllm.general_plugins]\ndspark = patches.plugin:register\n",
}


@dataclass(frozen=True)
class Arm:
    """One way of serving.

    Attributes:
        name: As in the report.
        speculation: `off`, `fixed` or `adaptive`.
        off: Patches that are switched off; None leaves the whole package out.
    """

    name: str
    speculation: str
    off: tuple[str, ...] | None = ()


ARMS = {
    arm.name: arm
    for arm in (
        Arm("off", "off"),
        Arm("fixed", "fixed"),
        Arm("upstream", "adaptive", None),
        Arm("unpatched", "adaptive", FASTER),
        Arm("patched", "adaptive"),
        *(Arm(f"without-{patch}", "adaptive", (patch,)) for patch in FASTER),
    )
}


@dataclass(frozen=True)
class Setting:
    """What all engines of a run share.

    Attributes:
        size: A key of `SHAPES`, or `cpu` for the bundled tiny pair on the CPU engine.
        max_requests: Largest batch.
        max_graph_tokens: Largest batch, in tokens, that is captured.
        kv_gib: Size of the KV cache.
        rejection: `rejection_sample_method`.
        ranks: Tensor-parallel ranks. Several have `RankWorker` for their worker.
    """

    size: str
    max_requests: int
    max_graph_tokens: int
    kv_gib: float
    rejection: str = "synthetic"
    ranks: int = 1

    @property
    def drafts(self) -> int:
        """Of a request and step."""
        if self.size != "cpu":
            return DRAFTS
        from serve.profile import load

        drafts: int = load("tiny-cpu").speculation("adaptive")["num_speculative_tokens"]
        return drafts


def write_models(size: str, folder: Path) -> tuple[str, str]:
    """Configurations of a Qwen3 target and its DSpark draft, to be loaded with dummy weights."""
    layers, hidden, inter, heads, kv_heads, head, vocabulary, taps, draft_layers, rank = SHAPES[size]
    both = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    draft = {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": draft_layers,
        "block_size": DRAFTS,
        "target_layer_ids": taps,
        "num_target_layers": layers,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "mask_token_id": 3,
    }
    # vLLM tells drafts by their folder's name as well.
    paths = folder / size / "target", folder / size / "dspark-draft"
    for path, config in zip(
        paths, ({"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers}, draft), strict=True
    ):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(both | config))
    return str(paths[0]), str(paths[1])


def engine_arguments(arm: Arm, setting: Setting, folder: Path) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    shared: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "disable_log_stats": setting.rejection == "synthetic",
        "enable_prefix_caching": False,
        "seed": 0,
        "max_num_seqs": setting.max_requests,
        "kv_cache_memory_bytes": int(setting.kv_gib * 2**30),
        "worker_extension_cls": "tests.bench.bench_worker.BenchWorker",
    }
    if setting.ranks > 1:
        shared |= {
            "tensor_parallel_size": setting.ranks,
            # Its kernels want peer access, which not every host gives; one all-reduce everywhere is easier to compare.
            "disable_custom_all_reduce": True,
            "worker_extension_cls": "tests.bench.rank_worker.RankWorker",
        }
    if setting.size == "cpu":
        from serve.profile import load, resolve_model

        profile = load("tiny-cpu")
        speculation = dict(profile.speculation("adaptive"))
        shared |= {
            "model": resolve_model(profile.model),
            "max_model_len": 256,
            "max_num_batched_tokens": 256,
            "enforce_eager": True,
        }
    else:
        target, draft = write_models(setting.size, folder)
        speculation = {
            "method": "dspark",
            "model": draft,
            "num_speculative_tokens": setting.drafts,
            "draft_sample_method": "probabilistic",
            "draft_load_config": {"load_format": "dummy"},
        }
        graph_tokens = setting.max_graph_tokens
        if arm.speculation == "off":
            graph_tokens = min(graph_tokens, setting.max_requests)
        compilation: dict[str, Any] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "max_cudagraph_capture_size": graph_tokens,
        }
        shared |= {
            "model": target,
            "load_format": "dummy",
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            # Several engines share the device: ask for no more than is surely free. The KV cache has its own size.
            "gpu_memory_utilization": 0.05,
            "compilation_config": compilation,
        }
    if arm.speculation != "off":
        rates = [round(0.9 ** (i + 1), 6) for i in range(setting.drafts)]
        shared["speculative_config"] = {
            **speculation,
            "enable_adaptive_verification": arm.speculation == "adaptive",
            "rejection_sample_method": setting.rejection,
            **({"synthetic_acceptance_rates": rates} if setting.rejection == "synthetic" else {}),
        }
    return shared


class EngineError(RuntimeError):
    """An engine did not start, or died, or did not answer in time."""


@dataclass
class Engine:
    """A child process with one engine, answering one request at a time over two pipes."""

    arm: Arm
    setting: Setting
    folder: Path
    started: float = field(default_factory=time.monotonic)
    ready: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / f"{self.arm.name}.log"
        plugin = self.folder / "plugin"
        metadata = plugin / "dspark_bench-0.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        for name, text in PLUGIN_METADATA.items():
            (metadata / name).write_text(text)
        arguments = engine_arguments(self.arm, self.setting, self.folder / "models")
        caches = self.folder.parent / "caches"
        environment = {
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(REPOSITORY), str(plugin), os.environ.get("PYTHONPATH", "")))
            ),
            "PYTHONUNBUFFERED": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN": "256",
            "VLLM_ENGINE_READY_TIMEOUT_S": "900",
            "HF_HUB_OFFLINE": "1",
            "DSPARK_PATCHES_OFF": ",".join(self.arm.off or ()),
        }
        if self.arm.off is None:
            environment["VLLM_PLUGINS"] = "none"
        if self.setting.ranks > 1:
            environment |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
        if self.setting.size == "cpu":
            environment |= {"TRITON_INTERPRET": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        answers, child_answers = os.pipe()
        self._answers = os.fdopen(answers, "r")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.engine_child", str(child_answers), json.dumps(arguments)],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(child_answers,),
                start_new_session=True,
            )
        os.close(child_answers)

    def wait_until_ready(self, seconds: float) -> dict[str, Any]:
        """What the child says of its start.

        Raises:
            EngineError: it did not start in time, or at all.
        """
        self.ready = self._answer(seconds)
        return self.ready

    def ask(self, do: str, seconds: float, **what: Any) -> Any:
        """Have the child do something and return what it answers.

        Raises:
            EngineError: it died, failed, or took longer than `seconds`.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineError(f"{self.arm.name}: {error}") from error
        return self._answer(seconds)

    def measure(self, seconds: float, *, requests: int, tokens: int, repeats: int = 1) -> dict[str, Any]:
        """Requests that run together, `repeats` times (`engine_child.measure`).

        Raises:
            EngineError: it died, failed, or took longer than `seconds`.
        """
        found: dict[str, Any] = self.ask(
            "measure", seconds, requests=requests, tokens=tokens, prompt=PROMPT, repeats=repeats
        )
        return found

    def rpc(self, method: str, *args: Any, seconds: float = 120.0) -> Any:
        """A `BenchWorker` method's answer, of the first rank."""
        return self.rpc_of_ranks(method, *args, seconds=seconds)[0]

    def rpc_of_ranks(self, method: str, *args: Any, seconds: float = 120.0) -> list[Any]:
        """A `BenchWorker` method's answer, of every rank."""
        answers: list[Any] = self.ask("rpc", seconds, method=method, args=args)
        return answers

    def _answer(self, seconds: float) -> Any:
        if not select.select([self._answers], [], [], max(seconds, 0.0))[0]:
            raise EngineError(f"{self.arm.name}: no answer in {seconds:.0f} s")
        line = self._answers.readline()
        if not line:
            raise EngineError(f"{self.arm.name}: the engine's process ended ({self._process.poll()})")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.arm.name}: {answer['error']}")
        return answer["is"]

    def tail(self, characters: int = 3000) -> str:
        """The end of the child's log."""
        return self.log.read_text(errors="replace")[-characters:]

    def stop(self) -> None:
        """End the child and every process it started; once, since its number may be another's later."""
        if self._answers.closed:
            return
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        self._answers.close()
