"""Advantages: of responses, from the rewards of several to one problem; of tokens, from a value model."""

from __future__ import annotations

import torch
from torch import Tensor

from halfmatch.rl.parts import Baseline, StdOver

# Added to a group's standard deviation, as verl does; the paper's own scripts add 1e-8. With rewards of 0 and 1 the
# difference is below 3e-6 of the advantage.
STD_EPSILON = 1e-6


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    baseline: Baseline = "group-mean",
    scale_by_std: bool = False,
    std_over: StdOver = "group",
) -> Tensor:
    """Reward minus the baseline of its group: [B] → [B] float32.

    Each `group_size` rewards in a row belong to one problem. The baseline is the mean of all rewards of the group, or
    of the others alone (RLOO, arXiv 2402.14740), which is n/(n−1) times the difference and independent of the response.

    `scale_by_std` divides by a standard deviation (unbiased, over n−1, plus 1e-6): of the group's rewards, as GRPO
    (arXiv 2402.03300) and the paper's GSPO do, or of the whole batch's advantages, each response counted once, as
    REINFORCE++ with baseline does (arXiv 2501.03262). Dr. GRPO (arXiv 2503.20783) does not, because the division by a
    group's gives easy and hard problems more weight. Where all rewards of a group are equal its advantages are 0.
    """
    if group_size < 2:
        raise ValueError(f"group_size {group_size}: a mean needs at least two responses to be a baseline")
    if rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards of shape {list(rewards.shape)} do not divide into groups of {group_size}")
    groups = rewards.double().view(-1, group_size)  # so that equal rewards differ from their mean by nothing that shows
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if baseline == "leave-one-out":
        advantages = advantages * (group_size / (group_size - 1))
    if scale_by_std:
        std = groups.std(dim=1, keepdim=True) if std_over == "group" else advantages.std()
        advantages = advantages / (std + STD_EPSILON)
    return advantages.flatten().to(torch.float32)


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438): of every token A, and the return A + V that V is to learn.

    rewards: of each token; values: V of the state that each token was sampled in; both [B, R], as what is returned,
    float32. mask [B, R] bool: response tokens, without a gap. With temporal differences δ_t = r_t + γ V_{t+1} − V_t,

        A_t = δ_t + γ λ A_{t+1}

    where V and A after the last token are 0, whether a stop token or the longest length allowed has ended the response.
    """
    rewards, values = (given.double().masked_fill(~mask, 0.0) for given in (rewards, values))
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    advantages = rewards + discount * following - values  # δ, which the sum from the back turns into A
    for step in range(mask.shape[1] - 2, -1, -1):
        advantages[:, step] += discount * gae_lambda * advantages[:, step + 1]
    return advantages.float(), (advantages + values).float()


def standardized(advantages: Tensor, mask: Tensor) -> Tensor:
    """Minus the mean, over the standard deviation (unbiased, plus 1e-6) of all response tokens: [B, R], 0 elsewhere."""
    of_tokens = advantages[mask].double()
    if len(of_tokens) < 2:
        return torch.zeros_like(advantages)
    scaled = (advantages.double() - of_tokens.mean()) / (of_tokens.std() + STD_EPSILON)
    return scaled.masked_fill(~mask, 0.0).to(advantages.dtype)
