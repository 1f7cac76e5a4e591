"""The sums that all offline mismatch numbers are made of, for one problem, from pieces of a stream of responses.

They take the same memory however many responses a problem has. Over problems they add with any weights, so a bootstrap
resample is a matrix product and reads no response again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfmatch.mismatch.metrics import FloatArray, extremes, log_sum, sequence_terms, token_terms

# Buckets of positions in a response: [0, 16), [16, 32), [32, 64), … tokens; the last one is open.
EDGES = np.array([0, *(16 * 2**power for power in range(17))])
BUCKETS = len(EDGES)
# Lengths that responses are cut to, for what depends on length; column BUCKETS − 1 is of whole responses.
CUTS = EDGES[1:]
LAGS = (1, 2, 4, 8, 16)
BATCHES = (1, 4, 16, 64)


@dataclass(frozen=True)
class Sums:
    """What a set of responses of one problem adds up to. Names in `additive`, with their columns:

    position.X         X of `token_terms`, by bucket [BUCKETS]
    sequence.X         X of `sequence_terms`, of the responses that reach each of CUTS, cut there, and of all, whole
                       [BUCKETS]
    lag.X              n, x, y, xx, yy, xy of the pairs x = d_t, y = d_{t+lag} inside a response [LAGS]
    batch.X            n, sum, squares of Σd over consecutive full batches of tokens of a response [BATCHES]
    non_finite_sequences [1]: responses that hold a non-finite d; they count in `position` alone
    """

    additive: dict[str, FloatArray]
    log_weights: FloatArray  # [2, BUCKETS]: log Σw and log Σw² of the responses in `sequence`
    largest: float  # π − μ
    smallest: float

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            {name: value + other.additive[name] for name, value in self.additive.items()},
            np.logaddexp(self.log_weights, other.log_weights),
            float(np.fmax(self.largest, other.largest)),
            float(np.fmin(self.smallest, other.smallest)),
        )


def sums_of(lengths: NDArray[np.int64], logp_train: FloatArray, logp_rollout: FloatArray) -> Sums:
    """Sums of responses laid end to end: their lengths [n], and log π and log μ of their tokens [Σ lengths]."""
    response = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(response)) - (np.cumsum(lengths) - lengths)[response]
    bucket = np.searchsorted(EDGES, position, side="right") - 1
    terms = token_terms(logp_train, logp_rollout)
    additive = {f"position.{name}": _totals(bucket, term, BUCKETS) for name, term in terms.items()}

    bad = _totals(response, terms["non_finite_tokens"], len(lengths)) > 0
    additive["non_finite_sequences"] = np.array([bad.sum()], dtype=np.float64)
    lengths = np.where(bad, 0, lengths)  # from here on a response without tokens is no response

    def up_to_cut(term: FloatArray) -> FloatArray:  # [n, BUCKETS]
        by_bucket = _totals(response * BUCKETS + bucket, term, len(lengths) * BUCKETS)
        return by_bucket.reshape(-1, BUCKETS).cumsum(axis=1)

    cut = np.column_stack([np.broadcast_to(CUTS, (len(lengths), len(CUTS))), np.maximum(lengths, 1)])
    reached = lengths[:, None] >= cut
    log_ratios = up_to_cut(terms["d"])
    for name, term in sequence_terms(log_ratios, cut, up_to_cut(terms["k3"])).items():
        additive[f"sequence.{name}"] = np.where(reached, term, 0.0).sum(axis=0)
    log_weights = np.stack([log_sum(power * log_ratios.T, reached.T.astype(np.float64)) for power in (1, 2)])

    counted = position < lengths[response]
    additive |= {f"lag.{name}": value for name, value in _lag_sums(terms["d"], position, counted).items()}
    additive |= {f"batch.{name}": value for name, value in _batch_sums(terms["d"], position, response, lengths).items()}
    return Sums(additive, log_weights, *extremes(terms["prob_diff"][terms["tokens"] > 0]))


def _totals(group: NDArray[np.int64], values: FloatArray, groups: int) -> FloatArray:
    """The sum of the values of each group, [groups]."""
    return np.bincount(group, values, groups).astype(np.float64, copy=False)


def _lag_sums(d: FloatArray, position: NDArray[np.int64], counted: NDArray[np.bool_]) -> dict[str, FloatArray]:
    columns = []
    for lag in LAGS:
        later = np.flatnonzero(counted & (position >= lag))
        x, y = d[later - lag], d[later]
        columns.append((len(x), x.sum(), y.sum(), x @ x, y @ y, x @ y))
    return dict(zip(("n", "x", "y", "xx", "yy", "xy"), np.array(columns, dtype=np.float64).T, strict=True))


def _batch_sums(
    d: FloatArray, position: NDArray[np.int64], response: NDArray[np.int64], lengths: NDArray[np.int64]
) -> dict[str, FloatArray]:
    columns = []
    for size in BATCHES:
        batches = lengths // size  # of each response
        full = position < (batches * size)[response]
        first = (np.cumsum(batches) - batches)[response]
        totals = _totals((first + position // size)[full], d[full], batches.sum())
        columns.append((len(totals), totals.sum(), totals @ totals))
    return dict(zip(("n", "sum", "squares"), np.array(columns, dtype=np.float64).T, strict=True))
