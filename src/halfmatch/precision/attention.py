"""Attention on a CPU, rounded as the GPU kernels of each side round it.

A full-sequence pass (the trainer, and the engine's prefill) rounds as FlashAttention does: scores and softmax in fp32,
exp(s - max) rounded to the compute dtype for the product with V, the sum divided out in fp32, the result rounded once.
One query a sequence (decoding from a KV cache) rounds as a paged-attention kernel does: the softmax is normalised in
fp32, then rounded for the product with V. That is a difference which real trainers and engines have; both are right to
half a unit in the last place of what they round, and nothing else is added to either. On the trained laptop model it
gives two thirds of the mismatch that vLLM has there, in bf16 and in fp16; with one rounding on both sides a model so
small has almost none, and a real one (SmolLM2) has the same with either.

Products are fp32 matmuls of 16-bit values, as in `halfmatch.precision.emulation`. With fp32 tensors nothing is rounded.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from halfmatch.errors import UserError
from halfmatch.precision import torch_dtype
from halfmatch.precision.packing import BLOCK, PREFIX, of_packed

if TYPE_CHECKING:
    from halfmatch.precision import DType

NAME = PREFIX
# The same, but that one query rounds as many do: for drafts of what a full-sequence pass would say.
PASS_NAME = f"{PREFIX}-pass"
# PyTorch's fused kernels: what there is elsewhere than on a CPU.
FUSED_NAME = f"{PREFIX}-fused"
_LOG2_E = math.log2(math.e)
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
    as_a_pass: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of `transformers` models: query [B, H, T, D], key and value [B, G, L, D] → [B, T, H, D].

    G divides H (grouped queries). `attention_mask` [B or 1, 1, T, L] is true where a key is seen; None means causal.
    Keys and values may be fp32 copies of 16-bit values; the query's dtype is the one to round to.
    """
    if asked := [name for name in _UNSUPPORTED if options.get(name) is not None]:
        raise UserError(
            f"{type(module).__name__} needs {', '.join(asked)}, which attention on a CPU does not have here"
        )
    if dropout:
        raise UserError("attention dropout is not supported; set attention_dropout to 0 in the model's config.json")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    length, seen = query.shape[2], key.shape[2]
    if attention_mask is None:
        attention_mask = torch.ones(length, seen, dtype=torch.bool, device=query.device).tril_(seen - length)[
            None, None
        ]
    # Products with V are summed block by block, in order, and what is masked adds zeros behind the end: so a result
    # does not depend on how far its sequence is padded.
    if behind := -seen % BLOCK:
        key, value = pad(key, (0, 0, 0, behind)), pad(value, (0, 0, 0, behind))
        attention_mask = pad(attention_mask, (0, behind))
    if length == 1 and not as_a_pass:
        return paged_decode(query, key, value, attention_mask, scaling), None
    return _Flash.apply(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def paged_decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """One query a sequence: query [B, H, 1, D], key and value [B, G, L, D], mask [B or 1, 1, 1, L] → [B, 1, H, D]."""
    scores = _scores(query, key, mask, scaling)
    weights = scores.softmax(-1).to(query.dtype).float()
    return _values_sum(weights, value).to(query.dtype).view(query.shape[0], 1, query.shape[1], -1)


class _Flash(torch.autograd.Function):
    """FlashAttention-2's arithmetic (arXiv 2307.08691, algorithms 1 and 2) on whole rows.

    What it saves for the backward pass, what it rounds to the 16-bit dtype (exp(s - max), dS, the results) and what
    stays in fp32 (the rest) are as there. So is the base of the exponentials, 2, for its speed.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        scores = _scores(query, key, mask, scaling * _LOG2_E)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp2_()
        total = weights.sum(-1, keepdim=True)
        result = _values_sum(weights.to(query.dtype).float(), value).div_(total).to(query.dtype)
        result = result.view(*query.shape[:3], -1)
        ctx.save_for_backward(query, key, value, mask, result, top + total.log2())
        ctx.scaling = scaling
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_result: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, result, log2_total = ctx.saved_tensors
        groups = key.shape[1]
        weights = _scores(query, key, mask, ctx.scaling * _LOG2_E).sub_(log2_total).exp2_()  # P
        d_rows = _rows_by_group(d_result, groups)
        d_value = weights.to(query.dtype).float().transpose(1, 2) @ d_rows
        correction = (d_rows * _rows_by_group(result, groups)).sum(-1, keepdim=True)
        d_weights = d_rows @ value.float().flatten(0, 1).transpose(1, 2)
        d_scores = d_weights.sub_(correction).mul_(weights).to(query.dtype).float()
        d_query = d_scores @ key.float().flatten(0, 1) * ctx.scaling
        d_key = d_scores.transpose(1, 2) @ _rows_by_group(query, groups) * ctx.scaling
        return (
            d_query.view_as(query).to(query.dtype),
            d_key.view_as(key).to(key.dtype),
            d_value.view_as(value).to(value.dtype),
            None,
            None,
        )


def _rows_by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[B, H, T, D] → [B·G, (H/G)·T, D] in fp32: the queries that share a key-value head are rows of one matrix."""
    return x.float().reshape(x.shape[0] * groups, -1, x.shape[-1])


def _scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """Query [B, H, T, D], key [B, G, L, D], mask [B or 1, 1, T, L] → masked scores [B·G, (H/G)·T, L] in fp32."""
    batch, heads, length, _ = query.shape
    groups, seen = key.shape[1:3]
    scores = torch.bmm(_rows_by_group(query, groups), key.float().flatten(0, 1).transpose(1, 2)).mul_(scaling)
    scores.view(batch, heads, length, seen).masked_fill_(~mask, _MASKED)
    return scores


def _values_sum(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Weights [B·G, rows, L], value [B, G, L, D] → [B·G, rows, D], the sum over L block by block."""
    value = value.float().flatten(0, 1)
    blocks = range(0, value.shape[1], BLOCK)
    result = torch.bmm(weights[..., :BLOCK], value[:, :BLOCK])
    for start in blocks[1:]:
        result = torch.baddbmm(result, weights[..., start : start + BLOCK], value[:, start : start + BLOCK])
    return result


def _of_rounded(compute: Any, dtype: torch.dtype) -> Any:
    """Attention of fp32 queries, keys and values that rounds these, the inputs of its matmuls."""

    def attention_of_rounded(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        return compute(module, query.to(dtype), key.to(dtype), value.to(dtype), *args, **options)

    return attention_of_rounded


def rounding_name(name: str, dtype: DType) -> str:
    """The attention called `name`, for inputs in fp32 that it rounds to `dtype`."""
    return f"{name}-of-{dtype}"


for _name, _compute in (
    (NAME, attention),
    (PASS_NAME, partial(attention, as_a_pass=True)),
    (FUSED_NAME, sdpa_attention_forward),
):
    for _registered, _function in (
        (_name, _compute),
        *((rounding_name(_name, _dtype), _of_rounded(_compute, torch_dtype(_dtype))) for _dtype in ("bf16", "fp16")),
    ):
        AttentionInterface.register(_registered, of_packed(_function))
        AttentionMaskInterface.register(_registered, sdpa_mask)
