"""The processes of one training run (torchrun's ranks): which one this is, and what they tell each other.

Every rank runs the same program on the same numbers, apart from the rows that it samples, grades and computes; what the
ranks tell each other makes the rest equal again. One process alone needs no process group, and asks for none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from halfmatch.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run. `local`: its number among the `local_size` on this machine, and the number
    of its GPU."""

    rank: int = 0
    size: int = 1
    local: int = 0
    local_size: int = 1
    mesh: DeviceMesh | None = None

    @property
    def first(self) -> bool:
        """Whether this is the one that writes what is written once."""
        return self.rank == 0

    def share(self, items: Sequence[T], together: int = 1) -> Sequence[T]:
        """This rank's part of what all ranks hold: contiguous, and as even as can be. `gather` puts them together.

        `together`: so many ranks, side by side, have one part, as those do that run an engine together.
        """
        group, groups = self.rank // together, self.size // together
        return items[len(items) * group // groups : len(items) * (group + 1) // groups]

    def gather(self, items: Sequence[T]) -> list[T]:
        """The items of all ranks, in the order of the ranks."""
        if self.size == 1:
            return list(items)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, list(items))
        return [item for part in found for item in part]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def together(self, work: Callable[[], T], failure: type[Exception]) -> T:
        """What the work gives on this rank; where it fails on any rank in this way, it fails on all of them."""
        result, error = None, None
        try:
            result = work()
        except failure as raised:
            error = raised
        if failed := [found for found in self.gather([error]) if found]:
            raise error or failed[0]
        return cast(T, result)

    def wait(self) -> None:
        """Until every rank is here."""
        self.gather([self.rank])

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block on one rank of this machine after the other: what it needs of memory is needed once."""
        for turn in range(self.local_size):
            if turn == self.local:
                yield
            self.wait()


ALONE = Ranks()


@contextmanager
def join(expected: int, device: str) -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone; UserError where they are not as many as `expected`."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != expected:
        raise UserError(
            f"{size} processes train this run, and training.ranks is {expected}; start it as `halfmatch train`, which "
            f"starts them, or with torchrun and as many processes in all"
        )
    if size == 1:
        yield ALONE
        return
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "cpu:gloo")
    try:
        # From the environment now: vLLM writes into it.
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        yield Ranks(dist.get_rank(), size, local, local_size, init_device_mesh(device, (size,)))
    finally:
        if dist.is_initialized():  # vLLM takes the process group down with itself
            dist.destroy_process_group()
