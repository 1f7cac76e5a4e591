"""What a response or a token is rewarded with beside the verdict on the answer."""

from __future__ import annotations

import torch
from torch import Tensor

from halfmatch.rl.parts import OverlongPenalty


def overlong_penalties(lengths: Tensor, max_length: int, share: float) -> Tensor:
    """The soft penalty on long responses of DAPO (arXiv 2503.14476, equation 13): [B] tokens → [B] float32 in [0, 1].

    0 up to (1 − share) · max_length tokens, from there linear, 1 at max_length, which is where a response is cut.
    """
    buffer = share * max_length
    return ((lengths.float() - (max_length - buffer)) / buffer).clamp(0.0, 1.0)


def shaped_rewards(rewards: Tensor, lengths: Tensor, overlong: OverlongPenalty, max_length: int) -> Tensor:
    """Rewards less the penalty on long responses: [B] and [B] tokens → [B]."""
    if overlong.overlong_penalty == 0:
        return rewards
    return rewards - overlong.overlong_penalty * overlong_penalties(lengths, max_length, overlong.overlong_share)


def token_rewards(rewards: Tensor, penalties: Tensor | None, mask: Tensor) -> Tensor:
    """A response's reward at its last token, less the penalty of each token: [B] and [B, R] → [B, R] float32.

    mask [B, R] bool: response tokens, without a gap. A response without a token has no reward.
    """
    spread = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    if penalties is not None:
        spread -= penalties.masked_fill(~mask, 0.0)
    counts = mask.sum(dim=1)
    rows = counts.nonzero().squeeze(1)
    spread[rows, counts[rows] - 1] += rewards[rows].to(spread.dtype)
    return spread
