"""The sums that all offline mismatch numbers are made of, from pieces of a stream of responses.

They are kept for each of a number of units (problems, or groups of them) and take the same memory however many
responses a unit has. Over units they add with any weights, so a bootstrap resample is a matrix product and reads no
response again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from halfmatch.mismatch.metrics import FloatArray, extremes, sequence_terms, token_terms

IntArray = NDArray[np.int64]

# Buckets of positions in a response: [0, 16), [16, 32), [32, 64), … tokens; the last one is open.
EDGES = np.array([0, *(16 * 2**power for power in range(17))])
BUCKETS = len(EDGES)
# Lengths that responses are cut to, for what depends on length; column BUCKETS − 1 is of whole responses.
CUTS = EDGES[1:]
LAGS = (1, 2, 4, 8, 16)
BATCHES = (1, 4, 16, 64)


class Sums:
    """What responses add up to, a row a unit. Names in `additive`, with their columns:

    position.X         X of `token_terms`, by bucket [BUCKETS]
    sequence.X         X of `sequence_terms`, of the responses that reach each of CUTS, cut there, and of all, whole
                       [BUCKETS]
    lag.X              n, x, y, xx, yy, xy of the pairs x = d_t, y = d_{t+lag} inside a response [LAGS]
    batch.X            n, sum, squares of Σd over consecutive full batches of tokens of a response [BATCHES]
    non_finite_sequences [1]: responses that hold a non-finite d; they count in `position` alone

    `log_weights` [units, 2, BUCKETS]: log Σw and log Σw² of the responses in `sequence`. `largest` and `smallest`: of
    π − μ over all tokens, NaN where there are none.
    """

    def __init__(self, units: int):
        self.units = units
        self.additive: dict[str, FloatArray] = {}
        self.log_weights = np.full((units, 2, BUCKETS), -np.inf)
        self.largest = self.smallest = np.nan

    def add(self, units: IntArray, lengths: IntArray, logp_train: FloatArray, logp_rollout: FloatArray) -> None:
        """Add responses laid end to end: unit and length of each [n], log π and log μ of their tokens [Σ lengths].

        Responses of one unit should follow each other: the work of adding grows with the number of changes.
        """
        terms = token_terms(logp_train, logp_rollout)
        by_bucket = _by_bucket(terms, lengths)
        self._add_all("position", units, by_bucket)
        largest, smallest = extremes(terms["prob_diff"][terms["tokens"] > 0])
        self.largest, self.smallest = np.fmax(self.largest, largest), np.fmin(self.smallest, smallest)

        bad = by_bucket["non_finite_tokens"].sum(axis=1) > 0
        self._add("non_finite_sequences", units, bad[:, None].astype(np.float64))
        d, counted = terms["d"], ~bad & (lengths > 0)
        if not counted.all():
            d = d[np.repeat(counted, lengths)]
            by_bucket = {name: by_bucket[name][counted] for name in ("d", "d_squared", "k3")}
            units, lengths = units[counted], lengths[counted]
        cut = np.column_stack([np.broadcast_to(CUTS, (len(lengths), len(CUTS))), lengths])
        reached = lengths[:, None] >= cut
        log_ratios, squares, k3 = (by_bucket[name].cumsum(axis=1) for name in ("d", "d_squared", "k3"))
        sequence = sequence_terms(log_ratios, cut, squares, k3)
        self._add_all("sequence", units, {name: np.where(reached, term, 0.0) for name, term in sequence.items()})
        logs = np.where(reached, log_ratios, -np.inf)
        _accumulate(np.logaddexp, self.log_weights, units, np.stack([logs, 2 * logs], axis=1))
        self._add_all("lag", units, _lag_sums(d, lengths))
        self._add_all("batch", units, _batch_sums(d, lengths))

    def _add_all(self, group: str, units: IntArray, values: Mapping[str, FloatArray]) -> None:
        for name, value in values.items():
            self._add(f"{group}.{name}", units, value)

    def _add(self, name: str, units: IntArray, values: FloatArray) -> None:
        """Add values [n, columns] to the units [n] that they are of."""
        total = self.additive.setdefault(name, np.zeros((self.units, values.shape[1])))
        _accumulate(np.add, total, units, values)


def _accumulate(add: np.ufunc, total: FloatArray, units: IntArray, values: FloatArray) -> None:
    """Add values [n, …] to the rows of `total` that `units` [n] name, those of one unit in a row first."""
    if len(units):
        changes = np.concatenate([[0], np.flatnonzero(units[1:] != units[:-1]) + 1])
        add.at(total, units[changes], add.reduceat(values, changes))


def _by_bucket(terms: Mapping[str, FloatArray], lengths: IntArray) -> dict[str, FloatArray]:
    """Sums of every term over the tokens of each response in each bucket of positions, [n, BUCKETS]."""
    counts = np.searchsorted(EDGES, lengths, side="left")  # buckets that a response reaches into
    rows, buckets = _enumerate(counts)
    starts = (np.cumsum(lengths) - lengths)[rows] + EDGES[buckets]
    sums = {}
    for name, term in terms.items():
        sums[name] = np.zeros((len(lengths), BUCKETS))
        if len(starts):
            sums[name][rows, buckets] = np.add.reduceat(term, starts)
    return sums


def _enumerate(counts: IntArray) -> tuple[IntArray, IntArray]:
    """For counts [n]: each row's number as often as it counts, and beside it 0, 1, 2, … up to that count."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]


def _window_sums(values: FloatArray, first: IntArray, last: IntArray) -> FloatArray:
    """values[first:last].sum() of each window; none is empty, each starts where or after the one before ends, and one
    value stands behind the last."""
    return np.add.reduceat(values, np.column_stack([first, last]).ravel())[::2] if len(first) else np.empty(0)


def _lag_sums(d: FloatArray, lengths: IntArray) -> dict[str, FloatArray]:
    """Each [n, LAGS]."""
    sums = {name: np.zeros((len(lengths), len(LAGS))) for name in ("n", "x", "y", "xx", "yy", "xy")}
    ends = np.cumsum(lengths)
    starts = ends - lengths
    d = np.append(d, 0.0)
    squares = d * d
    for column, lag in enumerate(LAGS):
        rows = np.flatnonzero(lengths > lag)
        first, last = starts[rows], ends[rows]
        sums["n"][rows, column] = lengths[rows] - lag
        for name, values in (("x", d), ("xx", squares), ("xy", d[:-lag] * d[lag:])):
            sums[name][rows, column] = _window_sums(values, first, last - lag)
        for name, values in (("y", d), ("yy", squares)):
            sums[name][rows, column] = _window_sums(values, first + lag, last)
    return sums


def _batch_sums(d: FloatArray, lengths: IntArray) -> dict[str, FloatArray]:
    """Each [n, BATCHES]."""
    sums = {name: np.zeros((len(lengths), len(BATCHES))) for name in ("n", "sum", "squares")}
    starts = np.cumsum(lengths) - lengths
    d = np.append(d, 0.0)
    for column, size in enumerate(BATCHES):
        sums["n"][:, column] = counts = lengths // size
        totals = d
        if size > 1:
            rows, number = _enumerate(counts)
            first = starts[rows] + number * size
            totals = np.append(_window_sums(d, first, first + size), 0.0)
        having = np.flatnonzero(counts)
        last = np.cumsum(counts)[having]
        for name, values in (("sum", totals), ("squares", totals * totals)):
            sums[name][having, column] = _window_sums(values, last - counts[having], last)
    return sums
