"""Token sequences as padded tensors, and their split into micro-batches.

Shapes: B sequences, T tokens of the longest prompt + response, R tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from halfmatch.precision.packing import Packing


@dataclass(frozen=True)
class Batch:
    """B prompts with their responses, padded on the right.

    Column t of every [B, R] tensor is the t-th token of the response, wherever the prompt ends. Models compute no
    padding: see `packed`.
    """

    input_ids: torch.Tensor  # [B, T] int64
    prompt_lengths: torch.Tensor  # [B] int64
    response_mask: torch.Tensor  # [B, R] bool
    truncated: torch.Tensor  # [B] bool: no stop token ends the response
    # The experts to take, [B, T − 1, layers, k] int16, where an engine's routing is replayed; none for the last token.
    routing: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of prompt and response, [B] int64."""
        return self.prompt_lengths + self.response_mask.sum(dim=1)

    @property
    def response_ids(self) -> torch.Tensor:
        """The N response tokens, response by response, [N] int64."""
        rows, columns = self._places()
        return self.input_ids[rows, columns]

    def packed(self) -> tuple[Packing, torch.Tensor]:
        """How the sequences, each without its last token, lie end to end; and which of these tokens stands before each
        of the N response tokens, response by response, [N] int64."""
        lengths = self.lengths - 1
        rows, columns = self._places()
        return Packing.of(lengths), (lengths.cumsum(0) - lengths)[rows] + columns - 1

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where in [B, T] the response tokens stand: rows and columns, [N] each."""
        rows, columns = self.response_mask.nonzero(as_tuple=True)
        return rows, self.prompt_lengths[rows] + columns

    def select(self, rows: torch.Tensor) -> Batch:
        """Some rows, without the columns that are padding in all of them."""
        mask, longest = self.response_mask[rows], int(self.lengths[rows].max())
        return Batch(
            input_ids=self.input_ids[rows, :longest],
            prompt_lengths=self.prompt_lengths[rows],
            response_mask=mask[:, : int(mask.sum(dim=1).max())],
            truncated=self.truncated[rows],
            routing=None if self.routing is None else self.routing[rows.cpu(), : longest - 1],
        )

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            self.input_ids.to(device),
            self.prompt_lengths.to(device),
            self.response_mask.to(device),
            self.truncated.to(device),
            self.routing,  # stays on the CPU: micro-batch by micro-batch is enough
        )


def join(batches: Sequence[Batch]) -> Batch:
    """Batches under one another, as one."""
    routing = [batch.routing for batch in batches if batch.routing is not None]
    return Batch(
        stack_padded([batch.input_ids for batch in batches]),
        torch.cat([batch.prompt_lengths for batch in batches]),
        stack_padded([batch.response_mask for batch in batches]),
        torch.cat([batch.truncated for batch in batches]),
        stack_padded(routing) if routing else None,
    )


def stack_padded(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors [B, R, …] under one another, each with zeros in the columns that the widest has more."""
    width = max(tensor.shape[1] for tensor in tensors)
    stacked = tensors[0].new_zeros(sum(map(len, tensors)), width, *tensors[0].shape[2:])
    for place, tensor in zip(stacked.split([len(tensor) for tensor in tensors]), tensors, strict=True):
        place[:, : tensor.shape[1]] = tensor
    return stacked


def response_mask(
    token_ids: Sequence[Sequence[int]], stop_token_ids: Collection[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which response tokens count: the first stop token is in, what follows it is out.

    Returns the mask [B, R] bool, and [B] bool, whether the response was truncated (holds no stop token).
    """
    stops = set(stop_token_ids)
    counts, truncated = [], []
    for row in token_ids:
        end = next((position for position, token in enumerate(row) if token in stops), None)
        counts.append(len(row) if end is None else end + 1)
        truncated.append(end is None)
    columns = torch.arange(max(counts, default=0))
    return columns < torch.tensor(counts, dtype=torch.int64)[:, None], torch.tensor(truncated, dtype=torch.bool)


def collate(
    prompt_ids: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]], stop_token_ids: Collection[int]
) -> Batch:
    """One batch of all sequences, in their order."""
    if len(prompt_ids) != len(token_ids):
        raise ValueError(f"{len(prompt_ids)} prompts for {len(token_ids)} responses")
    if not all(prompt_ids):
        raise ValueError("an empty prompt: nothing would predict the first token of its response")
    mask, truncated = response_mask(token_ids, stop_token_ids)
    rows = [
        [*prompt, *response[:count]]
        for prompt, response, count in zip(prompt_ids, token_ids, mask.sum(1).tolist(), strict=True)
    ]
    input_ids = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int64)
    for row, tokens in zip(input_ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    return Batch(input_ids, torch.tensor([len(prompt) for prompt in prompt_ids], dtype=torch.int64), mask, truncated)


def pad(rows: Sequence[Sequence[float]], mask: torch.Tensor) -> torch.Tensor:
    """Per-token numbers of each response as [B, R] float32, 0 where the mask is out."""
    padded = torch.zeros(mask.shape, dtype=torch.float32)
    for row, values, count in zip(padded, rows, mask.sum(dim=1).tolist(), strict=True):
        row[:count] = torch.tensor(values[:count], dtype=torch.float32)
    return padded


def pad_routing(rows: Sequence[NDArray[Any]], length: int) -> torch.Tensor:
    """Experts of each sequence's positions, [positions, layers, k], as [B, length, layers, k]; 0 behind the end."""
    padded = torch.zeros(len(rows), length, *rows[0].shape[1:], dtype=torch.int16)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = torch.from_numpy(values)
    return padded


def micro_batches(lengths: Sequence[int], budget: int) -> list[torch.Tensor]:
    """Split rows into groups of at most `budget` tokens: row indices, [rows of the group] int64.

    Rows of similar length go together, longest first, ties in their order; a row longer than the budget goes alone. The
    split is a function of the lengths alone, so two passes over the same rows meet the same shapes.
    """
    groups: list[list[int]] = []
    left = 0  # of the last group's budget
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not groups or lengths[row] > left:
            groups.append([])
            left = budget
        groups[-1].append(row)
        left -= lengths[row]
    return [torch.tensor(group, dtype=torch.int64) for group in groups]


def rank_shares(lengths: Sequence[int], budget: int, ranks: int) -> list[list[torch.Tensor]]:
    """Split rows over ranks, and each rank's into micro-batches: for every rank as many, as ranks compute in step.

    The longest row that is left goes to the rank with the fewest tokens. A rank that has too few micro-batches splits
    its largest; one that has nothing left to split gets empty ones. On one rank this is `micro_batches`.
    """
    rows: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        rank = tokens.index(min(tokens))
        rows[rank].append(row)
        tokens[rank] += lengths[row]
    shares = [
        [torch.tensor(sorted(own))[group] for group in micro_batches([lengths[row] for row in sorted(own)], budget)]
        for own in rows
    ]
    count = max(map(len, shares), default=0)
    for share in shares:
        while len(share) < count:
            largest = max(share, key=len, default=torch.tensor([], dtype=torch.int64))
            if len(largest) < 2:
                share.append(largest[:0])
                continue
            place = next(place for place, group in enumerate(share) if group is largest)
            share[place : place + 1] = largest.chunk(2)
    return shares
