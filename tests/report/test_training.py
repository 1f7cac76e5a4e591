"""Logs as the report reads them: a value an iteration, running means, bands."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from halfmatch.paths import Paths, Run
from halfmatch.report import training
from halfmatch.report.training import TrainingRun, band, running_mean


def run_of(rewards, events=()):
    return TrainingRun(
        Run("bf16", "grpo", 0), len(rewards), len(rewards), {"reward": np.array(rewards, float)}, list(events)
    )


@given(
    arrays.arrays(np.float64, st.integers(1, 40), elements=st.one_of(st.floats(-5, 5), st.just(np.nan))),
    st.integers(1, 12),
)
def test_running_mean_is_the_mean_of_what_is_there(values, window):
    means = running_mean(values, window)
    for place in range(len(values)):
        part = values[max(0, place + 1 - window) : place + 1]
        part = part[~np.isnan(part)]
        if len(part):
            assert means[place] == pytest.approx(part.mean(), abs=1e-9)
        else:
            assert np.isnan(means[place])


def test_a_few_seeds_have_their_extremes_and_many_an_interval():
    few = band([np.array([1.0, 2.0, 9.0]), np.array([3.0, 2.0])], 0.95)
    assert not few.is_interval
    assert few.mean.tolist() == [2, 2]  # as far as the shorter one goes
    assert (few.low.tolist(), few.high.tolist()) == ([1, 2], [3, 2])
    many = band([np.array([float(value)]) for value in range(5)], 0.95)
    assert many.is_interval
    assert many.high[0] - many.mean[0] == pytest.approx(2.776445 * np.sqrt(2.5) / np.sqrt(5), rel=1e-5)


def test_rewards_of_a_run():
    run = run_of([0.0] * 10 + [1.0] * 10 + [0.5] * 10)
    assert run.final_reward == 0.5
    assert run.best_reward == 1.0
    assert run.mean_reward == pytest.approx(0.5)


def test_the_final_reward_has_an_interval_over_the_iterations_of_its_window():
    final = run_of([9.0] * 20 + [0.2, 0.6] * 4 + [np.nan, 0.4]).final_estimate(0.95)
    # nine values, eight at 0.2 from the mean: t of 8 degrees of freedom · √(8 · 0.2² / 8) / √9
    assert final == pytest.approx((0.4, 0.4 - 2.306004 * 0.2 / 3, 0.4 + 2.306004 * 0.2 / 3))
    assert np.isnan(run_of([1.0]).final_estimate(0.95).low)


def test_the_best_reward_is_of_whole_windows():
    assert run_of([1.0] + [0.0] * 19).best_reward == pytest.approx(0.1)
    assert run_of([1.0, 0.0]).best_reward == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("event", "collapsed"),
    [
        ("collapse of the reward: it fell to 0.1 from 0.9", True),
        ("stopped: 60 % of the last 50 steps were skipped", True),
        ("the engine could not sample", False),
    ],
)
def test_a_run_collapses_where_a_monitor_says_so(event, collapsed):
    assert run_of([1.0], [(3, event)]).collapsed is collapsed
    assert not run_of([1.0]).collapsed


def test_reading_takes_one_value_an_iteration(tmp_path, synthetic):
    config, name = synthetic.config(tmp_path), Run("fp16", "grpo", 0)
    synthetic.training(config, name, iterations=12)
    run = training.read(Paths(tmp_path).of("training_log", run=name.name), name, planned=60)
    assert (run.iterations, run.planned) == (12, 60)
    assert {len(series) for series in run.series.values()} == {12}
    assert not np.isnan(run.series["k3"]).any()  # stands in the first row of an iteration alone
    assert run.series["loss_scale"][0] == 65536 / 8  # after the last step of the iteration
    assert run.series["skip_share"][:2] == pytest.approx([3 / 4, 3 / 8])
    assert run.series["largest_prob_diff"][0] == 0.05
    assert run.events == []


def test_reading_keeps_what_the_monitors_said(tmp_path, synthetic):
    config, name = synthetic.config(tmp_path), Run("bf16", "grpo", 0)
    synthetic.training(config, name, iterations=12, collapse=5)
    run = training.read(Paths(tmp_path).of("training_log", run=name.name), name, planned=60)
    assert [step for step, _ in run.events] == [20]
    assert run.collapsed
