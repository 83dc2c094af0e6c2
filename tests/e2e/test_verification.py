"""What adaptive verification decides, and that it changes speed only."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from serve.tiny.calibration import (
    acceptance_by_quantile,
    expected_calibration_error,
    fit_temperatures,
    survival,
)
from serve.tiny.corpus import read_sources
from tests.e2e.prompts import python_prompts
from tests.e2e.running import Server

SERIES = {
    "proposed": ("dspark_proposed_draft_tokens_total", ""),
    "verified": ("dspark_verified_draft_tokens_total", ""),
    "accepted": ("dspark_accepted_draft_tokens_total", ""),
}


def complete_all(server: Server, prompts: list[str], **fields: object) -> list[dict]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: server.complete(prompt, **fields), prompts))


def counts(server: Server) -> dict[str, float]:
    samples = server.samples()
    return {name: samples[key] for name, key in SERIES.items()}


def test_sixteen_requests_verify_less_than_is_proposed_and_what_survives_best(server: Server) -> None:
    before, steps_before = counts(server), len(server.decisions("ranking"))
    answers = complete_all(server, python_prompts(), max_tokens=64, temperature=0.8, seed=3)
    after = counts(server)
    delta = {name: after[name] - before[name] for name in after}
    assert 0 < delta["accepted"] <= delta["verified"] < delta["proposed"]

    rankings = [step for step in server.decisions("ranking")[steps_before:] if sum(step["eligible"])]
    outcomes = server.decisions("verification")[-len(rankings) :]
    assert delta["verified"] == sum(step["budget"] for step in rankings)
    assert delta["proposed"] == sum(sum(step["eligible"]) for step in rankings)
    assert delta["verified"] == sum(step["verified"] for step in outcomes)
    assert delta["accepted"] == sum(sum(step["accepted"]) for step in outcomes)

    per_request = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert delta["accepted"] == sum(request["num_accepted_draft_tokens"] for request in per_request)

    trimmed = [step for step in rankings if 0 < step["budget"] < sum(step["eligible"])]
    assert len(trimmed) > 5
    for step in rankings:
        assert sum(step["admitted"]) == step["budget"]
        survives = np.cumprod(np.array(step["confidences"], dtype=np.float32), axis=1, dtype=np.float32)
        admitted = [survives[r, s] for r, count in enumerate(step["admitted"]) for s in range(count)]
        eligible = sorted((survives[r, s] for r, n in enumerate(step["eligible"]) for s in range(n)), reverse=True)
        np.testing.assert_allclose(sorted(admitted, reverse=True), eligible[: step["budget"]], rtol=1e-5)


def test_padding_is_counted_nowhere(server: Server) -> None:
    """A one-token prompt that joins running requests is padded with K drafts that were never drafted."""
    rankings_before = len(server.decisions("ranking"))
    before = counts(server)
    with ThreadPoolExecutor(12) as pool:
        long = [pool.submit(server.complete, prompt, max_tokens=96) for prompt in python_prompts()[:4]]
        server.wait_until(lambda: len(server.decisions("ranking")) >= rankings_before + 3)
        short = [pool.submit(server.complete, [40 + i], max_tokens=8) for i in range(8)]
        for future in long + short:
            future.result()
    rankings = server.decisions("ranking")[rankings_before:]
    padded = [step for step in rankings if 0 in step["eligible"]]
    assert padded, "no padded request was scheduled"
    for step in padded:
        assert all(count == 0 for count, drafts in zip(step["admitted"], step["eligible"], strict=True) if drafts == 0)
    after = counts(server)
    assert after["proposed"] - before["proposed"] == sum(sum(step["eligible"]) for step in rankings)
    assert after["verified"] - before["verified"] == sum(step["budget"] for step in rankings)


def test_the_histogram_agrees_with_the_counters(server: Server) -> None:
    server.complete("import os\n", max_tokens=16)
    samples = server.samples()
    count = samples["dspark_acceptance_length_count", ""]
    assert samples["dspark_acceptance_length_sum", ""] - count == counts(server)["accepted"]
    assert samples["dspark_acceptance_length_bucket", "+Inf"] == count
    assert samples["dspark_acceptance_length_bucket", "6.0"] == count


def test_vllms_own_series_stand_beside_ours(server: Server) -> None:
    names = {name for name, _ in server.samples()}
    assert {"vllm:generation_tokens_total", "vllm:num_requests_running", "vllm:spec_decode_num_drafts_total"} <= names
    assert "process_resident_memory_bytes" in names
    assert server.client.get("/metrics").text.count("# TYPE vllm:num_requests_running gauge") == 1


def test_the_bundled_pair_is_worth_watching(server: Server) -> None:
    """On held-out Python: drafts are accepted, confidence tells which, and completions look like Python."""
    texts = [source.text[: len(source.text) // 3].rsplit("\n", 1)[0][-1200:] for source in read_sources("held_out")][
        :16
    ]
    samples, seen = server.samples(), len(server.decisions("ranking"))
    with ThreadPoolExecutor(2) as pool:  # few enough that every draft is verified
        answers = list(pool.map(lambda text: server.complete(text, max_tokens=96, temperature=1.0, seed=11), texts))
    after = server.samples()
    requests = after["dspark_acceptance_length_count", ""] - samples["dspark_acceptance_length_count", ""]
    tokens = after["dspark_acceptance_length_sum", ""] - samples["dspark_acceptance_length_sum", ""]
    assert tokens / requests >= 2.2

    rankings = [step for step in server.decisions("ranking")[seen:] if sum(step["eligible"])]
    outcomes = server.decisions("verification")[-len(rankings) :]
    confidences, accepted = [], []
    for ranking, outcome in zip(rankings, outcomes, strict=True):
        rows = [r for r, drafts in enumerate(ranking["eligible"]) if drafts]
        for row, count in zip(rows, outcome["accepted"], strict=True):
            assert ranking["admitted"][row] == ranking["eligible"][row]
            if ranking["admitted"][row] == 5:
                confidences.append(ranking["confidences"][row])
                accepted.append([step < count for step in range(5)])
    probabilities = np.clip(np.array(confidences), 1e-4, 1 - 1e-4)
    logits, outcome_of = np.log(probabilities / (1 - probabilities)), np.array(accepted)
    predicted = survival(logits[1::2], fit_temperatures(logits[::2], outcome_of[::2]))
    assert expected_calibration_error(predicted, outcome_of[1::2]) < 0.10
    shares = [accepted_share for _, accepted_share in acceptance_by_quantile(predicted, outcome_of[1::2])]
    assert shares == sorted(shares)

    completions = [answer["choices"][0]["text"] for answer in answers]
    assert sum("self" in text or "def " in text or "return" in text or "(" in text for text in completions) >= 12
