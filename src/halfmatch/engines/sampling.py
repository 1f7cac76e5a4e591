"""From logits to tokens: the distribution that is sampled from, and its inverse CDF at a given uniform number."""

from __future__ import annotations

import torch


def log_distribution(logits: torch.Tensor, temperature: float, top_p: float = 1.0) -> torch.Tensor:
    """Log-probs in nats, fp32 [N, V], of the distribution that tokens are drawn from; `logits` [N, V] of any dtype.

    After the temperature, and renormalised over the nucleus where top_p < 1: the fewest most probable tokens (the lower
    id first among equals) whose probabilities reach top_p.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    if top_p == 1:
        return logprobs
    ordered, tokens = logprobs.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.double().exp()
    behind = probabilities.cumsum(-1) - probabilities >= top_p  # reached before this token
    outside = torch.zeros_like(behind).scatter(-1, tokens, behind)
    return torch.log_softmax(logprobs.masked_fill(outside, -torch.inf), dim=-1)


def draw(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids [N]: the inverse CDF of `logprobs` [N, V], over token ids in order, at `uniforms` [N] in [0, 1).

    CDF and uniforms are float64. A row depends on itself alone, and a token of probability zero is never drawn.
    """
    cdf = logprobs.double().exp().cumsum(-1)
    total = cdf[:, -1:].contiguous()
    tokens = torch.searchsorted(cdf, uniforms[:, None] * total, right=True)
    last = torch.searchsorted(
        cdf, total
    )  # the last token of positive probability, should the product round to the total
    return torch.minimum(tokens, last).squeeze(1)
