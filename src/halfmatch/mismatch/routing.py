"""Do both sides of a mixture of experts send tokens to the same experts?

A rounding that moves a router's logits across its k-th place swaps an expert: the largest jump that a rounding makes.
The engine's side is its own decoding of recorded tokens from a KV cache, the trainer's one forward pass over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmatch.engines.decoding import forced_routing
from halfmatch.models.routing import recorded
from halfmatch.statistics import Estimate, bootstrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens of a response that are compared: decoding is one step a token, of one response at a time.
MAX_TOKENS = 512


def agreement(
    engine: PreTrainedModel,
    trainer: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    *,
    bootstrap_samples: int,
    seed: int,
    confidence: float,
) -> dict[str, Any]:
    """Compare the routing of responses to different problems, where an estimate is {value, low, high}, over problems:

    responses, tokens: compared, the first MAX_TOKENS of a response and the positions that predict them
    share: of tokens × layers, those whose sets of experts are the same on both sides, an estimate
    layers: the same share layer by layer, estimates
    """
    same, counts = [], []
    for prompt, response in zip(prompt_ids, token_ids, strict=True):
        tokens = list(response[:MAX_TOKENS])
        sampled = forced_routing(engine, prompt, tokens)
        scored = _full_routing(trainer, [*prompt, *tokens[:-1]])
        agreed = same_experts(sampled, scored)[len(prompt) - 1 :]
        same.append(agreed.sum(axis=0))
        counts.append(len(agreed))
    of_problem, tokens_of = np.array(same, dtype=np.float64), np.array(counts, dtype=np.float64)

    def shares(drawn: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        layers = drawn @ of_problem / (drawn @ tokens_of)[:, None]
        return {"share": layers.mean(axis=1), "layers": layers}

    found = bootstrap(shares, len(counts), samples=bootstrap_samples, seed=seed, confidence=confidence)
    share, *layers = (
        Estimate(*map(float, bounds))._asdict()
        for name in ("share", "layers")
        for bounds in zip(*map(np.atleast_1d, found[name]), strict=True)
    )
    return {"responses": len(counts), "tokens": int(sum(counts)), "share": share, "layers": layers}


def same_experts(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether the sets of k experts are the same: a, b [positions, layers, k] → [positions, layers]."""
    return (np.sort(a, axis=-1) == np.sort(b, axis=-1)).all(axis=-1)


@torch.no_grad()
def _full_routing(model: PreTrainedModel, token_ids: Sequence[int]) -> NDArray[Any]:
    with recorded(model) as recorder:
        model(input_ids=torch.tensor([list(token_ids)], device=model.device), use_cache=False)
        return recorder.take().cpu().numpy()
