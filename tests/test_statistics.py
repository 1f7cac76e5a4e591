"""Intervals against published numbers, closed forms and coverage by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from halfmatch.statistics import (
    Estimate,
    bootstrap,
    bootstrap_over_problems,
    difference,
    jackknife_interval,
    paired_test,
    ratio,
    t_interval,
    wilson_interval,
)


# Newcombe (1998), Statistics in Medicine 17, table I, method 3: the score interval without continuity correction.
@pytest.mark.parametrize(
    ("successes", "tries", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_is_the_published_score_interval(successes, tries, low, high):
    assert wilson_interval(successes, tries) == pytest.approx((low, high), abs=5e-5)


def test_wilson_of_nothing_is_the_whole_range():
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_wilson_contains_the_rate_and_mirrors(successes_tries, confidence):
    successes, tries = successes_tries
    low, high = wilson_interval(successes, tries, confidence)
    assert 0 <= low <= successes / tries <= high <= 1
    mirrored = wilson_interval(tries - successes, tries, confidence)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_wilson_refuses_more_successes_than_tries():
    with pytest.raises(ValueError, match="3 successes in 2 tries"):
        wilson_interval(3, 2)


def test_t_interval_by_hand():
    # mean 2, s 1, n 3; t(0.975, 2) = 4.302653: half width 4.302653 / sqrt(3) = 2.484138
    assert t_interval([1, 2, 3]) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-6)


def test_t_interval_of_one_value_is_undefined():
    assert all(math.isnan(bound) for bound in t_interval([3.0]))


def test_paired_test_by_hand():
    # differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.464102, p = 0.0741799 with 2 degrees of freedom; of the 8 sign
    # patterns only all plus and all minus reach |mean| = 2
    result = paired_test([2, 4, 6], [1, 2, 3])
    assert result.pairs == 3
    assert result.difference == pytest.approx((2, 2 - 2.484138, 2 + 2.484138), abs=1e-6)
    assert result.p_t == pytest.approx(0.0741799, abs=1e-6)
    assert result.p_sign_flip == pytest.approx(0.25)


def test_paired_test_agrees_with_scipy():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.3, 1, 9), rng.normal(0, 1, 9)
    assert paired_test(a, b).p_t == pytest.approx(stats.ttest_rel(a, b).pvalue)


def test_paired_test_of_equal_values_finds_nothing():
    result = paired_test([1.0, 1.0], [1.0, 1.0])
    assert (result.p_t, result.p_sign_flip) == (1.0, 1.0)


@pytest.mark.parametrize("pairs", [0, 1])
def test_paired_test_with_too_few_pairs_has_no_interval(pairs):
    result = paired_test([1.0] * pairs, [0.5] * pairs)
    assert result.pairs == pairs
    assert math.isnan(result.difference.low)
    assert math.isnan(result.p_t)


def test_paired_test_refuses_unequal_numbers():
    with pytest.raises(ValueError, match="do not pair up"):
        paired_test([1.0], [1.0, 2.0])


def test_bootstrap_interval_of_a_mean_is_the_normal_one_for_many_problems():
    values = np.random.default_rng(0).normal(5, 2, 400)
    estimate = bootstrap_over_problems(
        lambda counts: counts @ values / counts.sum(1), 400, samples=4000, seed=1, confidence=0.9
    )
    half_width = 1.644854 * values.std() / math.sqrt(400)
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.low == pytest.approx(values.mean() - half_width, abs=0.1 * half_width)
    assert estimate.high == pytest.approx(values.mean() + half_width, abs=0.1 * half_width)


def test_bootstrap_resamples_problems_and_not_samples():
    """Ten copies of every sample carry no information: the interval must not get narrower."""
    solved, tries = np.array([0, 3, 8, 5, 2, 9.0]), np.full(6, 10.0)

    def interval(copies):
        rate = lambda counts: (counts @ (copies * solved)) / (counts @ (copies * tries))  # noqa: E731
        return bootstrap_over_problems(rate, 6, samples=500, seed=0)

    assert interval(1) == pytest.approx(interval(10))


def test_bootstrap_repeats_for_a_seed_and_not_for_another():
    values = np.arange(20.0)
    runs = [bootstrap_over_problems(lambda counts: counts @ values, 20, samples=200, seed=seed) for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


def test_bootstrap_does_not_depend_on_how_resamples_are_blocked(monkeypatch):
    values = np.arange(10.0)
    statistic = lambda counts: {"sum": counts @ values}  # noqa: E731
    whole = bootstrap(statistic, 10, samples=101, seed=0)
    monkeypatch.setattr("halfmatch.statistics._PAIRS_A_BLOCK", 70)
    assert bootstrap(statistic, 10, samples=101, seed=0) == whole


def test_bootstrap_of_one_problem_has_a_value_and_no_interval():
    estimate = bootstrap_over_problems(lambda counts: counts[:, 0] * 3, 1, samples=100, seed=0)
    assert estimate.value == 3
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


def test_bootstrap_leaves_undefined_resamples_out():
    values = np.array([1.0, np.nan, 2.0])

    def mean_where_problem_1_is_absent(counts):
        with np.errstate(invalid="ignore"):
            present = np.where(counts > 0, values, 0.0)
            return (counts * present).sum(1) / counts.sum(1)

    estimate = bootstrap_over_problems(mean_where_problem_1_is_absent, 3, samples=300, seed=0)
    assert math.isnan(estimate.value)
    assert 1 <= estimate.low < estimate.high <= 2
    nothing = bootstrap_over_problems(lambda counts: np.full(len(counts), np.nan), 3, samples=100, seed=0)
    assert math.isnan(nothing.low)


def test_jackknife_of_a_mean_is_students_interval():
    values = np.array([1.0, 4.0, 2.0, 8.0])
    left_out = [np.delete(values, i).mean() for i in range(4)]
    assert jackknife_interval(values.mean(), left_out) == pytest.approx(t_interval(values))


def test_jackknife_of_one_block_is_undefined():
    assert all(math.isnan(bound) for bound in jackknife_interval(1.0, [1.0]))


# Newcombe (1998), Statistics in Medicine 17, 873-890, table II, method 10: the hybrid score interval of a difference.
@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [((56, 70), (48, 80), 0.0524, 0.3339), ((9, 10), (3, 10), 0.1705, 0.8090), ((10, 10), (0, 10), 0.6075, 1.0)],
)
def test_difference_of_wilson_intervals_is_newcombes(first, second, low, high):
    a, b = (Estimate(k / n, *wilson_interval(k, n)) for k, n in (first, second))
    assert difference(a, b)[1:] == pytest.approx((low, high), abs=5e-5)


def test_difference_of_symmetric_intervals_adds_variances():
    assert difference(Estimate(5.0, 2.0, 8.0), Estimate(1.0, -3.0, 5.0)) == pytest.approx((4.0, -1.0, 9.0))


def test_ratio_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    z = stats.norm.ppf(0.975)

    def estimate(truth, spread):
        log = np.log(truth) + spread * rng.normal()
        return Estimate(*(math.exp(log + shift * spread) for shift in (0, -z, z)))

    found = [ratio(estimate(40.0, 0.3), estimate(2.0, 0.1)) for _ in range(2000)]
    covered = np.mean([one.low <= 20 <= one.high for one in found])
    assert covered == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 2000))


def test_ratio_of_what_may_be_zero_has_no_interval():
    value, low, high = ratio(Estimate(2.0, 0.0, 3.0), Estimate(4.0, 3.0, 5.0))
    assert value == 0.5
    assert math.isnan(low)
    assert math.isnan(high)
    assert math.isnan(ratio(Estimate(2.0, 1.0, 3.0), Estimate(0.0, 0.0, 0.0)).value)


def test_without_intervals_there_is_none_of_the_difference():
    assert math.isnan(difference(Estimate(1.0, math.nan, math.nan), Estimate(2.0, 1.0, 3.0)).low)
