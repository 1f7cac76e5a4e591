"""Bias against variance of a gradient estimator, from its gradients on blocks of problems.

What a correction of the mismatch buys (less bias) and what it costs (more variance), at a fixed policy: the answer to
whether truncated or masked importance sampling is needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from halfmatch.statistics import jackknife_interval

FloatArray = NDArray[np.float64]

# Parameters whose gradients are held in float64 at a time.
CHUNK = 2**18


def bias_and_variance(
    gradients: Sequence[ArrayLike],
    unbiased: Sequence[ArrayLike],
    reference: Sequence[ArrayLike],
    *,
    responses: int,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Of an estimator G = Σ g_b over n blocks of problems, in units of |R|², R the sum of the reference's gradients.

    gradients, unbiased, reference: one vector [parameters] a block each, on the same samples, `responses` in all;
    `unbiased` is of an estimator U whose expectation is the true gradient.

    variance: E|G − E G|² over batches of other problems like these, estimated by what resampled blocks give on average,
    V(g) = n/(n−1) (Σ|g_b|² − |G|²/n); it goes down as 1/responses.
    squared_bias: |E G − E U|², estimated by |G − U|² − V(g − u), which is unbiased and so may come out below 0; it does
    not go down.
    balance_responses: the batch size at which the two are equal; with more responses the bias is the larger error. NaN
    where no bias is seen.

    Each has value, low and high, by the jackknife over blocks; the intervals of variance and balance_responses are of
    their logarithms.
    """
    blocks = len(gradients)
    products = _inner_products(gradients, unbiased, reference)

    def measure(kept: FloatArray) -> dict[str, float]:  # kept [n]: 1 or 0
        n = kept.sum()

        def norm(part: int) -> float:
            return float(kept @ products[part] @ kept)

        def variance(part: int) -> float:
            spread = float(kept @ np.diagonal(products[part])) - norm(part) / n
            return max(n / (n - 1) * spread, 0.0) if n > 1 else np.nan

        with np.errstate(divide="ignore", invalid="ignore"):
            unit = np.float64(norm(2))
            # of as many blocks as there are, where one is left out
            scaled = variance(0) / unit * n / blocks
            squared_bias = (norm(1) - variance(1)) / unit
            balance = responses * scaled / squared_bias if squared_bias > 0 else np.nan
        return {"variance": scaled, "squared_bias": squared_bias, "balance_responses": balance}

    value = measure(np.ones(blocks))
    left_out = [measure(1.0 - one) for one in np.eye(blocks)]
    scales: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "variance": (np.log, np.exp),
        "squared_bias": (np.asarray, np.asarray),
        "balance_responses": (np.log, np.exp),
    }
    estimates = {}
    for name, (scale, inverse) in scales.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            interval = jackknife_interval(scale(value[name]), [scale(one[name]) for one in left_out], confidence)
            low, high = (float(inverse(bound)) for bound in interval)
        estimates[name] = {"value": float(value[name]), "low": low, "high": high}
    return estimates


def _inner_products(
    gradients: Sequence[ArrayLike], unbiased: Sequence[ArrayLike], reference: Sequence[ArrayLike]
) -> FloatArray:
    """The inner products of all blocks' vectors, [3, n, n] float64: of g, of g − u, of r."""
    products = np.zeros((3, len(gradients), len(gradients)))
    for start in range(0, len(np.asarray(gradients[0])), CHUNK):
        g, u, r = (
            np.stack([np.asarray(vector)[start : start + CHUNK] for vector in vectors]).astype(np.float64)
            for vectors in (gradients, unbiased, reference)
        )
        for part, rows in enumerate((g, g - u, r)):
            products[part] += rows @ rows.T
    return products
