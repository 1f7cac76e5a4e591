"""Advantages by hand, by an independent formula, and by their invariants."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.rl.advantages import generalized_advantages, group_advantages, standardized

groups_of_rewards = st.integers(2, 9).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(st.lists(st.floats(-5, 5, width=32), min_size=size, max_size=size), min_size=1, max_size=4),
    )
)


def test_mean_of_the_group_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75])
    assert torch.equal(group_advantages(rewards, 4), expected)


def test_scaled_by_the_unbiased_standard_deviation_by_hand():
    # group 1, 0, 0, 0: mean 1/4, squares 9/16 + 3/16 = 3/4, over n−1 = 3: std 1/2
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4, scale_by_std=True)
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=3e-6)


def test_leave_one_out_compares_with_the_mean_of_the_others_by_hand():
    # 1 against (0 + 0 + 0)/3, and each 0 against (1 + 0 + 0)/3
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4, baseline="leave-one-out")
    assert advantages.tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_scaled_by_the_standard_deviation_of_the_batch_by_hand():
    # advantages 3/4, −1/4, −1/4, −1/4 and 0 four times: squares 3/4 over n−1 = 7
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    advantages = group_advantages(rewards, 4, scale_by_std=True, std_over="batch")
    std = (0.75 / 7) ** 0.5
    assert advantages.tolist() == pytest.approx([0.75 / std, *[-0.25 / std] * 3, 0, 0, 0, 0], rel=1e-5)


@given(groups_of_rewards)
def test_leave_one_out_against_plain_loops(size_and_groups):
    size, groups = size_and_groups
    expected = [group[i] - statistics.fmean(group[:i] + group[i + 1 :]) for group in groups for i in range(len(group))]
    advantages = group_advantages(torch.tensor(groups).flatten(), size, baseline="leave-one-out")
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@given(groups_of_rewards)
def test_against_the_standard_library(size_and_groups):
    size, groups = size_and_groups
    rewards = torch.tensor(groups).flatten()
    plain = [reward - statistics.fmean(group) for group in groups for reward in group]
    scaled = [
        (reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6) for group in groups for reward in group
    ]
    assert group_advantages(rewards, size).tolist() == pytest.approx(plain, rel=1e-6, abs=1e-12)
    assert group_advantages(rewards, size, scale_by_std=True).tolist() == pytest.approx(scaled, rel=1e-5, abs=1e-8)


@given(groups_of_rewards, st.floats(-3, 3, width=32))
def test_a_reward_that_all_get_changes_nothing(size_and_groups, bonus):
    size, groups = size_and_groups
    rewards = torch.tensor(groups, dtype=torch.float64).flatten()
    shifted = group_advantages(rewards + bonus, size)
    torch.testing.assert_close(shifted, group_advantages(rewards, size), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e6 / 3])
@pytest.mark.parametrize(
    "settings", [{}, {"scale_by_std": True}, {"baseline": "leave-one-out"}, {"scale_by_std": True, "std_over": "batch"}]
)
def test_equal_rewards_give_no_advantage(reward, settings):
    advantages = group_advantages(torch.full((7,), reward), 7, **settings)
    assert advantages.abs().max() < 1e-8 * max(1.0, abs(reward))


def test_integer_rewards_and_their_float32_result():
    advantages = group_advantages(torch.tensor([1, 0]), 2)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("rewards", "group_size", "message"),
    [(torch.ones(5), 2, "do not divide"), (torch.ones(2, 2), 2, "do not divide"), (torch.ones(4), 1, "at least two")],
)
def test_what_is_no_grouping_is_refused(rewards, group_size, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, group_size)


# ------------------------------------------------------------------------------------------------------ of tokens
def responses(lengths, width):
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def test_generalized_advantages_by_hand():
    # V 1, 2, 4; the last token is rewarded with 8; γ = ½, λ = ½. δ: 0 + 1 − 1 = 0; 0 + 2 − 2 = 0; 8 − 4 = 4.
    rewards, values = torch.tensor([[0.0, 0.0, 8.0, 9.0]]), torch.tensor([[1.0, 2.0, 4.0, 9.0]])
    advantages, returns = generalized_advantages(rewards, values, responses([3], 4), discount=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [[0.25, 1.0, 4.0, 0.0]]
    assert returns.tolist() == [[1.25, 3.0, 8.0, 0.0]]


@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
def test_generalized_advantages_are_the_discounted_sum_of_temporal_differences(seed, discount, gae_lambda):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (4,), generator=generator).tolist()
    rewards, values = torch.randn(2, 4, 6, generator=generator)
    mask = responses(lengths, 6)
    behind = torch.full_like(rewards, torch.nan)
    advantages, returns = generalized_advantages(
        torch.where(mask, rewards, behind), torch.where(mask, values, behind), mask,
        discount=discount, gae_lambda=gae_lambda,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        reward, value = rewards[row].tolist(), [*values[row, :length].tolist(), 0.0]
        deltas = [reward[t] + discount * value[t + 1] - value[t] for t in range(length)]
        for t in range(6):
            expected = sum((discount * gae_lambda) ** (k - t) * deltas[k] for k in range(t, length))
            assert advantages[row, t].item() == pytest.approx(expected, abs=1e-5)
            assert returns[row, t].item() == pytest.approx(expected + value[t] if t < length else 0.0, abs=1e-5)


def test_with_lambda_one_the_return_is_the_reward_to_come_and_knows_no_value():
    rewards = torch.tensor([[0.0, 0.5, 1.0]])
    for values in (torch.zeros(1, 3), torch.tensor([[3.0, -1.0, 2.0]])):
        _, returns = generalized_advantages(rewards, values, responses([3], 3), discount=1.0, gae_lambda=1.0)
        assert returns.tolist() == [[1.5, 1.5, 1.0]]


def test_standardized_over_the_tokens_of_all_responses_by_hand():
    # 1, 3, 5 (the 100 is padding): mean 3, unbiased standard deviation 2
    scaled = standardized(torch.tensor([[1.0, 3.0], [5.0, 100.0]]), responses([2, 1], 2))
    assert scaled.flatten().tolist() == pytest.approx([-1, 0, 1, 0], rel=1e-6)
    assert standardized(torch.tensor([[7.0, 7.0]]), responses([2], 2)).tolist() == [[0.0, 0.0]]
    assert standardized(torch.tensor([[7.0, 7.0]]), responses([1], 2)).tolist() == [[0.0, 0.0]]
