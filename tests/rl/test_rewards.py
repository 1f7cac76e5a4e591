"""Penalties and rewards of tokens, by hand."""

import pytest
import torch

from halfmatch.rl.parts import OverlongPenalty
from halfmatch.rl.rewards import overlong_penalties, shaped_rewards, token_rewards


def test_the_penalty_of_dapo_by_hand():
    # Its own numbers: 16,384 expected tokens and a buffer of 4,096 make 20,480.
    lengths = torch.tensor([1, 16_384, 17_408, 18_432, 20_480])
    assert overlong_penalties(lengths, 20_480, 0.2).tolist() == pytest.approx([0, 0, 0.25, 0.5, 1], abs=1e-6)


def test_over_the_whole_length_every_token_costs_the_same():
    assert overlong_penalties(torch.tensor([2, 4, 8]), 8, 1.0).tolist() == [0.25, 0.5, 1.0]


def test_the_penalty_is_taken_off_and_none_leaves_the_rewards_alone():
    rewards, lengths = torch.tensor([1.0, 0.0]), torch.tensor([9, 10])
    shaped = shaped_rewards(rewards, lengths, OverlongPenalty(0.5, 0.2), 10)
    assert shaped.tolist() == pytest.approx([0.75, -0.5])
    assert shaped_rewards(rewards, lengths, OverlongPenalty(), 10) is rewards


def test_the_reward_is_the_last_tokens_and_penalties_are_each_tokens_own():
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    rewards = torch.tensor([1.0, 2.0, 5.0])
    assert token_rewards(rewards, None, mask).tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0]]
    penalties = torch.tensor([[0.5, 0.25, torch.nan], [0.0, 0.5, 1.0], [3.0, 3.0, 3.0]])
    assert token_rewards(rewards, penalties, mask).tolist() == [[-0.5, 0.75, 0], [0, -0.5, 1], [0, 0, 0]]
