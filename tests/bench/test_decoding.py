"""The window in which all requests decode, worked out by hand."""

from __future__ import annotations

import pytest

from tests.bench.decoding import Decoding, TooFewTokensError, Window


def seen(requests: int, *steps: tuple[float, dict[str, int], str]) -> Window:
    """Steps of a time, every request's new tokens, and the requests that end with them."""
    window = Window(requests)
    for at, tokens, ended in steps:
        window.see(at, [(request, count, request in ended) for request, count in tokens.items()])
    return window


def test_it_begins_with_the_last_request_and_ends_with_the_first():
    window = seen(
        2,
        (1.0, {"a": 1}, ""),
        (2.0, {"a": 5, "b": 1}, ""),  # the last begins: what came with it is before the window
        (3.0, {"a": 3, "b": 4}, ""),
        (3.5, {"b": 2}, ""),
        (5.0, {"a": 1, "b": 8}, "a"),
        (9.0, {"b": 8}, "b"),
    )
    assert window.decoding() == Decoding(seconds=3.0, tokens=18, outputs=3)


def test_a_request_has_not_begun_before_its_first_token():
    window = seen(2, (1.0, {"a": 1, "b": 0}, ""), (2.0, {"a": 1, "b": 1}, ""), (3.0, {"a": 1, "b": 1}, "ab"))
    assert window.decoding() == Decoding(seconds=1.0, tokens=2, outputs=1)


@pytest.mark.parametrize(
    "steps",
    [
        [(1.0, {"a": 4}, "a"), (2.0, {"b": 4}, "b")],
        [(1.0, {"a": 2}, ""), (2.0, {"a": 2, "b": 4}, "ab")],
        [(1.0, {"a": 4, "b": 4}, "")],
    ],
    ids=["before the last began", "just when it began", "nothing ended"],
)
def test_requests_that_never_all_run_together_are_no_measurement(steps):
    with pytest.raises(TooFewTokensError, match="2 requests never all ran together: give them more tokens"):
        seen(2, *steps).decoding()
