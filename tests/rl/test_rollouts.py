import math
from dataclasses import dataclass

import pytest
import torch

from halfmatch.config import Sampling
from halfmatch.engines import Completion
from halfmatch.rl.rollouts import (
    Problem,
    ProblemSampler,
    collect,
    fill_ungraded,
    grade,
    lay_out,
    mixed_problems,
    sample_mixed,
)

EOS = 1
PROBLEMS = [Problem(f"p{index}", str(index), (2, 3 + index)) for index in range(5)]


@dataclass
class Verdict:
    label: str


class ScriptedGrader:
    """Gives the labels it was told to, and remembers what it was shown."""

    def __init__(self, *labels):
        self.labels, self.shown = labels, None

    def grade_many(self, items):
        self.shown = list(items)
        return [Verdict(label) for label in self.labels]


def graded(completions, *labels, problems=None):
    grader = ScriptedGrader(*labels)
    problems = problems or [PROBLEMS[0]] * len(completions)
    verdicts = grade(problems, completions, grader=grader, decode=lambda ids: " ".join(map(str, ids)))
    return lay_out(problems, completions, verdicts, len(completions), stop_token_ids={EOS}), grader


def test_every_problem_comes_once_an_epoch_in_orders_of_their_own():
    sampler = ProblemSampler(PROBLEMS, seed=3)
    drawn = [sampler.draw(3) for _ in range(10)]
    flat = [pair for draw in drawn for pair in draw]
    assert [position for position, _ in flat] == list(range(30))
    epochs = [[problem.problem_id for _, problem in flat[start : start + 5]] for start in range(0, 30, 5)]
    assert all(sorted(epoch) == ["p0", "p1", "p2", "p3", "p4"] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1


def test_the_position_is_all_of_the_samplers_state():
    first = ProblemSampler(PROBLEMS, seed=3)
    first.draw(7)
    second = ProblemSampler(list(reversed(PROBLEMS)), seed=3)
    second.position = first.position
    assert first.draw(9) == second.draw(9)
    assert ProblemSampler(PROBLEMS, seed=4).draw(5) != ProblemSampler(PROBLEMS, seed=3).draw(5)


def test_nothing_to_draw_from():
    with pytest.raises(ValueError, match="no problems"):
        ProblemSampler([], seed=0)


def test_no_two_requests_of_a_run_share_a_seed():
    class Recorder:
        def generate(self, requests, sampling, *, stop_token_ids, progress=None):
            seeds.extend(request.seed for request in requests)
            return []

    seeds: list[int] = []
    sampler = ProblemSampler(PROBLEMS, seed=0)
    for _ in range(4):
        problems, _ = collect(sampler.draw(8), 3, engine=Recorder(), sampling=Sampling(), stop_token_ids={EOS}, seed=0)
        assert [problem.problem_id for problem in problems[:3]] == [problems[0].problem_id] * 3
    assert len(set(seeds)) == len(seeds) == 4 * 8 * 3


def test_rollouts_hold_the_engines_tokens_and_logprobs():
    completions = [Completion([5, EOS], [-1.0, -2.0], "stop"), Completion([5, 6, 7], [-3.0, -4.0, -5.0], "length")]
    rollouts, grader = graded(completions, "correct", "truncated")
    assert grader.shown == [("5 1", "0", False), ("5 6 7", "0", True)]
    assert rollouts.logp_rollout.tolist() == [[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]]
    assert rollouts.rewards.tolist() == [1.0, 0.0]
    assert rollouts.mean_reward == 0.5
    assert rollouts.share("truncated") == 0.5


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (Completion([5, EOS], [-1.0], "stop"), "2 tokens with 1 log-probs"),
        (Completion([5, EOS, 6], [-1.0] * 3, "stop"), "ends after 2"),
        (Completion([5, EOS], [-1.0] * 2, "length"), "'length' of a response that ends with a stop token"),
        (Completion([5, 6], [-1.0] * 2, "stop"), "'stop' of a response that has no stop token"),
    ],
)
def test_an_engine_that_disagrees_with_the_mask_is_refused(completion, message):
    with pytest.raises(RuntimeError, match=message):
        graded([completion], "wrong")


def test_a_time_out_is_no_evidence():
    completions = [Completion([EOS], [-1.0], "stop")] * 4
    rollouts, _ = graded(completions, "correct", "timeout", "wrong", "correct")
    assert rollouts.rewards.tolist() == pytest.approx([1.0, 2 / 3, 0.0, 1.0])
    assert rollouts.mean_reward == pytest.approx(2 / 3)
    assert rollouts.share("timeout") == 0.25
    lost, _ = graded(completions, *["timeout"] * 4)
    assert lost.rewards.tolist() == [0.0] * 4
    assert math.isnan(lost.mean_reward)


def test_ungraded_responses_take_the_mean_of_their_own_group():
    rewards = torch.tensor([1.0, math.nan, 0.0, math.nan])
    assert fill_ungraded(rewards, 2).tolist() == [1.0, 1.0, 0.0, 0.0]


# ------------------------------------------------------------------------------------------------ dynamic sampling
class Source:
    """Two responses a problem, of lengths that grow, with verdicts as told; remembers what it was asked for."""

    def __init__(self, *verdicts):
        self.verdicts, self.asked = list(verdicts), []

    def __call__(self, count):
        drawn = sum(self.asked)
        self.asked.append(count)
        labels = [label for pair in self.verdicts[drawn : drawn + count] for label in pair]
        completions = [Completion([5] * (drawn + 1) + [EOS], [-float(drawn + 1)] * (drawn + 2), "stop") for _ in labels]
        problems = [PROBLEMS[(drawn + row // 2) % 5] for row in range(len(labels))]
        return graded(completions, *labels, problems=problems)[0]


RIGHT, WRONG, MIXED = ("correct", "correct"), ("wrong", "truncated"), ("wrong", "correct")


def test_problems_are_drawn_until_enough_are_mixed():
    source = Source(RIGHT, MIXED, WRONG, MIXED, RIGHT, ("correct", "timeout"), MIXED)
    rollouts = sample_mixed(source, wanted=3, samples=2, rounds=9)
    assert source.asked == [3, 2, 1, 1]
    assert rollouts.verdicts == [*MIXED, *MIXED, *MIXED]
    assert rollouts.rewards.tolist() == [0, 1, 0, 1, 0, 1]
    assert rollouts.left_out == [*RIGHT, *WRONG, *RIGHT, "correct", "timeout"]
    # of all that was sampled, so that the reward stays that of the policy: 3 + 2 + 2 + 1 of 13 that were graded
    assert rollouts.mean_reward == pytest.approx(8 / 13)
    assert rollouts.share("timeout") == 1 / 14


def test_rounds_of_different_lengths_are_one_batch():
    source = Source(RIGHT, MIXED, MIXED)  # the first two of 2 tokens, the third of 4
    rollouts = sample_mixed(source, wanted=2, samples=2, rounds=9)
    assert source.asked == [2, 1]
    assert rollouts.batch.response_mask.sum(1).tolist() == [2, 2, 4, 4]
    assert rollouts.batch.input_ids[:, :2].tolist() == [[2, 4], [2, 4], [2, 5], [2, 5]]
    assert rollouts.logp_rollout[[0, 2]].tolist() == [[-1.0, -1.0, 0.0, 0.0], [-3.0] * 4]


def test_after_the_last_round_other_problems_make_up_the_batch():
    source = Source(RIGHT, WRONG, RIGHT, MIXED, WRONG)
    rollouts = sample_mixed(source, wanted=2, samples=2, rounds=3)
    assert source.asked == [2, 2, 1]
    assert rollouts.verdicts == [*MIXED, *RIGHT]
    assert rollouts.left_out == [*WRONG, *RIGHT, *WRONG]


def test_a_batch_that_is_mixed_at_once_is_drawn_once_and_left_as_it_is():
    source = Source(MIXED, MIXED)
    rollouts = sample_mixed(source, wanted=2, samples=2, rounds=9)
    plain = Source(MIXED, MIXED)(2)
    assert source.asked == [2]
    assert rollouts.left_out == []
    for name in ("logp_rollout", "rewards"):
        assert torch.equal(getattr(rollouts, name), getattr(plain, name))
    for name in ("input_ids", "prompt_lengths", "response_mask", "truncated"):
        assert torch.equal(getattr(rollouts.batch, name), getattr(plain.batch, name))


def test_a_time_out_makes_no_problem_mixed():
    verdicts = ["correct", "timeout", "wrong", "timeout", "wrong", "correct", "truncated", "unparseable"]
    assert mixed_problems(verdicts, 2) == [False, False, True, False]
