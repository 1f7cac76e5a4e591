"""What the mismatch panels show of a table of scores, gathered in memory that grows with sequences alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from halfmatch import artifacts

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

PROBABILITY_BINS = np.linspace(0.0, 1.0, 101)
# |d| in nats, five bins a decade. What lies beyond the ends is counted in the first or last bin, exact zeros apart.
DIFFERENCE_BINS = np.logspace(-9, 2, 56)


@dataclass(frozen=True)
class Panels:
    """Histograms over all response tokens, and one point a sequence."""

    probabilities: Counts  # [100, 100]: tokens by μ (first axis) and π
    differences: Counts  # [55]: tokens by |d|, d = log π − log μ
    zeros: int  # tokens with d exactly 0
    lengths: Counts  # [sequences], in tokens
    log_ratios: Floats  # [sequences]: Σd, in nats

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def gather(path: Path) -> Panels:
    """Read a scores table once."""
    probabilities = np.zeros((len(PROBABILITY_BINS) - 1,) * 2, dtype=np.int64)
    differences = np.zeros(len(DIFFERENCE_BINS) - 1, dtype=np.int64)
    zeros = 0
    lengths, sums = [], []
    for group in artifacts.row_groups(path, "scores", ["logp_rollout", "logp_train"]):
        rollout_lists, train_lists = (group[name].combine_chunks() for name in ("logp_rollout", "logp_train"))
        rollout = rollout_lists.flatten().to_numpy().astype(np.float64)
        train = train_lists.flatten().to_numpy().astype(np.float64)
        length = rollout_lists.value_lengths().to_numpy()
        difference = train - rollout
        lengths.append(length.astype(np.int64))
        sums.append(np.bincount(np.repeat(np.arange(len(length)), length), weights=difference, minlength=len(length)))
        probabilities += _probability_counts(rollout, train)
        size = np.abs(difference[difference != 0])
        zeros += len(difference) - len(size)
        differences += np.histogram(np.clip(size, DIFFERENCE_BINS[0], DIFFERENCE_BINS[-1]), DIFFERENCE_BINS)[0]
    return Panels(
        probabilities,
        differences,
        zeros,
        np.concatenate(lengths) if lengths else np.zeros(0, np.int64),
        np.concatenate(sums) if sums else np.zeros(0),
    )


def _probability_counts(rollout: Floats, train: Floats) -> Counts:
    """Tokens by (μ, π); the clip is for log-probs that rounding left a hair above 0."""
    mu, pi = (np.clip(np.exp(logp), 0.0, 1.0) for logp in (rollout, train))
    return np.histogram2d(mu, pi, bins=(PROBABILITY_BINS, PROBABILITY_BINS))[0].astype(np.int64)
