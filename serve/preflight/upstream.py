"""What this vLLM release itself says about adaptive verification on a hardware, read from its source.

Upstream asks these questions after the weights are loaded (`maybe_create_adaptive_verification_manager`); models
that choose their attention backend themselves, like DeepSeek-V4, are never asked earlier.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from patches.hardware import CUDA_HOPPER, ROCM_GFX950
from serve.preflight.source import Answer, Source, Unanswerable

_INDEXER = "vllm.v1.attention.backends.mla.indexer"
_SHARED = "vllm.v1.attention.backend"
_QUESTIONS = (
    "get_builder_cls",
    "get_cudagraph_support",
    "get_varlen_cudagraph_max_query_len",
    "supports_device_cpu_query_lens_mismatch",
)
_V4, _V41 = "DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"


@dataclass(frozen=True)
class Layer:
    """A kind of attention layer whose backend a model chooses itself.

    Attributes:
        kind: What it is called here.
        owner: `module:Class` of the backend, or of the attention class that names it in `attribute`.
        attribute: The class attribute of `owner` that holds the backend; empty where `owner` is the backend.
        otherwise: The backend where that attribute is None.
    """

    kind: str
    owner: str
    attribute: str = ""
    otherwise: str = ""


def _layers(indexer: str, attention: str) -> tuple[Layer, ...]:
    swa = "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWABackend"
    return (
        Layer("indexer", f"{_INDEXER}:{indexer}"),
        Layer("sparse MLA", attention, "backend_cls"),
        Layer("sparse SWA", attention, "swa_backend_cls", swa),
    )


_ROCM, _FLASH = "amd.rocm:Deepseek{0}ROCMAiterMLAAttention", "nvidia.flashmla:DeepseekV4FlashMLAAttention"
LAYERS: dict[tuple[str, str], tuple[Layer, ...]] = {
    (_V4, CUDA_HOPPER): _layers("DeepseekV4IndexerBackend", f"vllm.models.deepseek_v4.{_FLASH}"),
    (_V41, CUDA_HOPPER): _layers("DeepseekV41IndexerBackend", f"vllm.models.deepseek_v41.{_FLASH}"),
    (_V4, ROCM_GFX950): _layers("DeepseekV4IndexerBackend", f"vllm.models.deepseek_v4.{_ROCM.format('V4')}"),
    (_V41, ROCM_GFX950): _layers("DeepseekV41IndexerBackend", f"vllm.models.deepseek_v41.{_ROCM.format('V41')}"),
}
"""Where each architecture keeps its layers on each hardware. What they can do is asked, not listed."""


@dataclass(frozen=True)
class LayerAnswer:
    """What one layer's backend says.

    Attributes:
        kind: The layer's kind.
        device_lengths: Whether the backend works where only the device knows the query lengths.
        graphs: The kind of batch its graphs replay: `ALWAYS` or less.
    """

    kind: str
    device_lengths: Answer
    graphs: Answer


@dataclass(frozen=True)
class Upstream:
    """The release's own answers.

    Attributes:
        layers: One answer a layer; empty where the attention selector asks them early by itself.
        architectures: Every architecture it registers.
        variables: Every environment variable it knows.
        refuses_short_blocks: Whether it rejects fewer speculative tokens than the draft's block size.
    """

    layers: tuple[LayerAnswer, ...] = ()
    architectures: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    refuses_short_blocks: bool = False


def ask(root: Path, *, hardware: str, architecture: str, num_speculative_tokens: int) -> Upstream:
    """Every answer of the vLLM under `root` for one model on one hardware, with adaptive verification on."""
    source = Source(root, _platform(hardware))
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(enable_adaptive_verification=True, method="dspark"),
        model_config=SimpleNamespace(architectures=[architecture]),
        num_speculative_tokens=num_speculative_tokens,
    )
    return Upstream(
        layers=tuple(_ask_layer(source, layer, config) for layer in LAYERS.get((architecture, hardware), ())),
        architectures=_registered(root),
        variables=_variables(root),
        refuses_short_blocks=_refuses_short_blocks(root),
    )


def _ask_layer(source: Source, layer: Layer, config: Any) -> LayerAnswer:
    return LayerAnswer(
        kind=layer.kind,
        device_lengths=source.ask(lambda s: _device_lengths(s, layer)),
        graphs=source.ask(lambda s: _graph_support(s, layer, config)),
    )


def _backend(source: Source, layer: Layer) -> Any:
    owner = source.resolve(layer.owner)
    if layer.attribute:
        owner = getattr(owner, layer.attribute, None) or source.resolve(layer.otherwise or layer.owner)
    source.consulted += _overridable(owner)
    return owner


def _overridable(cls: type) -> list[str]:
    """Where a patch could change what a class answers: the class and the asked methods, down to the shared base."""
    homes = [f"{base.__module__}:{base.__name__}" for base in cls.__mro__ if base.__module__ != _SHARED]
    return [*homes, *(f"{home}.{question}" for home in homes for question in _QUESTIONS)]


def _device_lengths(source: Source, layer: Layer) -> bool:
    """As `get_query_lens_mismatch_unsupported_backend` asks a backend."""
    return bool(_backend(source, layer).supports_device_cpu_query_lens_mismatch())


def _graph_support(source: Source, layer: Layer, config: Any) -> str:
    """As `get_varlen_cudagraph_unsupported_backend` judges a builder: `ALWAYS`, or a bound that is wide enough."""
    builder = _backend(source, layer).get_builder_cls()
    source.consulted += _overridable(builder)
    support: str = builder.get_cudagraph_support(config, None)
    if support in ("ALWAYS", "NEVER"):
        return support
    bound_of = getattr(builder, "get_varlen_cudagraph_max_query_len", None)  # Releases before 0.30.0 have no bounds.
    bound = bound_of(config, None) if bound_of else None
    return "ALWAYS" if bound is not None and bound > config.num_speculative_tokens else support


class _Names:
    """An enumeration's members as their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class _Platform:
    """Answers of `vllm.platforms.current_platform` for one hardware; any other question has no answer."""

    def __init__(self, hardware: str) -> None:
        self._hardware = hardware

    def is_cuda(self) -> bool:
        return self._hardware == CUDA_HOPPER

    def is_rocm(self) -> bool:
        return self._hardware == ROCM_GFX950

    def is_cuda_alike(self) -> bool:
        return self.is_cuda() or self.is_rocm()

    def is_cpu(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def is_device_capability_family(self, family: int, *_: object) -> bool:
        return self.is_cuda() and family == 90

    def __getattr__(self, name: str) -> Any:
        raise Unanswerable(f"current_platform.{name} is not known here")


def _platform(hardware: str) -> dict[str, Any]:
    """The names that a machine decides. DeepGEMM is taken to be there on Hopper: vLLM's CUDA wheel carries it."""
    return {
        "current_platform": _Platform(hardware),
        "has_deep_gemm": lambda: hardware == CUDA_HOPPER,
        "AttentionCGSupport": _Names(),
        "_ON_GFX950": hardware == ROCM_GFX950,
    }


@cache
def _registered(root: Path) -> frozenset[str]:
    """The keys of the model registry's tables."""
    return frozenset(_mapping_keys(_statements(root, "model_executor/models/registry.py")))


@cache
def _variables(root: Path) -> frozenset[str]:
    """The keys of `vllm.envs.environment_variables`."""
    return frozenset(_mapping_keys(_statements(root, "envs.py")))


def _mapping_keys(statements: list[ast.stmt]) -> Iterator[str]:
    """The text keys of every mapping that is assigned to a name at the top level."""
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            yield from (key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


@cache
def _refuses_short_blocks(root: Path) -> bool:
    """Whether `SpeculativeConfig` raises on `num_speculative_tokens < ...block_size`."""
    for statement in _statements(root, "config/speculative.py"):
        for node in ast.walk(statement):
            if isinstance(node, ast.If) and any(isinstance(below, ast.Raise) for below in node.body):
                test = ast.unparse(node.test)
                if "num_speculative_tokens <" in test and "block_size" in test.partition("<")[2]:
                    return True
    return False


def _statements(root: Path, file: str) -> list[ast.stmt]:
    path = root / "vllm" / file
    return ast.parse(path.read_bytes()).body if path.is_file() else []
