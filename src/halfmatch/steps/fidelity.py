"""Compare the gradient of each objective in one precision with fp32's, at a fixed policy and fixed rollouts."""

from __future__ import annotations

from pathlib import Path

import torch

from halfmatch import artifacts, models
from halfmatch.config import Config
from halfmatch.mismatch import fidelity
from halfmatch.paths import Paths
from halfmatch.precision.casting import cast_model
from halfmatch.progress import Progress
from halfmatch.rl import objectives
from halfmatch.steps import provenance


def run(config: Config, *, model: str, problems: str, engine: str, rollout: str, train: str) -> None:
    torch.set_num_threads(1)
    paths, settings, precision = Paths(Path(config.output)), config.mismatch, config.precisions[train]
    names = {"model": model, "problems": problems, "engine": engine, "rollout": rollout}
    rollouts, folder = paths.of("rollouts", **names), paths.of("model", model=model)
    groups, rewards = fidelity.read_groups(rollouts, config.seed)

    reference = models.load(folder, torch.float32).to(config.engine.device)
    policy = models.load(folder, torch.float32).to(config.engine.device)
    cast_model(policy, precision.compute, precision.fp32_modules, precision.emulate)
    with Progress(f"fidelity {model} {problems} {engine}-{rollout} in {train}", None, "gradients") as progress:
        measured = fidelity.measure(
            policy,
            reference,
            groups,
            {name: objectives.named(name) for name in settings.gradient_fidelity.objectives},
            loss_scaling=precision.loss_scaling,
            max_length=settings.sampling.max_tokens,
            temperature=settings.sampling.temperature,
            micro_batch_tokens=settings.micro_batch_tokens,
            confidence=config.report.confidence,
            progress=progress,
        )
    source = provenance(config, "fidelity", inputs={"rollouts": rollouts, "model": folder}, **names, train=train)
    artifacts.write_json(
        paths.of("fidelity", **names, train=train),
        {**measured, "rewards": rewards},
        {**source, "dtype": precision.compute},
    )
