"""Decoding of a batch of requests from a KV cache, slots refilled as sequences end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from halfmatch.config import Draws, Sampling
from halfmatch.engines import Completion, NonFiniteError, Request
from halfmatch.engines.cache import PromptCache, SlotCache
from halfmatch.engines.sampling import NUMBERS, Numbers, log_distribution
from halfmatch.models.routing import recorded
from halfmatch.precision import dtype_name
from halfmatch.precision.emulation import ROWS
from halfmatch.precision.packing import BLOCK

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from halfmatch.models.routing import Recorder


class Decoding:
    """The state of one `generate`: sequences 0 … active-1 are decoded together, each in the slot of its number.

    Of a slot: `_positions` where the token to be fed next stands, `_counts` how many tokens were sampled, `_tokens` and
    `_logprobs` [rows, max_tokens] those, `_numbers` what the next are drawn with, `_routing` the experts that its
    positions took, [positions, layers, k] piece by piece, where a recorder is given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        slots: int,
        progress: Callable[[int], None] | None,
        recorder: Recorder | None = None,
        draws: Draws | None = None,
    ):
        self._model, self._requests, self._sampling, self._progress = model, requests, sampling, progress
        # Requests with the same prompt follow each other, so that one prompt's cache at a time is enough.
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            by_prompt.setdefault(tuple(request.prompt_ids), []).append(index)
        self._queue = deque(index for indices in by_prompt.values() for index in indices)
        self._completions: dict[int, Completion] = {}

        self._device = device = model.device
        self._slots = min(slots, len(requests))
        rows = _round_up(self._slots, ROWS)  # as every step computes on a multiple of them
        shape = (rows, sampling.max_tokens)
        self._active = 0
        self._request_of = [-1] * rows
        self._stop = torch.tensor(sorted(stop_token_ids), dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._counts = torch.zeros(rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._kind_of_numbers = NUMBERS[draws]
        self._numbers: dict[int, Numbers] = {}
        self._recorder = recorder
        self._routing: list[list[torch.Tensor]] = [[] for _ in range(rows)]
        self._prompt: tuple[int, ...] | None = None
        self._prompt_cache = PromptCache()
        self._prompt_logits = torch.empty(0)
        self._prompt_routing: list[torch.Tensor] = []
        self._cache: SlotCache | None = None

    def run(self) -> list[Completion]:
        while self._queue or self._active:
            first = self._active
            started = self._start()
            if started:
                self._sample(first, torch.cat(started))
            else:
                self._sample(0, self._step())
            self._retire()
        return [self._completions[index] for index in range(len(self._requests))]

    def _start(self) -> list[torch.Tensor]:
        """Give free slots to waiting requests; the logits [1, V] that each draws its first token from."""
        logits = []
        while self._queue and self._active < self._slots:
            index, slot = self._queue.popleft(), self._active
            request = self._requests[index]
            cache = self._prefill(tuple(request.prompt_ids))
            cache.install(slot, self._prompt_cache)
            self._request_of[slot] = index
            self._positions[slot] = len(request.prompt_ids) - 1
            self._counts[slot] = 0
            self._routing[slot] = list(self._prompt_routing)
            vocabulary = self._model.config.get_text_config().vocab_size
            self._numbers[slot] = self._kind_of_numbers(
                request.seed, self._sampling.max_tokens, vocabulary, self._device
            )
            self._active += 1
            logits.append(self._prompt_logits)
        return logits

    def _prefill(self, prompt: tuple[int, ...]) -> SlotCache:
        """Run the model over a prompt, unless it is the one before; the slots' cache, made at the first prompt."""
        if prompt != self._prompt:
            length = len(prompt)
            self._prompt, self._prompt_cache = prompt, PromptCache()
            tokens = torch.tensor([prompt], device=self._device)
            positions = torch.arange(length, device=self._device)[None]
            causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=self._device).tril_()
            self._prompt_logits = self._forward(tokens, positions, causal, self._prompt_cache)
            self._prompt_routing = [self._recorder.take()] if self._recorder else []
        if self._cache is None:
            longest = max(len(request.prompt_ids) for request in self._requests) + self._sampling.max_tokens
            # On a CPU attention computes in fp32: upcast once, when stored, and not at every step.
            dtype = torch.float32 if self._device.type == "cpu" else None
            self._cache = SlotCache(self._prompt_cache, len(self._positions), _round_up(longest, BLOCK), dtype)
        return self._cache

    def _step(self) -> torch.Tensor:
        """Feed each sequence its newest token; the logits [active, V] of the next."""
        assert self._cache is not None
        rows = _round_up(self._active, ROWS)
        self._positions[self._active : rows] = 0  # rows without a sequence see a position of their own
        positions = self._positions[:rows]
        tokens = self._tokens[:rows].gather(1, (self._counts[:rows, None] - 1).clamp_min(0))
        seen = _round_up(int(positions.max()) + 1, BLOCK)
        self._cache.begin_step(positions, seen)
        mask = torch.arange(seen, device=self._device) <= positions[:, None]
        logits = self._forward(tokens, positions[:, None], mask[:, None, None], self._cache)[: self._active]
        if self._recorder:
            for pieces, chosen in zip(self._routing, self._recorder.take()[: self._active], strict=False):
                pieces.append(chosen[None])
        return logits

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits [B, V] behind the last of `tokens` [B, T]; a 4-D mask is taken by the model as it is."""
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _sample(self, first: int, logits: torch.Tensor) -> None:
        """Draw the next token of slots first … active-1 from `logits`, one row each."""
        slots = range(first, self._active)
        counts = self._counts[first : self._active]
        self._check_finite(first, logits)
        logprobs = log_distribution(logits, self._sampling.temperature, self._sampling.top_p)
        tokens = self._draw(logprobs, slots, counts)
        rows = torch.arange(first, self._active, device=self._device)
        self._tokens[rows, counts] = tokens
        self._logprobs[rows, counts] = logprobs.gather(1, tokens[:, None]).squeeze(1)
        counts += 1
        self._positions[first : self._active] += 1

    def _draw(self, logprobs: torch.Tensor, slots: Sequence[int], counts: torch.Tensor) -> torch.Tensor:
        """The next token of each slot, from the distribution [N, V] that it is drawn from."""
        numbers = torch.cat([self._numbers[slot].take(1) for slot in slots]).to(self._device)
        return self._kind_of_numbers.draw(logprobs, numbers)

    def _check_finite(self, first: int, logits: torch.Tensor) -> None:
        finite = torch.isfinite(logits).all(dim=-1)
        if not finite.all():
            slot = first + int(finite.logical_not().nonzero()[0])
            index, count = self._request_of[slot], int(self._counts[slot])
            raise NonFiniteError(
                f"request {index} (seed {self._requests[index].seed}): the logits of its token {count + 1} are not "
                f"finite in {dtype_name(logits.dtype)}; if this is fp16, the model's activations overflow it: "
                "sample in bf16 or fp32"
            )

    def _retire(self) -> None:
        """Take the sequences that ended out, the last active slot moving into the place of each."""
        assert self._cache is not None
        counts = self._counts[: self._active]
        newest = self._tokens[: self._active].gather(1, counts[:, None] - 1)
        stopped = (newest == self._stop).any(dim=1)
        ended = (stopped | (counts == self._sampling.max_tokens)).nonzero().flatten().tolist()
        for slot in reversed(ended):
            count = int(self._counts[slot])
            self._completions[self._request_of[slot]] = Completion(
                token_ids=self._tokens[slot, :count].tolist(),
                logprobs=self._logprobs[slot, :count].tolist(),
                finish_reason="stop" if stopped[slot] else "length",
                routing=torch.cat(self._routing[slot]).cpu().numpy() if self._recorder else None,
            )
            self._active -= 1
            if slot != self._active:
                self._move(self._active, slot)
        if ended and self._progress:
            self._progress(len(ended))

    def _move(self, source: int, target: int) -> None:
        assert self._cache is not None
        self._cache.move(source, target, int(self._positions[source]))
        self._request_of[target], self._routing[target] = self._request_of[source], self._routing[source]
        self._numbers[target] = self._numbers[source]
        for state in (self._positions, self._counts, self._tokens, self._logprobs):
            state[target] = state[source]


class GuidedDecoding(Decoding):
    """Decoding in which each response begins with tokens that are given. What follows is drawn, every token with the
    numbers of its position, as if the given ones had been drawn as well."""

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        slots: int,
        given: Sequence[Sequence[int]],
        recorder: Recorder | None = None,
        draws: Draws | None = None,
    ):
        """given: the first tokens of each response, none of them a stop token but the last of a whole response."""
        super().__init__(model, requests, sampling, stop_token_ids, slots, None, recorder, draws)
        self._given = torch.full((len(requests), sampling.max_tokens), -1, device=self._device)
        for row, tokens in zip(self._given, given, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)

    def _draw(self, logprobs: torch.Tensor, slots: Sequence[int], counts: torch.Tensor) -> torch.Tensor:
        given = self._given[[self._request_of[slot] for slot in slots], counts]
        return torch.where(given >= 0, given, super()._draw(logprobs, slots, counts))


@torch.inference_mode()
def forced_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float
) -> list[float]:
    """What the engine says of a response that is given: the log-probs that it has where it samples these tokens."""
    return _forced(model, prompt_ids, token_ids, temperature).logprobs


@torch.inference_mode()
def forced_routing(model: PreTrainedModel, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> NDArray[Any]:
    """The experts that the engine takes for a response that is given: as `Completion.routing`."""
    with recorded(model) as recorder:
        found = _forced(model, prompt_ids, token_ids, 1.0, recorder).routing
    assert found is not None
    return found


def _forced(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    temperature: float,
    recorder: Recorder | None = None,
) -> Completion:
    sampling = Sampling(temperature=temperature, max_tokens=len(token_ids))
    requests = [Request(tuple(prompt_ids), seed=0)]
    return GuidedDecoding(model, requests, sampling, (), slots=1, given=[token_ids], recorder=recorder).run()[0]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
