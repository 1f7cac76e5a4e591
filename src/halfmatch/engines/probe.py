"""A fixed probe of an engine after each sync of weights: the same prompts and seeds every time, scored by both sides.

With the same weights on both sides the difference is rounding, and about the same after every sync. A stale cache, a
weight that did not arrive or another dtype shows as a jump. The prompts are longer than the blocks that prefix caches
keep (16 tokens on GPUs, 128 on CPUs), so that an engine that kept its cache has something stale to use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halfmatch.config import Sampling
from halfmatch.engines import Request
from halfmatch.seeds import request_seed

if TYPE_CHECKING:
    from halfmatch.engines import Engine

PROMPT_TOKENS = 160
RESPONSE_TOKENS = 4
REQUESTS = 2

# The other side: log-probs of given responses to given prompts at temperature 1, one array [tokens] a response.
Score = Callable[[list[list[int]], list[list[int]]], Sequence[np.ndarray]]


@dataclass(frozen=True)
class Probe:
    """How far two sides are apart on the probe: d = log π − log μ in nats, over all of its tokens."""

    tokens: int
    mean_abs: float
    max_abs: float
    k3: float  # mean of exp(d) − 1 − d, an estimate of KL[μ‖π] a token


def probe_requests(vocabulary: int, context: int) -> list[Request]:
    """The probe's requests for a model with so many tokens and positions; prompts are shorter where the context is."""
    length = min(PROMPT_TOKENS, context - RESPONSE_TOKENS)
    if length < 1:
        raise ValueError(f"a context of {context} positions leaves no room for a probe of {RESPONSE_TOKENS} tokens")
    # A shared prompt that differs in its last token: what prefix caches are made for.
    draw = np.random.default_rng(0).integers(vocabulary, size=length + REQUESTS - 1).tolist()
    return [
        Request((*draw[: length - 1], draw[length - 1 + index]), request_seed(0, "probe", index))
        for index in range(REQUESTS)
    ]


def probe(engine: Engine, score: Score, requests: Sequence[Request]) -> Probe:
    """Let the engine answer the requests and the other side score the answers.

    A value that is not finite, on either side, makes the differences infinite.
    """
    completions = engine.generate(requests, Sampling(max_tokens=RESPONSE_TOKENS), stop_token_ids=())
    scored = score(
        [list(request.prompt_ids) for request in requests], [completion.token_ids for completion in completions]
    )
    logp_train = np.concatenate([np.asarray(values, dtype=np.float64) for values in scored])
    logp_rollout = np.concatenate([np.asarray(completion.logprobs, dtype=np.float64) for completion in completions])
    if logp_train.shape != logp_rollout.shape:
        raise ValueError(f"{logp_rollout.size} tokens were sampled and {logp_train.size} scored")
    with np.errstate(invalid="ignore", over="ignore"):
        d = logp_train - logp_rollout
        k3 = float(np.mean(np.expm1(d) - d))
    if not np.isfinite(d).all():
        return Probe(d.size, np.inf, np.inf, np.inf)
    return Probe(d.size, float(np.abs(d).mean()), float(np.abs(d).max()), k3)
