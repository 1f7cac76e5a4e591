"""The deployment gap on pairs made by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch import artifacts
from halfmatch.deployment import Pairs, gap, pair, together
from halfmatch.statistics import sign_flip_p


def write(path: Path, verdicts: dict[tuple[str, int], tuple[str, list[int]]]) -> Path:
    rows = [
        {
            "problem_id": problem,
            "sample": sample,
            "prompt_ids": [2],
            "token_ids": tokens,
            "logprobs": [-0.1] * len(tokens),
            "finish_reason": "stop",
            "verdict": verdict,
        }
        for (problem, sample), (verdict, tokens) in verdicts.items()
    ]
    artifacts.write(path, "completions", rows, {})
    return path


def pairs_of(**problems: list[tuple[int, int]]) -> Pairs:
    """For each problem, (deployed, trained) of its samples; the same tokens where the two agree."""
    flat = [(name, *one) for name, some in problems.items() for one in some]
    names, deployed, trained = zip(*flat, strict=True)
    deployed, trained = np.array(deployed, dtype=bool), np.array(trained, dtype=bool)
    return Pairs(np.array(names), deployed, trained, deployed == trained)


def gap_of(pairs: Pairs, **changes):
    return gap(pairs, **{"bootstrap_samples": 500, "seed": 0, "confidence": 0.95, **changes})


def test_responses_pair_up_by_problem_and_sample(tmp_path):
    deployed = write(
        tmp_path / "a.parquet",
        {
            ("p", 0): ("correct", [1, 2]),
            ("p", 1): ("wrong", [1, 2, 3]),
            ("q", 0): ("timeout", [4]),
            ("q", 1): ("truncated", []),
            ("r", 0): ("correct", [5]),
        },
    )
    trained = write(
        tmp_path / "b.parquet",
        {
            ("p", 0): ("correct", [1, 2]),
            ("p", 1): ("correct", [1, 2, 4]),
            ("q", 0): ("correct", [4]),  # the grader timed out on the other one
            ("q", 1): ("wrong", [1]),
            ("s", 0): ("correct", [5]),  # the other one was not sampled
        },
    )
    pairs = pair(deployed, trained)
    assert pairs.problems.tolist() == ["p", "p", "q"]
    assert pairs.deployed.tolist() == [True, False, False]
    assert pairs.trained.tolist() == [True, True, False]
    assert pairs.same.tolist() == [True, False, False]


def test_the_gap_is_a_mean_over_problems():
    """Problem a: 1/4 deployed, 3/4 in the trainer; problem b: 1/2 and 0."""
    found = gap_of(pairs_of(a=[(1, 1), (0, 1), (0, 1), (0, 0)], b=[(1, 0), (0, 0)]))
    assert (found.problems, found.pairs, found.gained, found.lost) == (2, 6, 1, 2)
    assert found.trained.value == pytest.approx(3 / 8)
    assert found.deployed.value == pytest.approx(3 / 8)
    assert found.difference.value == pytest.approx(0)
    assert (found.difference.low, found.difference.high) == pytest.approx((-0.5, 0.5))  # all a, all b
    assert found.same.value == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert found.p_sign_flip == 1.0


def test_a_loss_in_every_problem_is_told_from_chance_and_in_one_is_not():
    lost, level = [(0, 1), (1, 1), (0, 0), (1, 1)], [(1, 1), (1, 1), (0, 0), (1, 1)]
    everywhere = gap_of(pairs_of(**{f"p{number}": lost for number in range(8)}))
    assert everywhere.p_sign_flip == pytest.approx(2 / 2**8)
    assert everywhere.difference == pytest.approx((-0.25, -0.25, -0.25))
    once = gap_of(pairs_of(p0=lost, **{f"p{number}": level for number in range(1, 8)}))
    assert once.p_sign_flip == 1.0
    assert once.difference.value == pytest.approx(-0.25 / 8)
    assert once.difference.high == 0.0


def test_without_a_changed_verdict_the_interval_still_has_a_width():
    found = gap_of(pairs_of(**{f"p{number}": [(1, 1), (0, 0)] for number in range(10)}))
    z2 = 1.959963984540054**2
    assert found.difference == pytest.approx((0.0, -z2 / (20 + z2), z2 / (20 + z2)))  # Wilson's end for 0 of 20
    assert (found.gained, found.lost, found.p_sign_flip) == (0, 0, 1.0)
    assert found.same == pytest.approx((1.0, 20 / (20 + z2), 1.0))


def test_several_runs_keep_a_problem_together():
    """Were the two runs' pairs of a problem resampled apart, the interval would be narrower."""
    one = pairs_of(**{f"p{number}": [(number % 2, 1)] for number in range(10)})
    both = gap_of(together([one, one]))
    assert (both.problems, both.pairs) == (10, 20)
    assert both.difference == gap_of(one).difference


def test_nothing_to_pair_is_no_gap():
    nothing = np.array([], dtype=bool)
    assert gap_of(Pairs(np.array([], dtype=str), nothing, nothing, nothing)) is None


def test_one_problem_has_no_interval():
    found = gap_of(pairs_of(a=[(1, 0), (1, 1)]))
    assert found.difference.value == 0.5
    assert math.isnan(found.difference.low)


@given(st.lists(st.integers(-3, 3), max_size=8))
def test_the_sign_flip_test_counts_all_flips(differences):
    moved = [difference for difference in differences if difference]
    seen = abs(sum(moved))
    sums = [abs(sum(a * b for a, b in zip(moved, signs, strict=True))) for signs in product((1, -1), repeat=len(moved))]
    expected = Fraction(sum(one >= seen for one in sums), len(sums))
    assert sign_flip_p(differences) == pytest.approx(float(expected))
