"""Checkpoints of a training run: everything that its next iteration depends on, in one file that is whole or not there.

A file holds tensors and plain values only and is read with `weights_only=True`: nothing in it can run code.
"""

from __future__ import annotations

import fcntl
import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfmatch.artifacts import atomic
from halfmatch.errors import UserError


class Checkpoints:
    """The checkpoints of one run, in a folder of its own.

    `course` says what the run's course depends on: a digest of its settings, of its code, and so on, by what they are
    of. What an unfinished run of another course has left is refused: going on from it would mix two runs, and removing
    it is not ours to decide. What a finished run has left is replaced.
    """

    def __init__(self, folder: Path, *, course: Mapping[str, str], keep: int):
        self.folder = folder
        self.course = dict(course)
        self.keep = keep

    def save(self, iterations: int, state: Mapping[str, Any], *, finished: bool = False) -> None:
        """Write the state after `iterations` iterations, then drop all but the last `keep` up to it."""
        content = {"course": self.course, "finished": finished, "state": {**state, "random": random_state()}}
        written = self._path(iterations)
        with atomic(written) as file:
            torch.save(content, file)
        for path in [path for path in self._files() if path <= written][: -self.keep]:
            path.unlink()

    def load(self, iterations: int) -> tuple[int, dict[str, Any]] | None:
        """The latest state, of at most `iterations` iterations, and how many; None where the run starts afresh.

        Restores the random number generators of torch, NumPy and Python, and removes what a killed write has left.
        """
        for part in self.folder.glob(".iteration-*.part"):
            part.unlink()
        for path in reversed(self._files()):
            content = _read(path)
            if content["course"] != self.course:
                self._replace(path, content)
                return None
            if (done := _iterations(path)) <= iterations:
                restore_random_state(content["state"].pop("random"))
                return done, content["state"]
        return None

    @contextmanager
    def sole_user(self) -> Iterator[None]:
        """Keep other processes from the same run: each would remove what the other writes. Ends with the process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.folder}: another process is training this run; wait for it or stop it, or give this one "
                    "another folder with `output` in the configuration"
                ) from None
            yield

    def latest(self) -> Path | None:
        """The newest checkpoint, for messages."""
        files = self._files()
        return files[-1] if files else None

    def _replace(self, path: Path, content: Mapping[str, Any]) -> None:
        if not content["finished"]:
            course = content["course"]
            differing = [
                name for name in sorted(course.keys() | self.course) if course.get(name) != self.course.get(name)
            ]
            raise UserError(
                f"{path}: the checkpoint of an unfinished run with other {', '.join(differing)}. Restore what it was "
                f"run with to go on from it, or remove {self.folder} to start afresh"
            )
        for old in self._files():
            old.unlink()

    def _path(self, iterations: int) -> Path:
        return self.folder / f"iteration-{iterations:08d}.pt"

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("iteration-*.pt"))


def _read(path: Path) -> dict[str, Any]:
    """The content of one file; UserError where it is not what `save` writes."""
    with open(path, "rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(
                f"{path}: is no whole checkpoint, or holds more than tensors and plain values, which is never loaded "
                f"({reason}); remove it to go on from the one before it"
            ) from None
    if not isinstance(content, dict) or not content.keys() >= {"course", "finished", "state"}:
        raise UserError(f"{path}: is no checkpoint of halfmatch; remove it to go on from the one before it")
    return content


def _iterations(path: Path) -> int:
    return int(path.stem.removeprefix("iteration-"))


def random_state() -> dict[str, Any]:
    """The state of every process-wide random number generator."""
    numpy = np.random.get_state(legacy=False)
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    numpy, python = state["numpy"], state["python"]
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": np.array(numpy["state"]["key"], dtype=np.uint32)}})
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
