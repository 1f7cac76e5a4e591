"""Key-value caches of the `transformers` engine: one prompt's, and that of the slots which are decoded together."""

from __future__ import annotations

import torch
from transformers import Cache

FIRST_LENGTH = 256  # positions that a slot cache starts with, at most; it doubles when sequences outgrow it


class PromptCache(Cache):
    """Keys and values of one prompt, [1, G, P, D] a layer: what its prefill leaves for the slots of its samples."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.entries: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx != len(self.entries):
            raise ValueError(f"layer {layer_idx} fills the cache after {len(self.entries)} layers")
        self.entries.append((key_states, value_states))
        return key_states, value_states


class SlotCache(Cache):
    """Keys and values [slots, G, L, D] a layer; each slot's sequence starts at position 0 and is padded on the right.

    `dtype` may be fp32 for a 16-bit model: the values are the 16-bit ones, upcast once and not at every step.
    """

    def __init__(self, prompt: PromptCache, slots: int, longest: int, dtype: torch.dtype | None = None):
        """For prompts like `prompt` in all but length, and sequences of up to `longest` positions."""
        super().__init__(layers=[])
        self._longest = longest
        length = min(longest, FIRST_LENGTH)
        self._entries = [
            tuple(states.new_zeros((slots, states.shape[1], length, states.shape[3]), dtype=dtype) for states in entry)
            for entry in prompt.entries
        ]
        self._positions = self._rows = torch.empty(0, dtype=torch.int64)
        self._seen = 0

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` positions."""
        allocated = self._entries[0][0].shape[2]
        if length > allocated:
            more = min(self._longest, max(length, 2 * allocated)) - allocated
            self._entries = [
                tuple(torch.nn.functional.pad(states, (0, 0, 0, more)) for states in entry) for entry in self._entries
            ]

    def install(self, slot: int, prompt: PromptCache) -> None:
        """Start a slot's sequence with a prompt; what an earlier sequence left behind it stays masked."""
        length = prompt.entries[0][0].shape[2]
        self.reserve(length)
        for entry, prefix in zip(self._entries, prompt.entries, strict=True):
            for states, filled in zip(entry, prefix, strict=True):
                states[slot, :, :length] = filled[0]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for entry in self._entries:
            for states in entry:
                states[target, :, :length] = states[source, :, :length]

    def begin_step(self, positions: torch.Tensor, seen: int) -> None:
        """The next `update` of each layer writes slot r at positions[r], and gives the first `seen` positions back."""
        self.reserve(seen)
        self._positions, self._rows, self._seen = positions, torch.arange(len(positions), device=positions.device), seen

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(self._rows)
        keys, values = self._entries[layer_idx]
        keys[self._rows, :, self._positions] = key_states[:, :, 0].to(keys.dtype)
        values[self._rows, :, self._positions] = value_states[:, :, 0].to(values.dtype)
        return keys[:rows, :, : self._seen], values[:rows, :, : self._seen]
