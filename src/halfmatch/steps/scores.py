"""Score the tokens of rollouts with the training policy in one precision: log π beside log μ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from halfmatch import artifacts, models
from halfmatch.config import Config
from halfmatch.paths import Paths
from halfmatch.precision.casting import cast_model
from halfmatch.precision.emulation import is_emulated
from halfmatch.precision.monitors import audit_matmuls
from halfmatch.progress import Progress
from halfmatch.rl.scoring import response_logprobs
from halfmatch.steps import provenance


def run(config: Config, *, model: str, problems: str, engine: str, rollout: str, train: str) -> None:
    """Write `scores` for one table of `rollouts`, a row group at a time."""
    torch.set_num_threads(1)
    paths, precision, settings = Paths(Path(config.output)), config.precisions[train], config.mismatch
    names = {"model": model, "problems": problems, "engine": engine, "rollout": rollout}
    rollouts, folder = paths.of("rollouts", **names), paths.of("model", model=model)

    policy = models.load(folder, torch.float32).to(config.engine.device)
    cast_model(policy, precision.compute, precision.fp32_modules, precision.emulate)
    first = artifacts.read(rollouts, "completions", ["prompt_ids"]).slice(0, 1).to_pylist()
    for row in first:
        audit_matmuls(policy, precision, torch.tensor([row["prompt_ids"]], device=policy.device))
    source: dict[str, Any] = {
        **provenance(config, "scores", inputs={"rollouts": rollouts, "model": folder}, **names, train=train),
        "dtype": precision.compute,
        "emulated": is_emulated(precision.compute, precision.emulate, config.engine.device),
    }
    total = artifacts.open_table(rollouts, "completions").metadata.num_rows
    with (
        Progress(f"scores {model} {problems} {engine}-{rollout} in {train}", total, "responses") as progress,
        artifacts.Writer(paths.of("scores", **names, train=train), "scores", source) as out,
    ):
        for group in artifacts.row_groups(rollouts, "completions"):
            rows = group.to_pylist()
            scored = response_logprobs(
                policy,
                [row["prompt_ids"] for row in rows],
                [row["token_ids"] for row in rows],
                temperature=settings.sampling.temperature,
                micro_batch_tokens=settings.micro_batch_tokens,
                progress=progress,
            )
            out.write(
                {
                    "problem_id": row["problem_id"],
                    "sample": row["sample"],
                    "token_ids": row["token_ids"],
                    "logp_rollout": row["logprobs"],
                    "logp_train": logp,
                }
                for row, logp in zip(rows, scored, strict=True)
            )
