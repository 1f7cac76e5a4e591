"""Checkpoints of a training run: everything that its next iteration depends on, in a folder that is whole or not there.

Tensors are safetensors, written by torch's distributed checkpoint, each rank its own shards; any number of ranks reads
them again. The rest is JSON. Nothing in a checkpoint can run code.

The tensors are copied when `save` is called and written while the training goes on.
"""

from __future__ import annotations

import fcntl
import json
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from halfmatch.errors import UserError
from halfmatch.paths import iteration_name, iterations_of
from halfmatch.rl.kept_weights import KeptWeights, sync
from halfmatch.rl.ranks import ALONE, Ranks

STATE = "state.json"
# That one process alone writes is what was asked for.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Checkpoint:
    """One that was found. `read_tensors` fills tensors that are laid out as this run has them."""

    path: Path
    iterations: int
    state: Mapping[str, Any]

    def read_tensors(self, tensors: Mapping[str, torch.Tensor], *, alone: bool = True) -> None:
        """Fill whole or sharded tensors, in place; UserError where the checkpoint does not hold them, or where it holds
        others and these are to be `alone`."""
        stored = self._stored()
        if differing := sorted(stored ^ tensors.keys() if alone else tensors.keys() - stored):
            raise UserError(
                f"{self.path}: does not hold the tensors of this run: {', '.join(differing[:5])}"
                f"{' and others' if len(differing) > 5 else ''}; remove it to start afresh"
            )
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(self.path)), no_dist=not dist.is_initialized())

    def _stored(self) -> set[str]:
        names: set[str] = set()
        for file in self.path.glob("*.safetensors"):
            try:
                with safe_open(file, framework="pt") as opened:
                    names |= set(opened.keys())
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{file}: is damaged ({error}); remove {self.path} to go on from the one before it"
                ) from None
        return names


class Checkpoints:
    """The checkpoints of one run, in a folder of its own, which all ranks share.

    `course` says what the run's course depends on: a digest of its settings, of its code, and so on, by what they are
    of. What an unfinished run of another course has left is refused: going on from it would mix two runs, and removing
    it is not ours to decide. What a finished run has left is replaced. `kept`: weights that the run leaves along its
    way; a checkpoint that comes after some that are not there is of another course.
    """

    def __init__(
        self,
        folder: Path,
        *,
        course: Mapping[str, str],
        keep: int,
        ranks: Ranks = ALONE,
        kept: KeptWeights | None = None,
    ):
        self.folder = folder
        self.kept = kept
        self.course = dict(course)
        self.keep = keep
        self.ranks = ranks
        # Of its own, as it is used by a thread beside the training.
        self._group = dist.new_group(backend="gloo") if ranks.size > 1 else None
        self._written: Future[None] | None = None

    def save(
        self, iterations: int, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, finished: bool = False
    ) -> None:
        """Begin to write the state after `iterations` iterations; then all but the last `keep` up to it go.

        `state`: plain values, the same on every rank. Waits for the write before it, and where the run is `finished`
        for this one.
        """
        self.wait()
        path = self._path(iterations)
        part = path.with_name(f".{path.name}.part")
        if self.ranks.first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            content = {"course": self.course, "finished": finished, "state": state}
            (part / STATE).write_text(json.dumps(content), encoding="utf-8")
        self.ranks.wait()
        (part / _random_file(self.ranks.rank)).write_text(json.dumps(random_state()), encoding="utf-8")
        self.ranks.wait()
        writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
        written = async_save(
            dict(tensors), storage_writer=writer, process_group=self._group, no_dist=self.ranks.size == 1
        )
        assert isinstance(written, Future)
        self._written = Future()
        written.add_done_callback(lambda done: self._put_in_place(done, part, path))
        if finished:
            self.wait()

    def wait(self) -> None:
        """Until what was begun is written."""
        if self._written is not None:
            self._written.result()
            self._written = None
        self.ranks.wait()

    def close(self) -> None:
        """Let the thread that writes end, where the run does not go on."""
        if self._written is not None:
            self._written.exception()

    def find(self, iterations: int) -> Checkpoint | None:
        """The latest one, of at most `iterations` iterations; None where the run starts afresh.

        Restores the random number generators of torch, NumPy and Python, and removes what a killed write has left.
        """
        if self.ranks.first:
            for part in list(self.folder.rglob(".iteration-*.part")):
                shutil.rmtree(part)
        self.ranks.wait()
        found = self._latest(iterations)
        if found is None and self.kept and self.ranks.first:
            self.kept.remove()
        return found

    def _latest(self, iterations: int) -> Checkpoint | None:
        for path in reversed(self._paths()):
            content, done = _read(path), iterations_of(path)
            course = content["course"]
            differing = [
                name for name in sorted(course.keys() | self.course) if course.get(name) != self.course.get(name)
            ]
            if self.kept and done <= iterations and not self.kept.are_whole(done):
                differing.append("weights kept (training.keep_weights_every)")
            if differing:
                self._replace(path, differing, finished=content["finished"])
                return None
            if done <= iterations:
                # A rank that the run had not when this was written goes on from the first one's random numbers.
                own = path / _random_file(self.ranks.rank)
                restore_random_state(_read_json(own if own.exists() else path / _random_file(0)))
                return Checkpoint(path, done, content["state"])
        return None

    @contextmanager
    def sole_user(self) -> Iterator[None]:
        """Keep other processes from the same run: each would remove what the other writes. Ends with the process."""
        if not self.ranks.first:
            yield
            return
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
        """The newest checkpoint, for messages; waits for the one that is being written."""
        self.close()
        paths = self._paths()
        return paths[-1] if paths else None

    def _put_in_place(self, done: Future[Any], part: Path, path: Path) -> None:
        """Called by the thread that wrote, when every rank has written."""
        assert self._written is not None
        try:
            done.result()
            if self.ranks.first:
                for file in part.glob("*.json"):
                    sync(file)
                sync(part)
                shutil.rmtree(path, ignore_errors=True)
                part.rename(path)
                sync(self.folder)
                for old in [old for old in self._paths() if old <= path][: -self.keep]:
                    shutil.rmtree(old)
        except BaseException as error:
            self._written.set_exception(error)
        else:
            self._written.set_result(None)

    def _replace(self, path: Path, differing: Sequence[str], *, finished: bool) -> None:
        """Remove what a finished run of another course has left; refuse to where it is unfinished."""
        if not finished:
            raise UserError(
                f"{path}: the checkpoint of an unfinished run with other {', '.join(differing)}. Restore what it was "
                f"run with to go on from it, or remove {self.folder} to start afresh"
            )
        self.ranks.wait()  # until all have read what the first one removes
        if self.ranks.first:
            for old in self._paths():
                shutil.rmtree(old)
        self.ranks.wait()

    def _path(self, iterations: int) -> Path:
        return self.folder / iteration_name(iterations)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("iteration-*"))


def _read(path: Path) -> dict[str, Any]:
    """What `save` wrote as JSON; UserError where it is something else."""
    content = _read_json(path / STATE)
    if not isinstance(content, dict) or not content.keys() >= {"course", "finished", "state"}:
        raise UserError(f"{path}: is no checkpoint of halfmatch; remove it to go on from the one before it")
    return content


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file.parent}: is no whole checkpoint ({error}); remove it to go on from the one before it"
        ) from None


def _random_file(rank: int) -> str:
    return f"random-{rank}.json"


def random_state() -> dict[str, Any]:
    """The state of every process-wide random number generator, as plain values."""
    numpy = np.random.get_state(legacy=False)
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None,
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
    numpy, python = state["numpy"], state["python"]
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": np.array(numpy["state"]["key"], dtype=np.uint32)}})
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
