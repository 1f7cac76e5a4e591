"""Trace the mismatch of one engine dtype and one trainer dtype to layers and operations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfmatch import artifacts, models
from halfmatch.config import Config
from halfmatch.errors import UserError
from halfmatch.mismatch import origin, routing
from halfmatch.models.routing import is_mixture
from halfmatch.paths import Paths
from halfmatch.precision.casting import cast_model
from halfmatch.progress import Progress
from halfmatch.steps import provenance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from halfmatch.precision import DType, Precision


def run(config: Config, *, model: str, problems: str, engine: str, rollout: str, train: str) -> None:
    if engine != "transformers":
        raise UserError(f"the hidden states of the engine {engine} cannot be seen; trace rollouts of transformers")
    torch.set_num_threads(1)
    paths, settings = Paths(Path(config.output)), config.mismatch
    names = {"model": model, "problems": problems, "engine": engine, "rollout": rollout}
    rollouts, folder = paths.of("rollouts", **names), paths.of("model", model=model)
    responses = list(_responses(rollouts, settings.origin.responses))
    sampled_in, trained_in = config.precisions[rollout], config.precisions[train]
    parts = () if sampled_in.rollout == trained_in.compute == "fp32" else settings.origin.parts
    total = len(responses) * (1 + len(parts))
    with Progress(f"origin {model} {problems} {engine}-{rollout} in {train}", total, "responses") as progress:
        measured = origin.measure(
            origin.Setting(folder, config.engine.device, sampled_in, settings.sampling.temperature),
            origin.Setting(folder, config.engine.device, trained_in, settings.sampling.temperature),
            responses,
            parts,
            bootstrap_samples=config.report.bootstrap_samples,
            seed=config.seed,
            confidence=config.report.confidence,
            progress=progress,
        )
    measured |= _router_agreement(config, folder, responses, rollout=rollout, train=train)
    source = provenance(config, "origin", inputs={"rollouts": rollouts, "model": folder}, **names, train=train)
    artifacts.write_json(paths.of("origin", **names, train=train), measured, source)


def _router_agreement(
    config: Config, folder: Path, responses: list[origin.Response], *, rollout: str, train: str
) -> dict[str, Any]:
    """Of a mixture of experts, whether both sides take the same ones; nothing for other models."""
    if not is_mixture(models.load_config(folder)):
        return {}

    def cast(dtype: DType, precision: Precision) -> PreTrainedModel:
        model = models.load(folder, torch.float32).to(config.engine.device)
        cast_model(model, dtype, precision.fp32_modules, precision.emulate)
        return model

    sampled_in, trained_in = config.precisions[rollout], config.precisions[train]
    found = routing.agreement(
        cast(sampled_in.rollout, sampled_in),
        cast(trained_in.compute, trained_in),
        [response.prompt_ids for response in responses],
        [response.token_ids for response in responses],
        bootstrap_samples=config.report.bootstrap_samples,
        seed=config.seed,
        confidence=config.report.confidence,
    )
    return {"router_agreement": found}


def _responses(rollouts: Path, limit: int) -> Iterator[origin.Response]:
    """The first response to each of the first problems; ids of problems are hashes, so these are any."""
    left = limit
    for group in artifacts.row_groups(rollouts, "completions"):
        for row in group.to_pylist():
            if row["sample"] == 0 and row["token_ids"]:
                yield origin.Response(row["problem_id"], row["prompt_ids"], row["token_ids"], row["logprobs"])
                left -= 1
            if not left:
                return
