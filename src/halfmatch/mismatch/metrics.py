"""How far the trainer's policy π is from the rollout engine's policy μ, on tokens that μ sampled.

d = log π − log μ in nats, one a response token; Σd and T are a response's sum and number of tokens; w = exp(Σd) is the
weight of importance sampling. Nothing is clamped, and sums of weights are taken in log space, so that a collapse shows.
All of it is float64, and NaN where there is too little data (a standard deviation of one response).

Every metric is computed from sums that add over tokens, responses and problems (`token_terms`, `sequence_terms`), by
functions of such sums of any shape (`token_values`, `sequence_values`): of a padded batch here, of a stream of row
groups and of the resamples of a bootstrap in `halfmatch.mismatch.offline`.

Tokens where d is NaN or infinite are counted and left out of token metrics, and the responses that hold one are counted
and left out of sequence metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmatch.statistics import jackknife_interval

FloatArray = NDArray[np.float64]

# |d| in nats above which a token's share is reported: about 1 %, 10 % and a factor e of its probability.
THRESHOLDS = (0.01, 0.1, 1.0)

# A sum of exponentials below this has lost terms to the underflow of float64.
_SMALLEST_TOTAL = 1e-280

# Below 1 by as much as rounding may leave a cosine of equal gradients, so that its artanh is finite.
_LARGEST_COSINE = 1 - 2**-52


def token_metrics(logp_train: Any, logp_rollout: Any, mask: Any) -> dict[str, float]:
    """Metrics of the tokens of a padded batch; tensors or arrays: log π, log μ [B, T] in nats, mask [B, T] bool.

    k1 = mean −d, k2 = mean d²/2 and k3 = mean e^d − 1 − d estimate KL[μ‖π] a token (Schulman 2020: k1 and k3 without
    bias, k3 with less variance); chi2 = mean e^{2d} − 1; `…_prob_diff` are of π − μ as probabilities, signed but for
    mean_abs_prob_diff; share_above_x is the share of tokens with |d| > x; usable_length = ln 2 / (2 k3) is the number
    of tokens at which sequence-level importance sampling loses half of its samples.
    """
    logp_train, logp_rollout, mask = _float64(logp_train), _float64(logp_rollout), _float64(mask).astype(bool)
    terms = token_terms(logp_train[mask], logp_rollout[mask])
    values = token_values({name: np.asarray(term.sum()) for name, term in terms.items()})
    high, low = extremes(terms["prob_diff"][terms["tokens"] > 0])
    return {**{name: float(value) for name, value in values.items()}, "max_prob_diff": high, "min_prob_diff": low}


def sequence_metrics(logp_train: Any, logp_rollout: Any, mask: Any) -> dict[str, float]:
    """Metrics of the responses of a padded batch, as `token_metrics`; responses without a token do not count.

    kl_sequence = mean −Σd estimates KL[μ‖π] of whole responses; sigma is the standard deviation of Σd (over n−1);
    slope_per_1k the least-squares slope of Σd against T, a thousand tokens; ess = (Σw)²/Σw², a number of responses, and
    ess_share = ess / n; perplexity_ratio = mean exp(−Σd / T), π's perplexity over μ's.

    The σ law: if d is noise of variance 2k a token (k the KL a token, estimated by k3), then sigma is
    sigma_predicted = √(2 k T) at the mean length T, and ess_share is ess_share_predicted = exp(−2 k T). Without a law
    (docs/sigma_law.md): sigma_tokens = √(mean Σd²) is what sigma is where all prefixes are equally hard, and
    sigma_slack, the standard deviation of Σ(e^d − 1 − d), bounds how far it is from there where they are not.
    """
    logp_train, logp_rollout, mask = _float64(logp_train), _float64(logp_rollout), _float64(mask).astype(bool)
    response = np.nonzero(mask)[0]  # of each token
    terms = token_terms(logp_train[mask], logp_rollout[mask])
    tokens, bad_tokens, log_ratios, squares, k3 = (
        np.bincount(response, weights=terms[name], minlength=len(mask))
        for name in ("tokens", "non_finite_tokens", "d", "d_squared", "k3")
    )
    finite = (bad_tokens == 0) & (tokens > 0)
    log_ratios, lengths, squares, k3 = log_ratios[finite], tokens[finite], squares[finite], k3[finite]
    sums = {name: np.asarray(term.sum()) for name, term in sequence_terms(log_ratios, lengths, squares, k3).items()}
    values = sequence_values(sums, log_sum(log_ratios), log_sum(2 * log_ratios))
    bad_sequences = float((bad_tokens > 0).sum())
    return {**{name: float(value) for name, value in values.items()}, "non_finite_sequences": bad_sequences}


def token_terms(logp_train: FloatArray, logp_rollout: FloatArray) -> dict[str, FloatArray]:
    """What token metrics are sums of, for each token; a token with a non-finite d has zeros, but for its count."""
    with np.errstate(invalid="ignore"):
        d = logp_train - logp_rollout
    finite = np.isfinite(d)
    d = np.where(finite, d, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.where(finite, np.exp(logp_train) - np.exp(logp_rollout), 0.0)
        excess = np.expm1(d)  # e^d − 1
        return {
            "tokens": finite.astype(np.float64),
            "non_finite_tokens": (~finite).astype(np.float64),
            "d": d,
            "d_squared": d * d,
            "k3": excess - d,
            "chi2": excess * (excess + 2),
            "prob_diff": difference,
            "abs_prob_diff": np.abs(difference),
            **{f"above_{threshold:g}": (np.abs(d) > threshold).astype(np.float64) for threshold in THRESHOLDS},
        }


def token_values(sums: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Token metrics from sums of `token_terms`, element by element."""
    tokens = sums["tokens"]
    with np.errstate(divide="ignore", invalid="ignore"):
        k3 = sums["k3"] / tokens
        return {
            "tokens": tokens,
            "non_finite_tokens": sums["non_finite_tokens"],
            "k1": -sums["d"] / tokens,
            "k2": sums["d_squared"] / (2 * tokens),
            "k3": k3,
            "chi2": sums["chi2"] / tokens,
            "mean_prob_diff": sums["prob_diff"] / tokens,
            "mean_abs_prob_diff": sums["abs_prob_diff"] / tokens,
            **{f"share_above_{threshold:g}": sums[f"above_{threshold:g}"] / tokens for threshold in THRESHOLDS},
            "usable_length": np.log(2) / (2 * k3),
        }


def sequence_terms(
    log_ratios: FloatArray, lengths: FloatArray, squares: FloatArray, k3: FloatArray
) -> dict[str, FloatArray]:
    """What sequence metrics are sums of, for each response: its Σd, T ≥ 1, Σd² and Σ(e^d − 1 − d)."""
    with np.errstate(over="ignore"):
        return {
            "sequences": np.ones_like(log_ratios),
            "log_ratio": log_ratios,
            "log_ratio_squared": log_ratios**2,
            "length": lengths.astype(np.float64),
            "length_squared": lengths.astype(np.float64) ** 2,
            "log_ratio_length": log_ratios * lengths,
            "perplexity_ratio": np.exp(-log_ratios / lengths),
            "squares": squares,
            "k3": k3,
            "k3_squared": k3**2,
        }


def sequence_values(
    sums: Mapping[str, FloatArray], log_weights: FloatArray, log_squared_weights: FloatArray
) -> dict[str, FloatArray]:
    """Sequence metrics from sums of `sequence_terms`, log Σw and log Σw², element by element."""
    n, total, length = sums["sequences"], sums["log_ratio"], sums["length"]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        others = np.where(n > 1, n - 1, np.nan)
        variance = np.maximum(sums["log_ratio_squared"] - total**2 / n, 0.0) / others
        k3_variance = np.maximum(sums["k3_squared"] - sums["k3"] ** 2 / n, 0.0) / others
        spread = sums["length_squared"] - length**2 / n
        slope = (sums["log_ratio_length"] - total * length / n) / np.where(spread > 0, spread, np.nan)
        predicted_variance = 2 * sums["k3"] / n  # 2 k T at the mean length: T n = tokens, k tokens = Σ k3
        ess = np.exp(2 * log_weights - log_squared_weights)
        return {
            "sequences": n,
            "mean_length": length / n,
            "kl_sequence": -total / n,
            "sigma": np.sqrt(variance),
            "sigma_predicted": np.sqrt(predicted_variance),
            "sigma_tokens": np.sqrt(sums["squares"] / n),
            "sigma_slack": np.sqrt(k3_variance),
            "slope_per_1k": 1000 * slope,
            "ess": ess,
            "ess_share": ess / n,
            "ess_share_predicted": np.exp(-predicted_variance),
            "perplexity_ratio": sums["perplexity_ratio"] / n,
        }


def log_sum(logs: FloatArray, counts: FloatArray | None = None) -> FloatArray:
    """log Σ counts · exp(logs) over the last axis, without overflow; −∞ where nothing is counted."""
    if logs.shape[-1] == 0:
        return np.full(logs.shape[:-1], -np.inf)
    if counts is None:
        counts = np.ones_like(logs)
    logs = np.where(counts > 0, logs, -np.inf)
    top = logs.max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log((counts * np.exp(logs - top)).sum(axis=-1)) + top[..., 0]


def log_sums(logs: FloatArray, counts: FloatArray) -> FloatArray:
    """`log_sum` of every column of logs [P, C] with every row of counts [R, P]: [R, C], by one matrix product."""
    top = logs.max(axis=0)
    scale = np.where(np.isfinite(top), top, 0.0)
    totals = counts @ np.exp(logs - scale)
    with np.errstate(divide="ignore"):
        sums = np.log(totals) + scale
    # Too far below the largest of their column to have all digits: they are summed on a scale of their own.
    lost = (totals < _SMALLEST_TOTAL) & (top > -np.inf)
    for column in np.flatnonzero(lost.any(axis=0)):
        rows = lost[:, column]
        sums[rows, column] = log_sum(logs[:, column], counts[rows])
    return sums


def extremes(values: FloatArray) -> tuple[float, float]:
    """Largest and smallest; NaN where there are none."""
    return (float(values.max()), float(values.min())) if values.size else (np.nan, np.nan)


def gradient_fidelity(
    gradients: Sequence[Any], reference: Sequence[Any], *, confidence: float = 0.95
) -> dict[str, Any]:
    """How much of the reference gradient another one has: cosine and ratio of norms, each with value, low and high.

    gradients, reference: one vector [parameters] a block of problems; what is compared are the sums over blocks. The
    intervals are the jackknife's over blocks, of artanh(cosine) and log(ratio), so that they end inside [−1, 1] and
    above 0. Where a gradient is zero the cosine is NaN.
    """
    total, truth = (sum(map(_float64, vectors), start=np.zeros(1)) for vectors in (gradients, reference))

    def compare(gradient: FloatArray, truth: FloatArray) -> FloatArray:  # artanh(cosine), log(ratio)
        norm, true_norm = np.linalg.norm(gradient), np.linalg.norm(truth)
        with np.errstate(divide="ignore", invalid="ignore"):
            cosine = np.clip(gradient @ truth / (norm * true_norm), -_LARGEST_COSINE, _LARGEST_COSINE)
            return np.array([np.arctanh(cosine), np.log(norm / true_norm)])

    value = compare(total, truth)
    left_out = [
        compare(total - _float64(one), truth - _float64(other)) for one, other in zip(gradients, reference, strict=True)
    ]
    estimates = []
    for column, inverse in enumerate((np.tanh, np.exp)):
        low, high = jackknife_interval(value[column], [one[column] for one in left_out], confidence)
        estimates.append({"value": inverse(value[column]), "low": inverse(low), "high": inverse(high)})
    cosine, norm_ratio = ({name: float(number) for name, number in one.items()} for one in estimates)
    return {"blocks": len(gradients), "cosine": cosine, "norm_ratio": norm_ratio}


def _float64(values: Any) -> FloatArray:
    """A tensor, on whatever device, or an array as a float64 array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
