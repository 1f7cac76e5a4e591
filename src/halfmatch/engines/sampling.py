"""From logits to tokens: the distribution that is sampled from, and two ways to draw from it.

By inverse CDF a token takes one random number; in a race of the whole vocabulary, one for each token of it. vLLM draws
by a race. Where the others do so too, with the numbers that vLLM has of the same seeds, what they answer differently is
what their rounding does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from halfmatch.config import Draws
from halfmatch.seeds import uniforms


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


class Numbers(ABC):
    """The random numbers of one request, position by position; which they are depends on its seed alone."""

    @abstractmethod
    def __init__(self, seed: int, length: int, vocabulary: int, device: torch.device):
        """length: of how many positions numbers will be taken at most."""

    @abstractmethod
    def take(self, count: int) -> torch.Tensor:
        """Those of the next `count` positions, float64 [count, numbers a position]."""

    @staticmethod
    @abstractmethod
    def draw(logprobs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Token ids [N], from distributions [N, V] and the numbers of as many positions [N, numbers a position]."""


class Uniforms(Numbers):
    """One uniform number a position, on the CPU."""

    def __init__(self, seed: int, length: int, vocabulary: int, device: torch.device):
        self._numbers, self._taken = torch.from_numpy(uniforms(seed, length))[:, None], 0

    def take(self, count: int) -> torch.Tensor:
        self._taken += count
        return self._numbers[self._taken - count : self._taken]

    @staticmethod
    def draw(logprobs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The inverse CDF, over token ids in order, in float64. A row depends on itself alone, and a token of
        probability zero is never drawn."""
        cdf = logprobs.double().exp().cumsum(-1)
        total = cdf[:, -1:].contiguous()
        tokens = torch.searchsorted(cdf, numbers * total, right=True)
        last = torch.searchsorted(
            cdf, total
        )  # the last token of positive probability, should the product round to the total
        return torch.minimum(tokens, last).squeeze(1)


class Exponentials(Numbers):
    """An exponential number for every token of the vocabulary a position, on the engine's device: from a generator of
    the request, as vLLM with `use_fp64_gumbel` takes them. One call a position: a call for several gives others."""

    def __init__(self, seed: int, length: int, vocabulary: int, device: torch.device):
        self._generator = torch.Generator(device).manual_seed(seed)
        self._vocabulary, self._device = vocabulary, device

    def take(self, count: int) -> torch.Tensor:
        numbers = torch.empty(count, self._vocabulary, dtype=torch.float64, device=self._device)
        for position in numbers:
            position.exponential_(generator=self._generator)
        return numbers

    @staticmethod
    def draw(logprobs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The first of the tokens in a race that each ends after number / probability, in float64: each is as often
        first as it is probable, and a token of probability zero never is."""
        return (logprobs.double() - numbers.log()).argmax(dim=-1)


NUMBERS: Mapping[Draws | None, type[Numbers]] = {None: Uniforms, "race": Exponentials}
