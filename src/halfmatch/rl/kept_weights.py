"""The weights of a run along its training: a model folder every so many iterations.

Tools remove the results of a job before they run it again, so these folders lie beside the run's checkpoints. What the
run leaves among its results when it has ended are links to the same files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from halfmatch.models.folder import staged
from halfmatch.paths import iteration_name

# Writes float32 weights, by their names, as a model into a folder that is there.
Write = Callable[[Mapping[str, torch.Tensor], Path], None]


class KeptWeights:
    """Those of one run, below a folder. `every`: so many iterations; None keeps nothing."""

    def __init__(self, folder: Path, every: int | None, write: Write):
        self.folder, self.every, self._write = folder, every, write

    def is_due(self, iterations: int) -> bool:
        """Whether the weights after so many iterations are to be kept."""
        return self.every is not None and iterations % self.every == 0

    def add(self, iterations: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Keep them; when this returns they are on disk, so that no later checkpoint can be without them."""
        path = self.folder / iteration_name(iterations)
        with staged(path) as folder:
            self._write(weights, folder)
            for file in folder.iterdir():
                sync(file)
            sync(folder)
        sync(self.folder)

    def are_whole(self, iterations: int) -> bool:
        """Whether all that the first so many iterations have to leave is here."""
        return all((self.folder / name).is_dir() for name in self._names(iterations))

    def link(self, iterations: int, folder: Path) -> None:
        """Put those of the first so many iterations into a folder of that name, in place of what it was."""
        with staged(folder) as staging:
            for name in self._names(iterations):
                shutil.copytree(self.folder / name, staging / name, copy_function=_link)

    def remove(self) -> None:
        """Remove them all, and what killed writes have left."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _names(self, iterations: int) -> list[str]:
        every = self.every
        return [] if every is None else [iteration_name(done) for done in range(every, iterations + 1, every)]


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(source: str, target: str) -> None:
    """A second name for a file, or a copy where the file system has none. Neither is ever written to in place."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
