"""avg@k, pass@k and maj@k by hand and by enumeration of all subsets."""

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.evaluation import Tally, avg_at_k, majority_at_k, pass_at_k, scores, tally

SETTINGS = {"bootstrap_samples": 300, "seed": 0, "confidence": 0.95}


def counts(correct, wrong=0, truncated=0, timeout=0, unparseable=0, votes=None):
    return Tally(
        samples=correct + wrong + truncated + timeout + unparseable,
        correct=correct,
        wrong=wrong,
        truncated=truncated,
        timeout=timeout,
        unparseable=unparseable,
        wrong_votes=tuple(votes if votes is not None else [wrong] * bool(wrong)),
    )


# ------------------------------------------------------------------------------------------------------------ pass@k
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_exact_binomial_ratio(n_c_k):
    n, c, k = n_c_k
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-12, abs=1e-15)


def test_pass_at_k_by_enumeration():
    solved = [True, True, False, False, False]
    subsets = list(itertools.combinations(solved, 3))
    assert pass_at_k(5, 2, 3) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_for_many_samples():
    # one correct in a million: exactly k / n; binomials of this size are beyond any float
    assert pass_at_k(10**6, 1, 1000) == pytest.approx(1e-3, rel=1e-12)
    assert pass_at_k(10**6, 1000, 1) == pytest.approx(1e-3, rel=1e-12)
    assert pass_at_k(10**9, 1, 1) == pytest.approx(1e-9, rel=1e-9)
    assert pass_at_k(10**5, 50_000, 50_000) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


# ------------------------------------------------------------------------------------------------------------- avg@k
def test_avg_at_k_is_a_mean_over_problems_and_not_over_samples():
    assert avg_at_k([4, 40], [4, 0]) == 0.5
    assert avg_at_k([3], [1]) == pytest.approx(1 / 3)
    assert math.isnan(avg_at_k([], []))


# ------------------------------------------------------------------------------------------------------------- maj@k
def majority_by_enumeration(n, c, wrong_votes, k):
    answers = ["right"] * c + [f"wrong {index}" for index, votes in enumerate(wrong_votes) for _ in range(votes)]
    answers += [None] * (n - len(answers))
    subsets = list(itertools.combinations(answers, k))
    won = Fraction(0)
    for subset in subsets:
        votes = {answer: subset.count(answer) for answer in subset if answer is not None}
        best = [answer for answer, count in votes.items() if count == max(votes.values())]
        won += Fraction("right" in best, max(len(best), 1))
    return float(won / len(subsets))


@given(st.data())
def test_majority_is_the_one_of_all_subsets(data):
    c = data.draw(st.integers(0, 4))
    wrong_votes = data.draw(st.lists(st.integers(1, 3), max_size=3))
    n = c + sum(wrong_votes) + data.draw(st.integers(0, 2))
    if n == 0:
        return
    k = data.draw(st.integers(1, min(n, 6)))
    assert majority_at_k(n, c, wrong_votes, k) == pytest.approx(
        majority_by_enumeration(n, c, wrong_votes, k), rel=1e-12
    )


def test_majority_by_hand():
    assert majority_at_k(5, 3, [2], 5) == 1
    assert majority_at_k(5, 2, [3], 5) == 0
    assert majority_at_k(4, 2, [2], 4) == 0.5  # a tie
    assert majority_at_k(6, 2, [2, 2], 6) == pytest.approx(1 / 3)
    assert majority_at_k(10, 3, [1] * 7, 10) == 1  # three of ten suffice where no wrong answer comes twice
    assert majority_at_k(10, 1, [], 10) == 1  # the others have no vote
    assert majority_at_k(10, 0, [], 10) == 0


def test_majority_of_one_is_the_average():
    assert majority_at_k(32, 12, [9, 5, 5], 1) == pytest.approx(12 / 32)


def test_majority_of_many_samples_is_exact():
    """Beyond float64's binomials: one of two answers with 3 and 6 of 10 votes wins, or they tie."""
    assert math.comb(10_000, 150) > 1.79e308
    behind, ahead = majority_at_k(10_000, 3000, [6000], 150), majority_at_k(10_000, 6000, [3000], 150)
    assert 0 < behind < 1e-4
    assert behind + ahead == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "wrong", "k"), [(4, 3, [2], 2), (4, 5, [], 1), (4, 1, [1], 5), (4, 1, [1], 0)])
def test_majority_refuses_what_cannot_be(n, c, wrong, k):
    with pytest.raises(ValueError, match="maj@"):
        majority_at_k(n, c, wrong, k)


# ------------------------------------------------------------------------------------------------ tallies, benchmarks
def test_tally_counts_verdicts_and_tells_wrong_answers_apart():
    def verdict(label, answer=None):
        return SimpleNamespace(label=label, answer=answer)

    verdicts = [
        verdict("correct", "1/2"),
        verdict("correct", "0.5"),
        verdict("wrong", "2"),
        verdict("wrong", "3"),
        verdict("wrong", "2"),
        verdict("truncated"),
        verdict("timeout"),
        verdict("unparseable"),
    ]
    result = tally(verdicts)
    assert result == counts(correct=2, wrong=3, truncated=1, timeout=1, unparseable=1, votes=[2, 1])
    assert (result.samples, result.tries) == (8, 7)


def test_scores_by_hand():
    tallies = [counts(correct=1, wrong=3), counts(correct=3, wrong=1), counts(correct=0, wrong=2, truncated=2)]
    result = scores(tallies, (1, 2, 4), **SETTINGS)
    values = {name: estimate["value"] for name, estimate in result["metrics"].items()}
    assert values == pytest.approx(
        {
            "avg": (1 / 4 + 3 / 4 + 0) / 3,
            "pass@1": (1 / 4 + 3 / 4) / 3,
            "pass@2": (1 / 2 + 1) / 3,  # 1 − C(3, 2) / C(4, 2)
            "pass@4": 2 / 3,
            "maj@1": (1 / 4 + 3 / 4) / 3,
            # of two: one right and one wrong is a tie. 1 of 4: P = 1/2 · 1/2; 3 of 4: 1/2 + 1/2 · 1/2
            "maj@2": (1 / 4 + 3 / 4) / 3,
            "maj@4": 1 / 3,
        }
    )
    assert result["verdicts"] == {"correct": 4, "wrong": 6, "truncated": 2, "timeout": 0, "unparseable": 0}
    assert (result["problems"], result["samples"]) == (3, 12)
    assert not any(result["left_out"].values())
    for estimate in result["metrics"].values():
        assert 0 <= estimate["low"] <= estimate["value"] <= estimate["high"] <= 1


def test_a_time_out_is_no_wrong_answer():
    tallies = [counts(correct=2, wrong=1, timeout=1), counts(correct=0, timeout=4)]
    result = scores(tallies, (1, 4), **SETTINGS)
    assert result["metrics"]["avg"]["value"] == pytest.approx(2 / 3)
    assert result["metrics"]["pass@1"]["value"] == pytest.approx(2 / 3)
    assert math.isnan(result["metrics"]["pass@4"]["value"])
    assert result["left_out"] == {"avg": 1, "pass@1": 1, "pass@4": 2, "maj@1": 1, "maj@4": 2}


def test_intervals_are_over_problems():
    """More samples of the same problems do not narrow the interval of a mean over problems that differ."""
    rng = np.random.default_rng(0)
    solved = rng.integers(0, 2, 40)
    widths = []
    for samples in (2, 50):
        tallies = [counts(correct=int(samples * one), wrong=int(samples * (1 - one))) for one in solved]
        average = scores(tallies, (1,), **{**SETTINGS, "bootstrap_samples": 3000})["metrics"]["avg"]
        widths.append(average["high"] - average["low"])
    assert widths[0] == pytest.approx(widths[1])
    assert widths[0] == pytest.approx(2 * 1.96 * solved.std() / math.sqrt(40), rel=0.15)


def test_a_benchmark_without_problems_has_no_scores():
    result = scores([], (1,), **SETTINGS)
    assert all(math.isnan(estimate["value"]) for estimate in result["metrics"].values())
