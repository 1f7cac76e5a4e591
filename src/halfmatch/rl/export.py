"""A checkpoint of a run, in the middle of its training or at its end, as a model folder that other tools load."""

from __future__ import annotations

from pathlib import Path

import torch

from halfmatch import models
from halfmatch.config import Config
from halfmatch.errors import UserError
from halfmatch.models.folder import staged
from halfmatch.paths import Paths, Run, iteration_name, iterations_of
from halfmatch.rl.checkpoints import Checkpoint
from halfmatch.rl.learner import Learner
from halfmatch.steps.train import save_trained


def export(config: Config, run: str, iteration: int | None, folder: Path) -> Path:
    """Write the float32 weights after some iteration, by default the last that was stored, with tokenizer and
    generation config; returns the checkpoint. However many ranks wrote it, one process reads it."""
    if config.training is None:
        raise UserError("the configuration has no section training, so there is no run to export")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: exists and is not empty; name a new folder")
    paths, cell = Paths(Path(config.output)), Run.parse(run)
    path = _checkpoint(paths.of("checkpoints", run=run), iteration)
    start = paths.of("model", model=config.solvability.model)
    precision = config.precisions[cell.precision]
    lora = config.training.lora
    learner = Learner(models.load(start, torch.float32), config.training, precision, lora=lora, seed=cell.seed)
    tensors = {f"policy.{name}": tensor for name, tensor in learner.tensors().items() if name.startswith("master.")}
    Checkpoint(path, 0, {}).read_tensors(tensors, alone=False)
    learner.masters.round_into_model()
    with staged(folder) as staging:
        save_trained(dict(learner.weights()), start, staging)
    return path


def _checkpoint(folder: Path, iteration: int | None) -> Path:
    stored = sorted(folder.glob("iteration-*"))
    if not stored:
        raise UserError(f"{folder}: no checkpoint is there; train the run first")
    if iteration is None:
        return stored[-1]
    wanted = folder / iteration_name(iteration)
    if wanted not in stored:
        kept = ", ".join(str(iterations_of(path)) for path in stored)
        raise UserError(f"{folder}: no checkpoint of iteration {iteration}; there are those of {kept}")
    return wanted
