"""Advantages from the rewards of several responses to one problem."""

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
