"""Attention on a CPU, rounded as the GPU kernels of each side round it.

A full-sequence pass (the trainer, and the engine's prefill) rounds as FlashAttention does: scores and softmax in fp32,
exp(s - max) rounded to the compute dtype for the product with V, the sum divided out in fp32, one rounding of the result.
One query a sequence (decoding from a KV cache) rounds as a paged-attention kernel does: the softmax is normalised in fp32,
then rounded for the product with V. That difference is the one that real trainers and engines have here; both kernels are
right to half a unit in the last place of P, and neither adds anything to it.

Products are fp32 matmuls of 16-bit values, as in `halfmatch.precision.emulation`. With fp32 tensors nothing is rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from halfmatch.errors import UserError

NAME = "halfmatch"
# Cached positions that one product with V sums over. Blocks are added in order, so that the result does not depend on how
# far behind a sequence's end the cache is padded: what is masked adds zeros to the end.
BLOCK = 64
_MASKED = torch.finfo(torch.float32).min  # not -inf: a row without any key must not become NaN
# What some models ask of attention beyond the plain thing; ignoring it would be wrong silently.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of `transformers` models: query [B, H, T, D], key and value [B, G, L, D] → [B, T, H, D].

    G divides H (grouped queries). `attention_mask` [B or 1, 1, T, L] is true where a key is seen; None means causal. Keys
    and values may be fp32 copies of 16-bit values; the query's dtype is the one to round to.
    """
    if asked := [name for name in _UNSUPPORTED if options.get(name) is not None]:
        raise UserError(
            f"{type(module).__name__} needs {', '.join(asked)}, which attention on a CPU does not have here"
        )
    if dropout:
        raise UserError("attention dropout is not supported; set attention_dropout to 0 in the model's config.json")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if query.shape[2] == 1:
        return paged_decode(query, key, value, attention_mask, scaling), None
    if attention_mask is None:
        length, seen = query.shape[2], key.shape[2]
        attention_mask = torch.ones(length, seen, dtype=torch.bool, device=query.device).tril_(seen - length)[
            None, None
        ]
    return _Flash.apply(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def paged_decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """One query a sequence: query [B, H, 1, D], key and value [B, G, L, D] → [B, 1, H, D]."""
    batch, heads, _, width = query.shape
    groups, length = key.shape[1:3]
    key, value = key.float().flatten(0, 1), value.float().flatten(0, 1)
    scores = torch.bmm(query.float().view(batch * groups, heads // groups, width), key.transpose(1, 2)) * scaling
    if mask is not None:
        scores = scores.view(batch, groups, -1, length).masked_fill(~mask, _MASKED).flatten(0, 1)
    weights = scores.softmax(-1).to(query.dtype).float()
    result = torch.bmm(weights[..., :BLOCK], value[:, :BLOCK])
    for start in range(BLOCK, length, BLOCK):
        stop = start + BLOCK
        result = torch.baddbmm(result, weights[..., start:stop], value[:, start:stop])
    return result.to(query.dtype).view(batch, 1, heads, width)


def _scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """[B, H, T, D], [B, G, L, D] → masked scores in fp32 [B, G, H/G, T, L]."""
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    scores = _by_group(query, groups) @ key.float().transpose(-1, -2) * scaling
    return scores.view(batch, groups, heads // groups, length, -1).masked_fill(~mask[:, :, None], _MASKED)


def _by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[B, H, T, D] → [B, G, (H/G)·T, D] in fp32: the queries that share one key-value head, as rows of one matrix."""
    batch, _, _, width = x.shape
    return x.float().reshape(batch, groups, -1, width)


class _Flash(torch.autograd.Function):
    """FlashAttention-2's arithmetic (arXiv 2307.08691, algorithms 1 and 2) on whole rows: what it saves for the backward
    pass, what it rounds to the 16-bit dtype (exp(s - max), dS and the results), and what stays in fp32 (the rest)."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        scores = _scores(query, key, mask, scaling)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top).exp_()
        total = weights.sum(-1, keepdim=True)
        product = weights.to(query.dtype).float().flatten(2, 3) @ value.float()
        result = (product / total.flatten(2, 3)).view_as(query).to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, result, top + total.log())
        ctx.scaling = scaling
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_result: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, result, log_total = ctx.saved_tensors
        dtype, groups = query.dtype, key.shape[1]
        weights = (_scores(query, key, mask, ctx.scaling) - log_total).exp_().flatten(2, 3)  # P [B, G, (H/G)·T, L]
        d_rows = _by_group(d_result, groups)
        d_value = weights.to(dtype).float().transpose(-1, -2) @ d_rows
        correction = (d_rows * _by_group(result, groups)).sum(-1, keepdim=True)
        d_scores = weights * (d_rows @ value.float().transpose(-1, -2) - correction)
        d_scores = d_scores.to(dtype).float()
        d_query = (d_scores @ key.float() * ctx.scaling).view_as(query)
        d_key = d_scores.transpose(-1, -2) @ _by_group(query, groups) * ctx.scaling
        return d_query.to(dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
