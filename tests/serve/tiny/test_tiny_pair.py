import io
import itertools
import tokenize

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.tiny.calibration import (
    acceptance_by_quantile,
    expected_calibration_error,
    fit_temperatures,
    survival,
)
from serve.tiny.corpus import read_sources, split_of
from serve.tiny.decoding import Rounds, accept, speculate
from serve.tiny.evaluate import Workload, decode, held_out_prompts
from serve.tiny.pair import HERE, TinyPair, load_pair, load_tokenizer
from serve.tiny.target import sample_continuations
from serve.tiny.tokenizer import BOS, BOS_ID, EOS_ID, MASK_ID, PAD_ID

FILES_A_SIDE = 8
WORKLOAD = Workload(prompts_a_file=3, prompt_length=96, rounds=20)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair() -> TinyPair:
    return load_pair()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def prompts_of(start: int) -> torch.Tensor:
    files = read_sources("held_out")[start::2][:FILES_A_SIDE]
    return held_out_prompts(HERE, files, WORKLOAD)


@pytest.fixture(scope="module")
def fitted_on(pair: TinyPair) -> Rounds:
    return decode(pair, prompts_of(0), WORKLOAD.rounds, temperature=1.0)


@pytest.fixture(scope="module")
def judged_on(pair: TinyPair) -> Rounds:
    return decode(pair, prompts_of(1), WORKLOAD.rounds, temperature=1.0, seed=1)


def test_everything_bundled_is_small():
    files = [path for part in ("target", "draft") for path in (HERE / part).iterdir()]
    assert sum(path.stat().st_size for path in files) < 5_000_000
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}


@given(st.text())
@settings(max_examples=200)
def test_any_text_survives_the_tokenizer(tokenizer, text: str):
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer):
    assert len(tokenizer) == 1024
    special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id
    assert special == (BOS_ID, EOS_ID, PAD_ID, MASK_ID)
    assert tokenizer("import os")["input_ids"][0] == BOS_ID


PARSED_CALL = {"type": "function", "function": {"name": "read", "arguments": {"path": "a.py"}}}
CALL = {"type": "function", "id": "1", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "def f("}], "def f("),
        ([{"role": "user", "content": [{"type": "text", "text": "import "}, {"type": "text", "text": "os"}]}],
         "import os"),
        ([{"role": "user", "content": "b"}, {"role": "system", "content": "a"}], "a\nb"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
          {"role": "user", "content": "c"}],
         "a\nb\nc"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
          {"role": "tool", "tool_call_id": "1", "content": "x = 1"}],
         'a\nread({"path": "a.py"})\nx = 1'),
        ([{"role": "assistant", "content": "b", "tool_calls": [CALL]}], 'b\nread({"path": "a.py"})'),
        ([{"role": "assistant", "tool_calls": [CALL]}], 'read({"path": "a.py"})'),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], ""),
        ([{"role": "developer", "content": "a"}, {"role": "user", "content": ""}], "a\n"),
        ([{"role": "assistant", "tool_calls": [PARSED_CALL]}], 'read({"path": "a.py"})'),
        ([{"role": "user", "content": "class A:\n    "}], "class A:"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "read", "parameters": {}}}]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_is_text_to_continue(tokenizer, messages, expected, tools, add_generation_prompt):
    rendered = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert rendered == BOS + expected


def test_held_out_files_are_never_trained_on():
    train, held_out = ({source.name for source in read_sources(split)} for split in ("train", "held_out"))
    assert train.isdisjoint(held_out)
    assert len(held_out) > 20
    # The split is a property of the name alone: a change here would let trained files in.
    assert [split_of(name) for name in ("enum.py", "json/encoder.py")] == ["held_out", "held_out"]
    assert [split_of(name) for name in ("abc.py", "json/decoder.py")] == ["train", "train"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_length_on_held_out_files(pair: TinyPair, judged_on: Rounds, temperature: float):
    rounds = judged_on if temperature else decode(pair, prompts_of(1), WORKLOAD.rounds, temperature)
    assert rounds.acceptance_length() >= 2.2


def test_confidence_is_calibrated_after_fitting_on_other_files(fitted_on: Rounds, judged_on: Rounds):
    temperatures = fit_temperatures(fitted_on.confidence_logits.numpy(), fitted_on.survived().numpy())
    predicted = survival(judged_on.confidence_logits.numpy(), temperatures)
    assert expected_calibration_error(predicted, judged_on.survived().numpy()) < 0.10


def test_acceptance_rises_over_quintiles_of_survival(judged_on: Rounds):
    predicted = survival(judged_on.confidence_logits.numpy())
    accepted = [rate for _, rate in acceptance_by_quantile(predicted, judged_on.survived().numpy())]
    assert all(low < high for low, high in itertools.pairwise(accepted))
    assert accepted[-1] - accepted[0] > 0.3


def test_greedy_speculation_says_what_the_target_says(pair: TinyPair):
    prompts = prompts_of(0)[:4]
    texts, _ = speculate(pair, prompts, 8, 0.0, torch.Generator())
    for text in texts:
        with torch.inference_mode():
            logits, _ = pair.verify(text[None])
        assert torch.equal(logits[0, prompts.shape[1] - 1 : -1].argmax(-1), text[prompts.shape[1] :])


def test_rejection_sampling_keeps_the_target_distribution():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]]), torch.tensor([[0.2, 0.2, 0.6]])
    many = 20_000
    drafts = torch.multinomial(q.expand(many, -1), 1, generator=generator)
    accepted, own = accept(drafts, p.expand(many, -1, -1), q.expand(many, 1, -1), generator)
    first = torch.where(accepted > 0, drafts[:, 0], own)
    assert torch.allclose(torch.bincount(first) / many, p[0], atol=0.015)
    assert torch.allclose(torch.bincount(own[accepted > 0]) / (accepted > 0).sum(), p[1], atol=0.02)
    assert abs((accepted > 0).float().mean() - 0.5) < 0.015  # the overlap of p and q


def test_completions_are_python_tokens(pair: TinyPair, tokenizer):
    prompts = prompts_of(1)[::3]
    torch.manual_seed(0)
    texts = sample_continuations(pair.target, prompts, 96, temperature=0.7)[:, prompts.shape[1] :]
    lines = [line for text in texts for line in tokenizer.decode(text).splitlines()[1:-1] if line.strip()]
    assert len(lines) > 30
    assert np.mean([is_tokens(line) for line in lines]) > 0.7
    assert any(line.startswith("    ") for line in lines)


def is_tokens(line: str) -> bool:
    """Whether a line alone is made of Python's tokens; it may leave a bracket or a string open."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except tokenize.TokenError as error:
        return "EOF in multi-line" in error.args[0]
    return all(token.type != tokenize.ERRORTOKEN for token in tokens)


def test_temperatures_recover_overconfidence_position_by_position():
    generator = np.random.default_rng(0)
    truth = generator.normal(1.0, 1.5, (40_000, 3))
    survived = np.cumprod(generator.random(truth.shape) < 1 / (1 + np.exp(-truth)), axis=1).astype(bool)
    stretch = np.array([2.0, 0.5, 3.0])
    temperatures = fit_temperatures(truth * stretch, survived)
    assert np.allclose(temperatures, stretch, rtol=0.1)
    assert expected_calibration_error(survival(truth * stretch, temperatures), survived) < 0.01
    assert expected_calibration_error(survival(truth * stretch), survived) > 0.03


def test_an_error_of_the_first_position_is_made_good_by_the_second():
    # Half the first drafts survive though the logit says nearly all: no temperature of position 1
    # can repair a logit of the right sign, and position 2 still has to come out right on average.
    generator = np.random.default_rng(1)
    first = generator.random(40_000) < 0.5
    second = first & (generator.random(40_000) < 0.8)
    survived = np.stack([first, second], axis=1)
    temperatures = fit_temperatures(np.full((40_000, 2), 3.0), survived)
    assert survival(np.full((1, 2), 3.0), temperatures)[0] == pytest.approx([0.5, 0.4], abs=0.15)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=50))
def test_calibration_error_is_a_share(pairs):
    predicted, happened = (np.array(column) for column in zip(*pairs, strict=True))
    assert 0 <= expected_calibration_error(predicted, happened) <= 1


def test_calibration_error_of_perfect_and_of_wrong_predictions():
    happened = np.array([True, False])
    assert expected_calibration_error(np.array([1.0, 0.0]), happened) == 0
    assert expected_calibration_error(np.array([0.0, 1.0]), happened) == 1
