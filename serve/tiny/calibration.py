"""Calibrating confidences: per-position temperatures, and how far predictions are from the truth.

The scheduler ranks a draft by its *survival*, the probability that it and every draft before it is
accepted: the running product of the per-position confidences. So it is the product that has to be
right, not each factor, and the temperatures are fitted from left to right (the DSpark paper's
sequential temperature scaling): position 1 first, then position 2 with position 1 fixed, and so on,
each against whether its draft survived. An error that the earlier positions leave is made good by
the next one instead of piling up.

NumPy only. N is a number of drafted blocks, K the drafts in each.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.floating]
Booleans = npt.NDArray[np.bool_]

COLDEST, HOTTEST = 0.05, 20.0
GOLDEN = (np.sqrt(5) - 1) / 2
SMALLEST_PROBABILITY = 1e-7


def survival(logits: Logits, temperatures: Floats | None = None) -> Floats:
    """Predicted survival [N, K] from confidence logits [N, K] and, if given, temperatures [K]."""
    scaled = np.asarray(logits, dtype=np.float64) / (1.0 if temperatures is None else temperatures)
    return np.asarray(np.cumprod(_sigmoid(scaled), axis=1))


def fit_temperatures(logits: Logits, accepted: Booleans) -> Floats:
    """Fit one temperature a position, left to right, so that the cumulative product is calibrated.

    logits: [N, K] confidence logits, before the sigmoid.
    accepted: [N, K] whether draft k survived: it *and all before it* were accepted.
    Returns temperatures [K] to divide the logits by. Each minimises the negative log-likelihood of
    its position's survival, with the temperatures to its left fixed.
    """
    before = np.ones(len(logits))
    temperatures = np.ones(logits.shape[1])
    for k in range(logits.shape[1]):
        column = np.asarray(logits[:, k], dtype=np.float64)
        temperatures[k] = _best_temperature(column, before, accepted[:, k])
        before = before * _sigmoid(column / temperatures[k])
    return temperatures


def expected_calibration_error(predicted: Floats, happened: Booleans, bins: int = 10) -> float:
    """Mean distance between what was predicted and what happened, over equal-width bins of [0, 1].

    predicted: probabilities of any shape. happened: the outcomes, in the same shape.
    Each bin counts by its share of the predictions; an empty bin counts nothing.
    """
    probabilities, outcomes = np.ravel(predicted), np.ravel(happened).astype(np.float64)
    index = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    expected = np.bincount(index, weights=probabilities, minlength=bins)
    observed = np.bincount(index, weights=outcomes, minlength=bins)
    return float(np.abs(expected - observed).sum() / len(probabilities))


def acceptance_by_quantile(predicted: Floats, happened: Booleans, groups: int = 5) -> list[tuple[float, float]]:
    """Equally large groups of predictions, lowest first: mean prediction and acceptance of each."""
    order = np.argsort(np.ravel(predicted), kind="stable")
    return [
        (float(np.ravel(predicted)[part].mean()), float(np.ravel(happened)[part].mean()))
        for part in np.array_split(order, groups)
    ]


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * logits)))


def _surprise(logits: Floats, before: Floats, survived: Booleans, log_temperature: float) -> float:
    p = np.clip(before * _sigmoid(logits / np.exp(log_temperature)), SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
    return float(-np.where(survived, np.log(p), np.log1p(-p)).mean())


def _best_temperature(logits: Floats, before: Floats, survived: Booleans) -> float:
    """Golden-section search over the logarithm of the temperature."""
    low, high = float(np.log(COLDEST)), float(np.log(HOTTEST))
    while high - low > 1e-4:
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if _surprise(logits, before, survived, left) < _surprise(logits, before, survived, right):
            high = right
        else:
            low = left
    return float(np.exp((low + high) / 2))
