"""The training policy's log-probs of given tokens: one full-sequence forward pass.

The logits come out of the model in its compute dtype, rounded; the division by the temperature, the softmax and all
that follows are float32 (float64 for a float64 model). The rollout engine does the same with its own logits, so what
differs between log π and log μ is what the two models computed.

A sequence's numbers do not depend on others by construction: no layer but attention looks at more than one token, and
attention at one sequence (halfmatch.precision.packing). What is left is the kernels' choice of blocking by shape. On a
CPU a row of a matmul has the same bits for 8 rows or more, that is for every micro-batch of 8 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from halfmatch.models.routing import replayed
from halfmatch.precision.emulation import ROWS
from halfmatch.rl.batching import Batch, collate, micro_batches

# Logits turned into float32 at a time: 64 MiB, however long the batch and large the vocabulary.
CHUNK_ELEMENTS = 2**24


def token_logprobs(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of every response token and entropy of the distribution it stands in, in nats.

    Both [B, R] float32, exactly 0 outside the response mask. The log-probs carry gradients, the entropy does not.
    """
    logits, mask = response_logits(model, batch), batch.response_mask
    logp, entropy = _SelectedLogSoftmax.apply(logits, batch.response_ids, temperature)
    zeros = logp.new_zeros(mask.shape)
    return zeros.masked_scatter(mask, logp), zeros.masked_scatter(mask, entropy)


def response_logits(model: Any, batch: Batch) -> torch.Tensor:
    """One pass over whole sequences: the logits that the N response tokens are drawn from, response by response, as
    they come out of the model, in its compute dtype, [N, V]."""
    packing, before = batch.packed()
    fill = max(0, ROWS - len(before))  # fewer rows would have other bits
    before = torch.cat([before.new_zeros(fill), before])
    with nullcontext() if batch.routing is None else replayed(model, packing.pack(batch.routing)):
        logits = model(**packing.inputs(model, batch.input_ids), logits_to_keep=before).logits
    return logits[0, fill:]


class _SelectedLogSoftmax(torch.autograd.Function):
    """log softmax(logits / temperature) at one target a position, and the entropy there.

    The same as `log_softmax` and `gather`, without a float32 copy of all logits: forward and backward go over chunks of
    positions, and only the rounded logits are kept in between. Their gradient takes their place in memory, so there is
    one backward pass; autograd refuses another.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [N, V]; targets [N] into V. Returns log-probs [N], entropies [N]."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        logp, entropy = (torch.empty(len(targets), dtype=wide, device=logits.device) for _ in range(2))
        for chunk in _chunks(*logits.shape):
            logprobs = torch.log_softmax(logits[chunk].to(wide, copy=True).div_(temperature), dim=-1)
            logp[chunk] = logprobs.gather(1, targets[chunk, None]).squeeze(1)
            probabilities = logprobs.exp()
            logprobs.clamp_(min=torch.finfo(wide).min)  # a token of probability 0 adds nothing, and no 0 times -inf
            entropy[chunk] = -probabilities.mul_(logprobs).sum(dim=-1)
        ctx.save_for_backward(logits, targets)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """d logp / d logits = (one-hot(target) − softmax) / temperature, in float32, then rounded once."""
        logits, targets = ctx.saved_tensors
        grad_logp = grads[0]
        for chunk in _chunks(*logits.shape):
            wide = torch.softmax(logits[chunk].to(grad_logp.dtype, copy=True).div_(ctx.temperature), dim=-1).neg_()
            wide.scatter_add_(1, targets[chunk, None], torch.ones_like(wide[:, :1]))
            logits[chunk] = wide.mul_(grad_logp[chunk, None] / ctx.temperature)
        return logits, None, None


def _chunks(positions: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return (slice(start, start + size) for start in range(0, positions, size))


@torch.no_grad()
def response_logprobs(
    model: torch.nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    micro_batch_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> list[np.ndarray]:
    """Log-probs of recorded responses, all of their tokens: one float32 array [tokens] a response, in their order."""
    device = next(model.parameters()).device
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompt_ids, token_ids, strict=True)]
    scored: dict[int, np.ndarray] = {}
    for group in micro_batches(lengths, micro_batch_tokens):
        rows = group.tolist()
        batch = collate([prompt_ids[row] for row in rows], [token_ids[row] for row in rows], stop_token_ids=())
        logp, _ = token_logprobs(model, batch.to(device), temperature)
        for row, values in zip(rows, logp.float().cpu().numpy(), strict=True):
            scored[row] = values[: len(token_ids[row])].copy()
        if progress:
            progress(len(rows))
    return [scored[row] for row in range(len(lengths))]
