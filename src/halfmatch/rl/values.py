"""The value model: what reward is still to come, at every token of a response; and what it learns by.

Its precision is the policy's. The value head is one of the modules that can be kept in float32 (`value_head` among a
precision's fp32_modules); values, returns and the loss are float32 in any case.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfmatch.rl.batching import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Targets:
    """What the value model learns in one iteration."""

    values: Tensor  # V', of the value model before the iteration's first step, [B, R] float32
    returns: Tensor  # λ-returns, [B, R] float32


class ValueModel(torch.nn.Module):
    """A causal LM's backbone and a linear head of one output, which starts at 0: so does every value.

    Has what `halfmatch.rl.learner.Learner` asks of a model.
    """

    def __init__(self, model: PreTrainedModel):
        """`model`: a causal LM in float32, whose backbone is copied."""
        super().__init__()
        self.backbone = deepcopy(model.base_model)
        self.config = self.backbone.config
        self._no_split_modules = self.backbone._no_split_modules
        weight = next(self.backbone.parameters())
        self.value_head = torch.nn.Linear(self.config.hidden_size, 1, device=weight.device, dtype=weight.dtype)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Token ids [B, T] → values [B, T] float32, each of the state after the token. options: the backbone's."""
        hidden = self.backbone(input_ids=input_ids, **options).last_hidden_state
        return self.value_head(hidden).squeeze(-1).float()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.backbone.get_input_embeddings()

    def get_output_embeddings(self) -> None:
        """There is no LM head."""

    def set_attn_implementation(self, implementation: Any) -> None:
        self.backbone.set_attn_implementation(implementation)


def token_values(model: Any, batch: Batch) -> Tensor:
    """The value of the state that every response token was sampled in: [B, R] float32, 0 outside the response mask."""
    packing, before = batch.packed()
    values, mask = model(**packing.inputs(model, batch.input_ids)), batch.response_mask
    return values.new_zeros(mask.shape).masked_scatter(mask, values[0, before])


def value_loss(
    values: Tensor, *, values_old: Tensor, returns: Tensor, mask: Tensor, clip: float, tokens: int
) -> tuple[Tensor, Tensor]:
    """The loss of PPO's critic, a scalar, and how many tokens have no gradient for the clip.

    ½ max((V − R)², (clip(V, V' − clip, V' + clip) − R)²), a mean over `tokens`, the response tokens of the whole step,
    with V' the value before the iteration's first step: the clip of the policy's ratio, on values (as in OpenAI's
    baselines; arXiv 1707.06347 has no clip). All [B, R] float32; clip: inf for none.
    """
    values, values_old, returns = (given.masked_fill(~mask, 0.0) for given in (values, values_old, returns))
    error = (values - returns).square()
    clipped = (values.clamp(values_old - clip, values_old + clip) - returns).square()
    losses = torch.maximum(error, clipped) / 2
    return losses.sum() / max(tokens, 1), (clipped > error).sum()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """1 − Var(R − V) / Var(R) over response tokens: 1 for a perfect critic, 0 for one that knows the mean alone.

    None where all returns are equal.
    """
    returns, residuals = returns[mask].double(), (returns - values)[mask].double()
    variance = returns.var(correction=0)
    return None if len(returns) == 0 or variance == 0 else float(1 - residuals.var(correction=0) / variance)
