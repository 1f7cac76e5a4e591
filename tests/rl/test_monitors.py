import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.errors import UserError
from halfmatch.rl import monitors
from halfmatch.rl.monitors import Limits, check

LIMITS = Limits(max_skip_share=0.5, stop_at_collapse=False, min_scale=None)


def row(step=0, **changes):
    return {
        "iteration": step,
        "step": step,
        "reward": 0.5,
        "k3": 1e-4,
        "max_prob_diff": 0.05,
        "min_prob_diff": -0.04,
        "ess_share": 0.95,
        "entropy": 1.0,
        "kept_share": 1.0,
        "loss": 0.1,
        "gradient_norm": 1.0,
        "learning_rate": 1e-3,
        "loss_scale": None,
        "step_skipped": False,
        "weight_change": 0.01,
        "first_non_finite": None,
        "event": None,
        **changes,
    }


def skipped(step, **changes):
    return row(
        step, step_skipped=True, gradient_norm=math.nan, first_non_finite="gradient of lm_head.weight", **changes
    )


def replay(rows, limits=LIMITS):
    """Events of a whole log, each row judged when it is the newest."""
    log = []
    for newest in rows:
        log.append(newest)
        event = check(log, limits)
        if event:
            newest["event"] = event.message
        yield event


def test_a_healthy_run_has_no_events():
    assert set(replay([row(step) for step in range(120)])) == {None}


@given(st.lists(st.booleans(), min_size=1, max_size=120))
def test_a_run_stops_when_more_than_the_share_of_a_window_is_skipped(skips):
    scaled = Limits(max_skip_share=0.5, stop_at_collapse=False, min_scale=1.0)
    rows = [skipped(step, loss_scale=64.0) if skip else row(step, loss_scale=64.0) for step, skip in enumerate(skips)]
    for step, event in enumerate(replay(rows, scaled)):
        expected = step >= 49 and sum(skips[step - 49 : step + 1]) > 25
        assert (event is not None) == expected
        if event:
            assert event.stop
            assert event.message.startswith("stopped: ")
            assert "gradient of lm_head.weight" in event.message


def test_weights_that_did_not_change_are_an_error_that_says_why():
    rows = [skipped(step, weight_change=0.0) for step in range(15)]
    rows += [row(step, weight_change=0.0, gradient_norm=0.0) for step in range(15, 20)]
    with pytest.raises(UserError, match=r"step 19: .*15 of 20 steps.*first at step 0: gradient of lm_head.*5 had a gr"):
        list(replay(rows))


@pytest.mark.parametrize("changes", [{"learning_rate": 0.0}, {"weight_change": 1e-9}])
def test_weights_need_not_change_at_rate_zero_and_may_change_little(changes):
    assert set(replay([row(step, **{"weight_change": 0.0, **changes}) for step in range(25)])) == {None}


@pytest.mark.parametrize("stop", [False, True])
def test_a_loss_that_is_not_finite_is_reported_once(stop):
    rows = [row(0), row(1, loss=math.inf), row(2, loss=math.nan)]
    first, second, third = replay(rows, Limits(0.5, stop_at_collapse=stop, min_scale=None))
    assert first is third is None
    assert second.message == "collapse of the loss: it is inf"
    assert second.stop == stop


@pytest.mark.parametrize(
    ("scale", "floor", "reported"), [(None, None, True), (1.0, 1.0, True), (2.0, 1.0, False), (65536.0, 1.0, False)]
)
def test_an_overflow_is_a_collapse_only_where_no_loss_scale_can_help(scale, floor, reported):
    rows = [row(0, loss_scale=scale), skipped(1, loss_scale=scale)]
    _, event = replay(rows, Limits(0.5, stop_at_collapse=False, min_scale=floor))
    assert (event is not None) == reported
    if event:
        assert event.message.startswith("collapse of the gradient: it is not finite")
        assert "gradient of lm_head.weight" in event.message


def test_a_reward_that_halves_is_a_collapse():
    rewards = [0.8] * 12 + [0.1] * 12
    events = list(replay([row(step, reward=reward) for step, reward in enumerate(rewards)]))
    (at,) = [step for step, event in enumerate(events) if event]
    assert at == 17  # 4 rewards of 0.8 and 6 of 0.1 in the window: 0.38, the first mean below 0.4
    assert events[at].message == "collapse of the reward: it fell to 0.380 from 0.800 (means of 10 iterations)"


def test_a_reward_counts_once_an_iteration_and_not_where_there_is_none():
    rewards = [0.8] * 10 + [math.nan] * 10
    rows = [row(4 * i + k, iteration=i, reward=reward) for i, reward in enumerate(rewards) for k in range(4)]
    assert set(replay(rows)) == {None}
    assert monitors.skip_share([row(0), skipped(1), row(2), row(3)]) == 0.25


def test_a_mismatch_that_grows_twentyfold_is_reported():
    k3 = [1e-4, None, 2e-4, 3e-4, 3.9e-3, 1e-4, 4.1e-3, 9e-3]
    events = list(replay([row(step, k3=value) for step, value in enumerate(k3)]))
    (at,) = [step for step, event in enumerate(events) if event]
    assert at == 6  # the median of what was before is 2e-4
    assert events[at].message.startswith(
        "collapse of the match with the engine: k3 is 0.0041 nats a token where it was"
    )


def test_a_tiny_mismatch_may_grow():
    assert set(replay([row(step, k3=value) for step, value in enumerate([1e-10, 1e-10, 9e-4])])) == {None}


# ------------------------------------------------------------------------------------------------ the value model
def test_a_critic_whose_steps_are_skipped_ends_the_run_as_a_policy_does():
    scaled = Limits(max_skip_share=0.5, stop_at_collapse=False, min_scale=1.0)
    lost = {"critic_step_skipped": True, "critic_loss_scale": 8.0, "critic_first_non_finite": "gradient of value_head"}
    events = list(replay([row(step, **lost) for step in range(50)], scaled))
    assert events[:49] == [None] * 49
    assert events[49].stop
    assert events[49].message == (
        "stopped: 100% of the last 50 critic's steps were skipped (first at step 0: gradient of value_head)"
    )


def test_a_value_loss_and_a_critics_gradient_that_are_not_finite_are_collapses_of_their_own():
    lowest = Limits(max_skip_share=0.5, stop_at_collapse=True, min_scale=1.0)
    fine = {"value_loss": 0.1, "critic_step_skipped": False, "critic_loss_scale": 1.0}
    lost = {"critic_step_skipped": True, "critic_first_non_finite": "output of value_head"}
    rows = [row(0, **fine), row(1, **{**fine, "value_loss": math.inf, **lost}), row(2, **{**fine, **lost})]
    first, second, third = replay(rows, lowest)
    assert first is None
    assert second.message == "collapse of the value loss: it is inf (first at step 1: output of value_head)"
    assert third.message == (
        "collapse of the critic's gradient: it is not finite at the lowest loss scale, 1 (first at step 2: output of "
        "value_head)"
    )
    assert second.stop
    assert third.stop
