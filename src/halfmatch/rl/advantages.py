"""Advantages from the rewards of several responses to one problem."""

from __future__ import annotations

import torch
from torch import Tensor

# Added to a group's standard deviation, as verl does; the paper's own scripts add 1e-8. With rewards of 0 and 1 the
# difference is below 3e-6 of the advantage.
STD_EPSILON = 1e-6


def group_advantages(rewards: Tensor, group_size: int, *, scale_by_std: bool = False) -> Tensor:
    """Reward minus the mean of its group: [B] → [B] float32.

    Each `group_size` rewards in a row belong to one problem. `scale_by_std` divides by the group's standard deviation
    (unbiased, over n−1, plus 1e-6), as GRPO (arXiv 2402.03300) and the paper's GSPO do. Dr. GRPO (arXiv 2503.20783),
    and so every other row of the table of objectives, does not, because the division gives easy and hard problems more
    weight. Where all rewards of a group are equal its advantages are 0.
    """
    if group_size < 2:
        raise ValueError(f"group_size {group_size}: a mean needs at least two responses to be a baseline")
    if rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards of shape {list(rewards.shape)} do not divide into groups of {group_size}")
    groups = rewards.double().view(-1, group_size)  # so that equal rewards differ from their mean by nothing that shows
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if scale_by_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + STD_EPSILON)
    return advantages.flatten().to(torch.float32)
