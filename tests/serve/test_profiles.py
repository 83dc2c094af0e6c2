"""Bundled profiles, their schema, and what `--set` and words after `--` make of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from patches import install
from serve.arguments import ArgumentNames, argument_names, split_words
from serve.errors import InputError
from serve.overrides import override
from serve.profile import PROFILES, SCHEMA, Profile, Verification, bundled_names, json_schema, load

SEED = """
vllm serve deepseek-ai/DeepSeek-V4.1-Flash
  --served-model-name deepseek-ai/DeepSeek-V4.1-Flash --tokenizer-mode deepseek_v41 --trust-remote-code
  --tensor-parallel-size 4 --distributed-executor-backend mp --max-model-len 8192 --max-num-batched-tokens 4096
  --max-num-seqs 256 --gpu-memory-utilization 0.9 --kv-cache-dtype fp8 --block-size 64 --moe-backend aiter
  --compilation-config
    '{"mode":3,"cudagraph_mode":"FULL_AND_PIECEWISE","max_cudagraph_capture_size":2048}'
  --speculative-config
    '{"method":"dspark","num_speculative_tokens":5,"draft_sample_method":"probabilistic",
      "enable_adaptive_verification":true}'
  --language-model-only --enable-auto-tool-choice --tool-call-parser deepseek_v41 --reasoning-parser deepseek_v41
"""
"""The engine's arguments in vllm#58151 (host and port are the server's)."""


@pytest.fixture(scope="module")
def names() -> ArgumentNames:
    root = install.vllm_root()
    assert root is not None
    return argument_names(root)


def test_the_seven_recipes_are_there() -> None:
    assert bundled_names() == [
        "deepseek-v4-flash-h200x4",
        "deepseek-v4-flash-h200x4-tp4",
        "deepseek-v4.1-flash-mi355x4",
        "deepseek-v4.1-flash-mi355x4-64k",
        "deepseek-v4.1-flash-mi355x4-ep",
        "qwen3-8b-dspark-h200",
        "tiny-cpu",
    ]


def test_the_checked_in_schema_is_the_models_own() -> None:
    assert SCHEMA.read_text() == json_schema()


def test_every_key_of_a_profile_is_described() -> None:
    properties = json.loads(json_schema())["properties"]
    assert [key for key, value in properties.items() if not value.get("description")] == []


@pytest.mark.parametrize("name", bundled_names())
def test_a_bundled_profile_fits_schema_name_and_vllm(name: str, names: ArgumentNames) -> None:
    content = yaml.safe_load((PROFILES / f"{name}.yaml").read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(content)
    profile = load(name)
    assert profile.name == name
    assert [argument for argument in profile.engine_args if argument not in names.types] == []
    assert names.unknown_speculative(profile.speculative_config) == {}
    parallel = (profile.engine_args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "data"))
    product = 1
    for size in parallel:
        product *= size
    assert profile.gpus == (0 if profile.hardware == "cpu" else product)


def test_the_schema_refuses_what_the_model_refuses() -> None:
    content = load("tiny-cpu").model_dump() | {"gpu": 1}
    with pytest.raises(jsonschema.ValidationError, match="'gpu' was unexpected"):
        jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(content)


def test_the_mi355_profile_is_the_seeds_command(names: ArgumentNames) -> None:
    _, _, model, *seed = shlex.split(SEED)
    profile = load("deepseek-v4.1-flash-mi355x4")
    ours, *words = profile.command_line(Verification.ADAPTIVE)
    assert ours == model
    assert split_words(words, names) == split_words(seed, names)
    assert profile.environment == {
        "VLLM_ENGINE_READY_TIMEOUT_S": "7200",
        "VLLM_ROCM_USE_AITER": "1",
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ROCM_MONO_DECODE": "1",
    }


def test_the_other_mi355_profiles_differ_in_what_their_names_say() -> None:
    base = load("deepseek-v4.1-flash-mi355x4").model_dump()
    experts = load("deepseek-v4.1-flash-mi355x4-ep").model_dump()
    assert experts["engine_args"] == base["engine_args"] | {"enable_expert_parallel": True}
    assert experts["environment"] == base["environment"] | {"VLLM_ROCM_MONO_DECODE": "0"}
    long = load("deepseek-v4.1-flash-mi355x4-64k").model_dump()
    assert long["engine_args"]["max_model_len"] >= 65536 + 4096
    assert long["environment"] == base["environment"]


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["max_num_seqs=32"], ("engine_args", "max_num_seqs"), 32),
        (["max-num-seqs=32"], ("engine_args", "max_num_seqs"), 32),
        (["engine_args.max_num_seqs=32"], ("engine_args", "max_num_seqs"), 32),
        (["speculative_config.num_speculative_tokens=3"], ("speculative_config", "num_speculative_tokens"), 3),
        (["compilation_config.mode=3"], ("engine_args", "compilation_config"), {"mode": 3}),
        (["enforce_eager=false"], ("engine_args", "enforce_eager"), False),
        (["environment.TRITON_INTERPRET=0"], ("environment", "TRITON_INTERPRET"), "0"),
        (["gpus=2"], ("gpus",), 2),
        (["revision=main"], ("revision",), "main"),
        (["gpus=2", "gpus=3"], ("gpus",), 3),
    ],
)  # fmt: skip
def test_set_replaces_one_value_typed(
    names: ArgumentNames, words: list[str], path: tuple[str, ...], value: Any
) -> None:
    profile = load("tiny-cpu")
    content: Any = override(profile, words, names).model_dump()
    for key in path:
        content = content[key]
    assert content == value
    assert override(profile, [], names) == profile


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("max_nums_seqs=32", "did you mean 'max_num_seqs'"),
        ("engine_args.max_nums_seqs=32", "did you mean 'max_num_seqs'"),
        ("speculative_config.num_speculative_token=3", "did you mean 'num_speculative_tokens'"),
        ("modle=x", "did you mean 'model'"),
        ("max_num_seqs=many", "max_num_seqs takes int, not 'many'"),
        ("enforce_eager=3", "enforce_eager takes bool, not 3"),
        ("gpus=-1", "gpus: Input should be greater"),
        ("gpus=two", "gpus"),
        ("max_num_seqs", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("engine_args=3", "name one key"),
        ("engine_args.=3", "part of the key is empty"),
        ("model.size=3", "is a single value"),
        ("environment.A B=3", "environment"),
        ("checkpoint_gib=.inf", "checkpoint_gib"),
        ("max_num_seqs=" + "[" * 2000, "nested too deeply"),
        ("max_num_seqs=[", "--set engine_args.max_num_seqs"),
    ],
)
def test_a_set_that_cannot_be_is_one_line(names: ArgumentNames, word: str, says: str) -> None:
    with pytest.raises(InputError) as refused:
        override(load("tiny-cpu"), [word], names)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-num-seqs", "4"], {"max_num_seqs": 4}),
        (["--max_num_seqs=4"], {"max_num_seqs": 4}),
        (["-tp", "4"], {"tensor_parallel_size": 4}),
        (["-tp=4"], {"tensor_parallel_size": 4}),
        (["--enforce-eager", "--no-enable-prefix-caching"], {"enforce_eager": True, "enable_prefix_caching": False}),
        (["--compilation-config", '{"mode": 3}'], {"compilation_config": {"mode": 3}}),
        (["--compilation-config.mode=3"], {"compilation_config": {"mode": 3}}),
        (["--speculative-config.num-speculative-tokens", "3"], {"speculative_config": {"num_speculative_tokens": 3}}),
        (["--allowed-origins", "a", "b", "--seed", "-1"], {"allowed_origins": ["a", "b"], "seed": -1}),
        (["--seed", "1", "--seed", "2"], {"seed": 2}),
        (["--dtype="], {"dtype": ""}),
        (["-O3"], {"optimization_level": 3}),
        (["-O=2"], {"optimization_level": 2}),
        (["-cc.mode=3"], {"compilation_config": {"mode": 3}}),
    ],
)
def test_words_are_split_as_argparse_does(names: ArgumentNames, words: list[str], expected: dict[str, Any]) -> None:
    assert split_words(words, names) == expected


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["four"], "'four' is no argument"),
        (["--config", "mine.yaml"], "--config hides"),
        (["--compilation-config", "{mode"], "takes JSON"),
        (["--compilation-config", "[" * 100_000], "takes JSON"),
    ],
)
def test_words_that_are_no_arguments_are_one_line(names: ArgumentNames, words: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        split_words(words, names)


def test_dotted_words_change_the_profiles_mapping_and_do_not_replace_it() -> None:
    profile = load("tiny-cpu")
    words = ["--speculative-config.num_speculative_tokens", "3", "--seed=1", "--speculative-config.nested.key=true"]
    line = profile.command_line(Verification.FIXED, words)
    speculation = json.loads(line[line.index("--speculative-config") + 1])
    assert speculation == profile.speculation(Verification.FIXED) | {
        "num_speculative_tokens": 3,
        "nested": {"key": True},
    }
    assert line[-1] == "--seed=1"
    assert line.count("--speculative-config") == 1


@pytest.mark.parametrize("word", ["--compilation-config.mode=0", "--compilation_config.mode=0", "-cc.mode=0"])
def test_a_short_option_is_folded_too(word: str) -> None:
    line = load("deepseek-v4.1-flash-mi355x4").command_line(Verification.ADAPTIVE, [word])
    compilation = json.loads(line[line.index("--compilation-config") + 1])
    assert (compilation["mode"], compilation["max_cudagraph_capture_size"]) == (0, 2048)
    assert word not in line


def test_without_speculation_a_profile_has_no_speculative_config() -> None:
    assert "--speculative-config" not in load("tiny-cpu").command_line(Verification.OFF)


@pytest.mark.parametrize("word", ["--speculative-config.num_speculative_tokens=3", "--speculative_config={}", "-sc"])
def test_speculation_that_is_off_cannot_be_set_up(word: str) -> None:
    with pytest.raises(InputError, match="verification is off"):
        load("tiny-cpu").command_line(Verification.OFF, [word])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: [", "is not YAML"),
        ("name: &a [*a]", "is not YAML: Circular"),
        ("name: " + "[" * 2000, "nested too deeply"),
        ("name: 0x" + "f" * 5000, "is not YAML"),
        ("? [a, b]\n: c", "is not YAML"),
        ("- a\n", "not valid"),
        ("", "not valid"),
        ("name: x\ndescription: y\n", "hardware: Field required"),
    ],
)
def test_a_profile_of_the_users_own_is_read_by_path(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.yaml"
    content = load("tiny-cpu").model_dump() | {"name": "mine"}
    file.write_text(yaml.safe_dump(content))
    assert load(str(file)) == Profile.model_validate(content)
    file.write_text(text)
    with pytest.raises(InputError, match=says):
        load(str(file))


@pytest.mark.parametrize("name", ["nothing", "nothing.yaml", "a/b.yaml", "", "x\0.yaml", "../profile"])
def test_a_profile_that_is_not_there_names_those_that_are(name: str) -> None:
    with pytest.raises(InputError, match="tiny-cpu"):
        load(name)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(InputError, match="UTF-8"):
        load(str(file))
