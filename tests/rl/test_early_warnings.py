"""Every early warning: what it takes, what it says, when, and what does not warn."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.rl.monitors import Limits, check
from halfmatch.rl.training_log import complete

WARN = Limits(max_skip_share=0.5, stop_at_collapse=False, min_scale=None)
STOP = Limits(max_skip_share=0.5, stop_at_collapse=True, min_scale=None)
HEALTHY = {
    "reward": 0.5,
    "k3": 1e-3,
    "max_prob_diff": 0.05,
    "min_prob_diff": -0.04,
    "ess_share": 0.9,
    "entropy": 1.0,
    "loss": 0.1,
    "gradient_norm": 1.0,
    "learning_rate": 1e-3,
    "step_skipped": False,
}


def events(iterations, steps=1, limits=WARN):
    """(iteration, message) of every event in a run whose iterations differ from a healthy one in some columns. As in a
    log, what compares π with μ stands in the first row of an iteration alone."""
    rows, found = [], []
    for iteration, changes in enumerate(iterations):
        for number in range(steps):
            row = complete({**HEALTHY, **changes, "iteration": iteration, "step": len(rows)})
            if number:
                row |= dict.fromkeys(("k3", "max_prob_diff", "min_prob_diff", "ess_share"))
            rows.append(row)
            if event := check(rows, limits):
                row["event"] = event.message
                found.append((iteration, event.message))
                assert not event.stop
    return found


def test_a_healthy_run_is_not_warned_of():
    assert events([{}] * 60, steps=4) == []


@given(st.lists(st.floats(0.7, 1.39), min_size=40, max_size=40))
def test_nor_is_one_whose_signals_vary_by_less_than_a_factor_of_two(factors):
    assert events([{"k3": 1e-2 * one, "entropy": one, "ess_share": 0.5 + 0.25 * one} for one in factors]) == []


def test_a_mismatch_of_five_times_its_start_warns_before_it_is_a_collapse():
    calm, risen = [{}] * 10, [{"k3": 5.2e-3}] * 5
    # the mean of iterations 10 to 14 is the first above 5 times the median of the first ten
    assert events(calm + risen) == [
        (
            14,
            "warning, mismatch: k3 is 0.0052 nats a token, 5.2 times its start's 0.001 (mean of 5 iterations up to 14)",
        )
    ]
    assert events(calm + [{"k3": 4.8e-3}] * 20) == []


def test_a_tiny_mismatch_may_grow():
    assert events([{"k3": 1e-6}] * 10 + [{"k3": 9e-4}] * 10) == []


def test_a_start_of_exactly_zero_has_no_multiples():
    """Policies that are certain of every token, and sides that agree on all bits."""
    assert events([{"entropy": 0.0}] * 10 + [{"entropy": 1.0}] * 10) == []
    _, found = events([{"k3": 0.0}] * 11 + [{"k3": 2e-3}] * 5)  # the first is the collapse
    assert found[1].startswith("warning, mismatch: k3 is 0.0012 nats a token, inf times its start's 0 (mean")


@pytest.mark.parametrize("column", ["max_prob_diff", "min_prob_diff"])
def test_sides_that_are_sure_of_different_tokens_warn(column):
    sign = 1 if column == "max_prob_diff" else -1
    (found,) = events([{}] * 4 + [{column: 0.95 * sign}] * 8)
    assert found == (8, "warning, largest |π − μ|: it is 0.95, above 0.9 (mean of 5 iterations up to 8)")
    assert events([{}] * 4 + [{column: 0.99 * sign}] * 4) == []  # four of five iterations


def test_responses_beyond_the_usable_length_warn():
    (found,) = events([{"ess_share": 0.3}] * 12, steps=4)
    assert found[0] == 4
    assert found[1].startswith("warning, effective sample size: it is 0.30 of the responses, below 0.5 (mean of 5 ")


def test_entropy_that_is_lost_warns_unless_the_problems_are_solved():
    falling = [{"entropy": 0.05}] * 8
    assert [at for at, message in events([{}] * 10 + falling) if message.startswith("warning, entropy: ")] == [14]
    assert events([{}] * 10 + [{"entropy": 0.05, "reward": 0.99}] * 8) == []


def test_entropy_that_doubles_warns_even_then():
    (found,) = events([{}] * 10 + [{"entropy": 2.5, "reward": 0.99}] * 8)
    assert found[1].startswith("warning, entropy: it is 2.2 nats a token, 2.2 times its start's 1")


def test_an_objective_that_leaves_most_out_warns():
    (found,) = events([{"kept_share": 0.4}] * 8)
    assert found == (4, "warning, kept share: the objective keeps 40%, less than 50% (mean of 5 iterations up to 4)")


def test_several_signals_of_one_row_are_told_one_after_the_other():
    found = events([{"ess_share": 0.1, "kept_share": 0.1}] * 6, steps=2)
    assert [message.partition(":")[0] for _, message in found] == [
        "warning, effective sample size",
        "warning, kept share",
    ]


def test_a_warning_never_ends_a_run():
    assert events([{"ess_share": 0.1}] * 8, limits=STOP)


def test_a_collapse_is_told_before_a_warning():
    found = events([{}] * 10 + [{"loss": math.inf, "ess_share": 0.0}] * 6)
    assert found[0][1].startswith("collapse of the loss")
    assert any(message.startswith("warning, effective sample size") for _, message in found)


def test_values_that_are_not_there_do_not_count():
    missing = dict.fromkeys(("k3", "max_prob_diff", "min_prob_diff", "ess_share", "kept_share", "entropy"))
    assert events([missing | {"reward": math.nan}] * 20) == []
