"""Intervals and paired tests: the one home of every confidence statement that the package makes.

Samples of one problem depend on each other, so whatever is averaged over samples gets its interval by resampling
problems. Runs of a matrix differ by seed: few, independent, compared in pairs that share a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

FloatArray = NDArray[np.float64]

# Resamples are drawn and evaluated in blocks of at most this many (resample, problem) pairs: 32 MiB of counts.
_PAIRS_A_BLOCK = 2**22


class Estimate(NamedTuple):
    """A number with its confidence interval; low and high are NaN where there is too little data for one."""

    value: float
    low: float
    high: float


def wilson_interval(successes: int, tries: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, (low, high) within [0, 1]; (0, 1) where nothing was tried.

    Unlike the normal approximation it stays inside [0, 1] and has a width at 0 and at `tries` successes (Wilson 1927).
    """
    if not 0 <= successes <= tries:
        raise ValueError(f"{successes} successes in {tries} tries")
    if tries == 0:
        return 0.0, 1.0
    z = stats.norm.ppf((1 + confidence) / 2)
    rate = successes / tries
    centre = rate + z**2 / (2 * tries)
    half_width = z * math.sqrt(rate * (1 - rate) / tries + z**2 / (4 * tries**2))
    scale = 1 + z**2 / tries
    low = 0.0 if successes == 0 else (centre - half_width) / scale
    high = 1.0 if successes == tries else (centre + half_width) / scale
    return float(low), float(high)


def t_interval(values: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """Student's interval of the mean of independent values, such as one a seed; NaN for fewer than two."""
    values = np.asarray(values, dtype=np.float64)
    if values.size < 2:
        return math.nan, math.nan
    half_width = stats.t.ppf((1 + confidence) / 2, values.size - 1) * values.std(ddof=1) / math.sqrt(values.size)
    return float(values.mean() - half_width), float(values.mean() + half_width)


@dataclass(frozen=True)
class PairedTest:
    """The mean of `a - b` over pairs, its interval, and the two-sided p-values that the mean is zero."""

    pairs: int
    difference: Estimate
    p_t: float  # Student's paired t
    p_sign_flip: float  # exact permutation of signs; never below 2 ** (1 - pairs)


def paired_test(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> PairedTest:
    """Compare two conditions measured on the same seeds, pair by pair.

    With a few pairs no permutation can be convincing (3 pairs: p ≥ 0.25), which the exact test shows and the t test,
    leaning on normality, does not: a verdict that wants to be safe asks both.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values against {len(b)}: they do not pair up")
    differences = np.subtract(a, b, dtype=np.float64)
    pairs = len(differences)
    if pairs == 0:
        return PairedTest(0, Estimate(math.nan, math.nan, math.nan), math.nan, math.nan)
    mean = float(differences.mean())
    difference = Estimate(mean, *t_interval(differences, confidence))
    if pairs == 1:
        return PairedTest(1, difference, math.nan, 1.0)
    error = differences.std(ddof=1) / math.sqrt(pairs)
    t = np.divide(abs(mean), error, out=np.array(math.inf if mean else 0.0), where=error > 0)
    p_t = 2 * float(stats.t.sf(t, pairs - 1))
    return PairedTest(pairs, difference, p_t, sign_flip_p(differences))


def sign_flip_p(differences: ArrayLike) -> float:
    """Two-sided p-value that independent differences are symmetric about 0, by flipping their signs (Fisher 1935).

    Of all flips for up to 13 differences that are not 0, of 10,000 random ones beyond, always the same.
    """
    differences = np.asarray(differences, dtype=np.float64)
    moved = differences[differences != 0]
    if moved.size < 2:  # one has two flips, each as far from 0
        return 1.0
    flips = stats.permutation_test(
        (moved,), np.mean, permutation_type="samples", n_resamples=10_000, vectorized=True, axis=-1, rng=0
    )
    return float(flips.pvalue)


def bootstrap(
    statistics: Callable[[FloatArray], Mapping[str, FloatArray]],
    problems: int,
    *,
    samples: int,
    seed: int,
    confidence: float = 0.95,
) -> dict[str, tuple[FloatArray, FloatArray, FloatArray]]:
    """Value, low and high of every statistic, by resampling problems with replacement (percentile intervals).

    `statistics` maps counts [resamples, problems] (how often each resample drew each problem) to arrays
    [resamples, ...]; all of a problem's samples come and go together. The value is the statistic of the data
    themselves. A resample in which a statistic is undefined (NaN) does not count for its interval; with fewer than two
    problems there is no interval.
    """
    values = {name: array[0] for name, array in statistics(np.ones((1, problems))).items()}
    undefined = {name: np.full_like(value, np.nan) for name, value in values.items()}
    if problems < 2:
        return {name: (value, undefined[name], undefined[name]) for name, value in values.items()}
    rng = np.random.default_rng(seed)
    block = max(1, _PAIRS_A_BLOCK // problems)
    draws: dict[str, list[FloatArray]] = {name: [] for name in values}
    for start in range(0, samples, block):
        size = min(block, samples - start)
        counts = rng.multinomial(problems, np.full(problems, 1 / problems), size=size).astype(np.float64)
        for name, array in statistics(counts).items():
            draws[name].append(array)
    tail = (1 - confidence) / 2
    return {name: (value, *_quantiles(np.concatenate(draws[name]), (tail, 1 - tail))) for name, value in values.items()}


def _quantiles(draws: FloatArray, levels: tuple[float, float]) -> tuple[FloatArray, FloatArray]:
    """Quantiles over the first axis without the NaNs; NaN where nothing else is there."""
    defined = ~np.isnan(draws).all(axis=0)
    with np.errstate(invalid="ignore"):  # between two infinities the quantile is NaN
        low, high = np.nanquantile(np.where(defined, draws, 0.0), levels, axis=0)
    return np.where(defined, low, np.nan), np.where(defined, high, np.nan)


def bootstrap_over_problems(
    statistic: Callable[[FloatArray], FloatArray],
    problems: int,
    *,
    samples: int,
    seed: int,
    confidence: float = 0.95,
) -> Estimate:
    """`bootstrap` for one number: `statistic` maps counts [resamples, problems] to [resamples]."""
    (value, low, high) = bootstrap(
        lambda counts: {"": statistic(counts)}, problems, samples=samples, seed=seed, confidence=confidence
    )[""]
    return Estimate(float(value), float(low), float(high))


def jackknife_interval(value: float, left_out: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a smooth statistic from its values with each of n blocks left out (Tukey); NaN for n < 2."""
    blocks = len(left_out)
    if blocks < 2:
        return math.nan, math.nan
    with np.errstate(invalid="ignore"):  # of infinite values the error is NaN
        error = math.sqrt((blocks - 1) * float(np.var(np.asarray(left_out, dtype=np.float64))))
    half_width = float(stats.t.ppf((1 + confidence) / 2, blocks - 1)) * error
    return value - half_width, value + half_width


def difference(a: Estimate, b: Estimate) -> Estimate:
    """a − b of two estimates, with an interval recovered from theirs (MOVER: Zou & Donner 2008, Newcombe 1998).

    Exact enough for skewed intervals too, such as those of shares. For independent estimates; where a and b go up and
    down together, as measurements on the same problems do, it is wider than need be.
    """
    value = a.value - b.value
    return Estimate(
        value,
        value - math.hypot(a.value - a.low, b.high - b.value),
        value + math.hypot(a.high - a.value, b.value - b.low),
    )


def ratio(a: Estimate, b: Estimate) -> Estimate:
    """a / b of two positive estimates: `difference` of their logarithms; NaN where a bound is not positive."""
    if not all(bound > 0 for bound in (*a, *b)):
        return Estimate(a.value / b.value if b.value else math.nan, math.nan, math.nan)
    logs = (Estimate(*(math.log(bound) for bound in estimate)) for estimate in (a, b))
    return Estimate(*(math.exp(bound) for bound in difference(*logs)))
