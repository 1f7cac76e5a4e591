"""What the gradient steps of one iteration work on, and how its rows are split into steps and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfmatch.mismatch.metrics import sequence_metrics, token_metrics
from halfmatch.rl.batching import Batch, rank_shares
from halfmatch.rl.ranks import Ranks
from halfmatch.rl.values import Targets


@dataclass(frozen=True)
class Experience:
    """B sequences, R tokens of the longest response."""

    batch: Batch
    advantages: torch.Tensor  # float32: [B], or of tokens [B, R]
    logp_rollout: torch.Tensor  # log μ, [B, R] float32
    # log π(θ'), [B, R] float32, where the objective needs it; of the first step's rows from that step on
    logp_old: torch.Tensor | None
    logp_reference: torch.Tensor | None = None  # of the initial policy, [B, R] float32, where the objective needs it
    targets: Targets | None = None  # of the value model, where there is one

    def part(self, rows: torch.Tensor, width: int, logp_old: torch.Tensor | None) -> dict[str, Any]:
        """What `policy_loss` is told of some rows, none of which has more than `width` response tokens.

        logp_old: log π(θ') of these rows at least, [B, R] float32.
        """

        def cut(values: torch.Tensor | None) -> torch.Tensor | None:
            return values if values is None else values[rows, :width]

        return {
            "logp_old": cut(logp_old),
            "logp_rollout": cut(self.logp_rollout),
            "logp_reference": cut(self.logp_reference),
            "advantages": self.advantages[rows] if self.advantages.dim() == 1 else cut(self.advantages),
            "mask": cut(self.batch.response_mask),
        }

    def complete(self, logp: torch.Tensor, plans: Sequence[Plan]) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in log π(θ') of the first step's rows, [B, R]; returns all that is known of it, and of which rows."""
        first = plans[0].rows
        if self.logp_old is None:
            return logp, first
        self.logp_old[first] = logp[first]
        return self.logp_old, torch.cat([plan.rows for plan in plans])


@dataclass(frozen=True)
class Plan:
    """One gradient step: its rows, and the micro-batches that this rank computes of them. Every rank has as many, empty
    ones among them where rows are few."""

    rows: torch.Tensor  # [rows] int64
    micro_batches: Sequence[torch.Tensor]  # of row indices, [rows of the micro-batch] int64


def plan_steps(units: torch.Tensor, lengths: torch.Tensor, *, steps: int, budget: int, ranks: Ranks) -> list[Plan]:
    """Deal units out to gradient steps, and split each step's over ranks and into micro-batches of `budget` tokens.

    units: rows that stay together, [U, rows of one] int64: single responses, or pairs. lengths: tokens of every row.
    Neighbours go to different steps: a problem's samples, so that every step sees as many problems as it can. A step
    without a unit is left out, but for the first.
    """
    hands = [units[step::steps] for step in range(steps)]
    plans = []
    for hand in [hands[0], *(hand for hand in hands[1:] if len(hand))]:
        share = rank_shares(lengths[hand].sum(dim=1).tolist(), budget, ranks.size)[ranks.rank]
        plans.append(Plan(hand.flatten(), [hand[part].flatten() for part in share]))
    return plans


def compute_rows(
    compute: Callable[[Batch], tuple[torch.Tensor, ...]], batch: Batch, rows: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What a pass over a micro-batch gives, tensors [rows, …]. An empty one is a pass over the shortest row that counts
    for nothing: the other ranks wait for this one's part of their weights, and of the gradients."""
    if len(rows):
        return compute(batch.select(rows))
    idle = compute(batch.select(batch.lengths.argmin()[None]))
    return tuple(values[:0] + 0 * values.sum() for values in idle)


def mismatch_columns(experience: Experience, logp: torch.Tensor, rows: torch.Tensor) -> dict[str, float]:
    """How log π(θ') of some rows, [B, R], differs from log μ: the log's columns k1 to ess_share; none without rows."""
    if not len(rows):
        return {}
    arguments = logp[rows], experience.logp_rollout[rows], experience.batch.response_mask[rows]
    tokens, sequences = token_metrics(*arguments), sequence_metrics(*arguments)
    names = ("k1", "k2", "k3", "mean_abs_prob_diff", "max_prob_diff", "min_prob_diff")
    return {
        **{name: tokens[name] for name in names},
        **{name: sequences[name] for name in ("kl_sequence", "sigma", "ess_share")},
    }
