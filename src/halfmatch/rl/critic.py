"""PPO's critic in training: a value model that is placed, scaled and stepped as the policy is, by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfmatch.config import Training
from halfmatch.precision import Precision
from halfmatch.rl.advantages import generalized_advantages, standardized
from halfmatch.rl.batching import Batch
from halfmatch.rl.experience import Plan, compute_rows
from halfmatch.rl.learner import Learner
from halfmatch.rl.parts import Objective
from halfmatch.rl.ranks import ALONE, Ranks
from halfmatch.rl.rewards import token_rewards
from halfmatch.rl.values import Targets, ValueModel, explained_variance, token_values, value_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Critic:
    """A value model and what moves it."""

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        *,
        settings: Training,
        precision: Precision,
        ranks: Ranks = ALONE,
    ):
        """`model`: the policy in float32, before it is cast; its backbone is where the value model starts from."""
        assert objective.critic is not None
        self.part, self.standardize, self.ranks = objective.critic, objective.scale_by_std, ranks
        self.learner = Learner(ValueModel(model), settings, precision, ranks)
        self.learner.initial.clear()

    @torch.no_grad()
    def estimate(
        self, batch: Batch, rewards: Tensor, penalties: Tensor | None, plans: Sequence[Plan]
    ) -> tuple[Tensor, Targets]:
        """The advantage of every token, [B, R] float32, and what the value model is to learn.

        rewards [B] of responses; penalties [B, R] of tokens, taken off.
        """
        values = torch.zeros(batch.response_mask.shape, device=batch.response_mask.device)
        for rows in (rows for plan in plans for rows in plan.micro_batches):
            micro = self._values(batch, rows)
            values[rows, : micro.shape[1]] = micro
        values = self.ranks.sum(values)
        advantages, returns = generalized_advantages(
            token_rewards(rewards.to(values.device), penalties, batch.response_mask),
            values,
            batch.response_mask,
            discount=self.part.discount,
            gae_lambda=self.part.gae_lambda,
        )
        if self.standardize:
            advantages = standardized(advantages, batch.response_mask)
        return advantages, Targets(values, returns)

    def gradient_step(self, batch: Batch, targets: Targets, plan: Plan, rate: float) -> dict[str, Any]:
        """One optimizer step, left out where a gradient is not finite; its columns of the log."""
        columns, taken = self.learner.update(partial(self._accumulate, batch, targets, plan), rate)
        return columns | {f"critic_{name}": value for name, value in taken.items()}

    def _values(self, batch: Batch, rows: Tensor) -> Tensor:
        """Values of a micro-batch, [rows, R]."""
        (values,) = compute_rows(lambda micro: (token_values(self.learner.model, micro),), batch, rows)
        return values

    def _accumulate(self, batch: Batch, targets: Targets, plan: Plan) -> dict[str, Any]:
        """Forward and backward over the micro-batches of a step. Each loss is its share of the step's."""
        mask = batch.response_mask
        tokens = int(mask[plan.rows].sum())
        sums = torch.zeros(2, dtype=torch.float64)
        values = torch.zeros_like(targets.values)
        for number, rows in enumerate(plan.micro_batches):
            micro = self._values(batch, rows)
            width = micro.shape[1]
            loss, clipped = value_loss(
                micro,
                values_old=targets.values[rows, :width],
                returns=targets.returns[rows, :width],
                mask=mask[rows, :width],
                clip=self.part.value_clip,
                tokens=tokens,
            )
            self.learner.backward(loss, last=number == len(plan.micro_batches) - 1)
            values[rows, :width] = micro.detach()
            sums += torch.tensor([loss.item(), clipped.item()], dtype=torch.float64)
        loss_sum, clipped_sum = self.ranks.sum(sums).tolist()
        rows, values = plan.rows, self.ranks.sum(values)
        return {
            "value_loss": loss_sum,
            "value_clip_share": clipped_sum / max(tokens, 1),
            "explained_variance": explained_variance(values[rows], targets.returns[rows], mask[rows]),
        }
