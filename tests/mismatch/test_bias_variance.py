"""Bias and variance of gradient estimators: by hand, by simulation, and where there is nothing to see."""

import math

import numpy as np
import pytest

from halfmatch.mismatch import bias_variance
from halfmatch.mismatch.bias_variance import bias_and_variance


def values(*vectors, responses=100):
    return {name: one["value"] for name, one in bias_and_variance(*vectors, responses=responses).items()}


def test_by_hand():
    # G = (4, 0), Σ|g|² = 12, |G|²/2 = 8: V(g) = 2 (12 − 8) = 8; D = (2, 0), Σ|d|² = 4, V(d) = 2 (4 − 2) = 4; |R|² = 4
    gradients, unbiased, reference = [[3, 1], [1, -1]], [[1, 1], [1, -1]], [[1, 0], [1, 0]]
    assert values(gradients, unbiased, reference) == pytest.approx(
        {"variance": 8 / 4, "squared_bias": (4 - 4) / 4, "balance_responses": math.nan}, nan_ok=True
    )
    gradients = [[2, 1], [2, -1]]  # V(g) = 2 (10 − 8) = 4; d = (1, 0) twice: V(d) = 0, |D|² = 4
    assert values(gradients, unbiased, reference) == pytest.approx(
        {"variance": 1, "squared_bias": 1, "balance_responses": 100}
    )


def test_the_estimator_that_is_the_unbiased_one_has_no_bias():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(6, 50))
    found = bias_and_variance(vectors, vectors, vectors, responses=10)
    assert found["squared_bias"] == {"value": 0, "low": 0, "high": 0}
    assert math.isnan(found["balance_responses"]["value"])
    assert found["variance"]["low"] < found["variance"]["value"] < found["variance"]["high"]


def test_variance_is_what_resampled_batches_have():
    rng = np.random.default_rng(1)
    blocks = 1 + rng.normal(size=(8, 5))
    drawn = blocks[rng.integers(0, 8, size=(100_000, 8))].sum(axis=1)
    simulated = drawn.var(axis=0).sum() * 8 / 7  # resamples of n values have (n − 1)/n of the variance
    reference = np.ones((8, 5))
    assert values(blocks, blocks, reference)["variance"] == pytest.approx(simulated / (5 * 8**2), rel=0.02)


def test_both_are_right_on_average_and_the_intervals_hold_them():
    """Blocks g = 1 + bias + noise, u = 1 + the same noise + more; truth by construction."""
    rng = np.random.default_rng(2)
    n, parameters, bias, noise, more = 12, 40, 0.3, 2.0, 0.5
    reference = np.ones((n, parameters))
    found = []
    for _ in range(200):
        shared = noise * rng.normal(size=(n, parameters))
        unbiased = 1 + shared + more * rng.normal(size=(n, parameters))
        found.append(bias_and_variance(1 + bias + shared, unbiased, reference, responses=1))
    truth = {"variance": noise**2 / n, "squared_bias": bias**2}
    for name, expected in truth.items():
        assert np.mean([one[name]["value"] for one in found]) == pytest.approx(expected, rel=0.05)
        covered = np.mean([one[name]["low"] <= expected <= one[name]["high"] for one in found])
        assert covered > 0.88
    balance = np.median([one["balance_responses"]["value"] for one in found])
    assert balance == pytest.approx(noise**2 / n / bias**2, rel=0.1)


def test_chunks_do_not_change_the_result(monkeypatch):
    vectors = np.random.default_rng(3).normal(size=(3, 4, 25))
    whole = values(*vectors)
    monkeypatch.setattr(bias_variance, "CHUNK", 7)
    assert values(*vectors) == pytest.approx(whole, rel=1e-12, nan_ok=True)


def test_without_a_second_block_or_with_a_gradient_that_is_not_finite_nothing_is_known():
    for vectors in ([[1.0, 2.0]], [[1.0, math.nan], [1.0, 2.0]]):
        found = bias_and_variance(vectors, vectors, vectors, responses=10)
        assert all(math.isnan(found[name]["low"]) for name in found)
        assert math.isnan(found["variance"]["value"])
