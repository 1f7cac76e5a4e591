"""Sequences laid end to end: layers compute no padding, and attention sees every sequence by itself.

All but attention works token by token, so a model that is given [1, N] tokens of B sequences, with the position of each
in its own, needs no padding there. Attention gets `packing` as an option, puts the sequences into rows, [B, T], and its
result back: it costs what it did, and a sequence's numbers do not depend on what lies beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfmatch.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What the names of attention functions that understand packed sequences begin with.
PREFIX = "halfmatch"
# On a CPU attention fills up keys to multiples of this; sequences of as many blocks are computed together.
BLOCK = 64
_KNOWN_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Rows:
    """Where the N tokens of B neighbouring sequences, the longest of T tokens, stand in rows."""

    places: torch.Tensor  # [N] int64: into B·T, row by row
    count: int  # B
    width: int  # T

    @classmethod
    def of(cls, lengths: torch.Tensor) -> Rows:
        """Of sequences of `lengths` tokens, [B] int64."""
        width = int(lengths.max())
        inside = torch.arange(width, device=lengths.device) < lengths[:, None]
        return cls(inside.flatten().nonzero().squeeze(1), len(lengths), width)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, T or more, …] → [1, N, …], on the device of what is given: routing is not moved with its batch."""
        return rows[:, : self.width].flatten(0, 1).index_select(0, self.places.to(rows.device))[None]

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """[1, N, …] → [B, T, …], 0 behind the end of a row."""
        rows = packed.new_zeros(self.count * self.width, *packed.shape[2:])
        return rows.index_copy(0, self.places, packed[0]).unflatten(0, (self.count, self.width))

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Which keys a query sees, [1, 1, T, T]: the last `window` ones; None where these are all before it."""
        if window is None or window >= self.width:
            return None
        seen = torch.ones(self.width, self.width, dtype=torch.bool, device=self.places.device)
        return seen.tril_().triu_(1 - window)[None, None]


@dataclass(frozen=True)
class Packing:
    """How sequences lie end to end."""

    rows: Rows  # of all sequences
    groups: tuple[Rows, ...]  # of neighbours that are about as long, which attention computes together

    @classmethod
    def of(cls, lengths: torch.Tensor) -> Packing:
        """Of sequences of `lengths` tokens, [B] int64. Where they are sorted by length, groups are few."""
        blocks = (lengths + (BLOCK - 1)) // BLOCK
        sizes = [len(list(group)) for _, group in itertools.groupby(blocks.tolist())]
        return cls(Rows.of(lengths), tuple(Rows.of(some) for some in lengths.split(sizes) if some.any()))

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Tokens of sequences in rows, [B, T or more, …], end to end: [1, N, …]."""
        return self.rows.pack(rows)

    def inputs(self, model: PreTrainedModel, input_ids: torch.Tensor) -> dict[str, Any]:
        """What to call a model with, for token ids [B, T or more].

        A model whose attention does not know of packing (in float64, say) finds out by itself from the positions.
        """
        found: dict[str, Any] = {
            "input_ids": self.pack(input_ids),
            "position_ids": (self.rows.places % self.rows.width)[None],
            "use_cache": False,
        }
        config = model.config.get_text_config()
        if not str(config._attn_implementation).startswith(PREFIX):
            return found
        if other := set(getattr(config, "layer_types", None) or ()) - set(_KNOWN_LAYERS):
            raise UserError(
                f"{type(model).__name__} has layers of the kind {', '.join(sorted(other))}, which are not known here"
            )
        # In place of the N × N mask that would be made from the positions. It sees nothing, so none can use it.
        return found | {"attention_mask": self.rows.places.new_zeros(1, 1, 1, 0, dtype=torch.bool), "packing": self}


def of_packed(compute: Callable[..., tuple[torch.Tensor, None]]) -> Callable[..., tuple[torch.Tensor, None]]:
    """An attention function of transformers' (query [B, H, T, D], key, value, mask → [B, T, H, D]) for packed sequences
    too, where all are [1, …, N, …] and it is told of the packing."""

    def attention_of_packed(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packing: Packing | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if packing is None:
            if attention_mask is not None and attention_mask.shape[-1] == 0:
                raise UserError(
                    f"the model does not hand options of its forward pass on to {type(module).__name__}, so sequences "
                    "cannot be packed for it; Llama, Qwen2, Qwen3, Mistral and most others of transformers do"
                )
            return compute(module, query, key, value, attention_mask, *args, **options)
        tokens = [len(group.places) for group in packing.groups]
        results = []
        for group, *parts in zip(
            packing.groups, *(packed.split(tokens, 2) for packed in (query, key, value)), strict=True
        ):
            rows = (group.unpack(part.transpose(1, 2)).transpose(1, 2) for part in parts)
            result, _ = compute(module, *rows, group.mask(options.get("sliding_window")), *args, **options)
            results.append(group.pack(result))
        return torch.cat(results, dim=1), None

    return attention_of_packed
