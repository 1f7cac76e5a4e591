"""The `trainer` engine: samples of π itself, the policy that the trainer's forward pass computes.

The trainer only scores: given a whole response it computes every token's distribution in one pass. To sample from those
distributions, a response is drafted by decoding from a KV cache and then checked by a pass over all of it: where the
draft's token is not the one that the pass draws with the same random numbers, the pass's token takes its place and the
rest is drafted anew. So every token is π's draw given the tokens before it, exactly, whatever drafted it; a response
takes one pass more than it has corrections, and not one a token. Drafts share the weights, so corrections are few.

With the same seeds the other engines draw with the same numbers (vLLM where `engine.draws` is race), and what they
answer differently is what their rounding does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfmatch.engines import Completion, NonFiniteError, Request
from halfmatch.engines.decoding import GuidedDecoding
from halfmatch.engines.sampling import NUMBERS, Numbers, log_distribution
from halfmatch.engines.transformers import TransformersEngine
from halfmatch.precision.casting import round_as_a_pass
from halfmatch.rl.batching import collate, micro_batches
from halfmatch.rl.scoring import response_logits

if TYPE_CHECKING:
    from halfmatch.config import EngineSettings, Sampling
    from halfmatch.precision import Precision

# Tokens of a pass, padding included, and logits of it that are turned into probabilities at a time (64 MiB in fp32).
MICRO_BATCH_TOKENS = 4096
CHUNK_ELEMENTS = 2**24


class FullPassEngine(TransformersEngine):
    """`engines.Engine` in the compute dtype of a precision; see the top of this module."""

    def __init__(self, model: Path, precision: Precision, settings: EngineSettings):
        super().__init__(model, precision.model_copy(update={"rollout": precision.compute}), settings)
        self.description: Mapping[str, Any] = {**self.description, "name": "trainer"}
        round_as_a_pass(self._model)  # a pass gives the same bits as before, and drafts need fewer corrections

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """As every engine's; a response depends on its request alone, as the transformers engine's does."""
        self._check_requests(requests, sampling)
        completions: dict[int, Completion] = {}
        begun: dict[int, list[int]] = {index: [] for index in range(len(requests))}  # tokens that a pass has drawn
        while begun:
            waiting = [requests[index] for index in begun]
            decoding = GuidedDecoding(
                self._model,
                waiting,
                sampling,
                stop_token_ids,
                self._slots,
                given=list(begun.values()),
                draws=self._draws,
            )
            drafts = dict(zip(begun, decoding.run(), strict=True))
            for index, checked in self._check(requests, drafts, sampling):
                draft = drafts[index].token_ids
                kept = _agreement(checked.token_ids, draft, start=len(begun[index]))
                tokens = checked.token_ids[: kept + 1]
                is_stopped = tokens[-1] in stop_token_ids
                if is_stopped or len(tokens) == sampling.max_tokens:
                    logprobs = checked.logprobs[: len(tokens)]
                    completions[index] = Completion(tokens, logprobs, "stop" if is_stopped else "length")
                else:
                    begun[index] = tokens
            for index in completions.keys() & begun.keys():
                del begun[index]
                if progress:
                    progress(1)
        return [completions[index] for index in range(len(requests))]

    def _check(
        self, requests: Sequence[Request], drafts: Mapping[int, Completion], sampling: Sampling
    ) -> Iterable[tuple[int, Completion]]:
        """What the pass over each draft draws at all of its positions, and log π of that."""
        indices = list(drafts)
        lengths = [len(requests[index].prompt_ids) + len(drafts[index].token_ids) for index in indices]
        for group in micro_batches(lengths, MICRO_BATCH_TOKENS):
            members = [indices[place] for place in group.tolist()]
            responses = [drafts[index].token_ids for index in members]
            batch = collate([requests[index].prompt_ids for index in members], responses, stop_token_ids=())
            logits = response_logits(self._model, batch.to(self._device))
            sizes = [len(response) for response in responses]
            numbers = [
                NUMBERS[self._draws](requests[index].seed, size, logits.shape[-1], self._device)
                for index, size in zip(members, sizes, strict=True)
            ]
            tokens, logprobs = _draw_all(logits, numbers, sizes, sampling)
            for index, some, theirs in zip(members, tokens, logprobs, strict=True):
                yield index, Completion(some, theirs, drafts[index].finish_reason)


def _draw_all(
    logits: torch.Tensor, numbers: Sequence[Numbers], sizes: Sequence[int], sampling: Sampling
) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and their log-probs, response by response: drawn from logits [N, V], with the numbers of
    responses of `sizes` tokens, N in all."""
    tokens, logprobs = [], []
    size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    for rows, taken in zip(logits.split(size), _in_chunks(numbers, sizes, size), strict=True):
        if not torch.isfinite(rows).all():
            raise NonFiniteError("the logits of the trainer's pass are not finite; if this is fp16, they overflow it")
        distribution = log_distribution(rows, sampling.temperature, sampling.top_p)
        drawn = numbers[0].draw(distribution, taken.to(rows.device))
        tokens.append(drawn)
        logprobs.append(distribution.gather(1, drawn[:, None]).squeeze(1))
    by_response = (torch.cat(parts).split(list(sizes)) for parts in (tokens, logprobs))
    drawn_tokens, drawn_logprobs = ([part.tolist() for part in parts] for parts in by_response)
    return drawn_tokens, drawn_logprobs


def _in_chunks(numbers: Sequence[Numbers], sizes: Sequence[int], size: int) -> Iterator[torch.Tensor]:
    """The numbers of all positions of responses of `sizes` tokens, one response after the other, `size` at a time."""
    taken, room = [], size
    for one, left in zip(numbers, sizes, strict=True):
        while left:
            count = min(left, room)
            taken.append(one.take(count))
            left, room = left - count, room - count
            if not room:
                yield torch.cat(taken)
                taken, room = [], size
    if taken:
        yield torch.cat(taken)


def _agreement(drawn: Sequence[int], draft: Sequence[int], start: int) -> int:
    """Where the two first differ, from `start` on; the last place where they do not."""
    return next((place for place in range(start, len(draft)) if drawn[place] != draft[place]), len(draft) - 1)
