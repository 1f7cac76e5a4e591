"""Pairs of a right and a wrong response to the same problem, for DPO (arXiv 2305.18290)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHOSEN = ("correct",)
REJECTED = ("wrong", "truncated", "unparseable")  # a time-out is no evidence


def preference_pairs(verdicts: Sequence[str], samples: int) -> torch.Tensor:
    """The rows of the chosen and the rejected response of every pair: [P, 2] int64.

    Each `samples` verdicts in a row belong to one problem. Its first right response is paired with its first wrong one,
    the second with the second, and so on: no response is in two pairs, and samples come in no particular order.
    """
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(verdicts), samples):
        rows = range(start, min(start + samples, len(verdicts)))
        chosen = [row for row in rows if verdicts[row] in CHOSEN]
        rejected = [row for row in rows if verdicts[row] in REJECTED]
        pairs += zip(chosen, rejected, strict=False)
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
