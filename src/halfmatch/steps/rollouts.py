"""Sample responses in one rollout dtype: what μ says of its own tokens."""

from __future__ import annotations

from pathlib import Path

from halfmatch import artifacts
from halfmatch.config import Config
from halfmatch.paths import Paths
from halfmatch.responses import KeptResponses
from halfmatch.sampling import Sampler
from halfmatch.steps import course, provenance


def run(config: Config, *, model: str, problems: str, engine: str, rollout: str) -> None:
    paths, settings = Paths(Path(config.output)), config.mismatch
    names = {"model": model, "problems": problems, "engine": engine, "rollout": rollout}
    folder = paths.of("model", model=model)
    table = paths.of("problems", problems=problems)
    job = "_".join(["rollouts", *names.values()])
    source = provenance(config, "rollouts", inputs={"problems": table, "model": folder}, **names)
    kept = KeptResponses(
        paths.of("responses", job=job), course(config, "rollouts", source, without=["mismatch.samples"], **names)
    )
    with (
        Sampler(config, folder, engine=engine, precision=rollout, sampling=settings.sampling) as sampler,
        artifacts.Writer(paths.of("rollouts", **names), "completions", {**source, **sampler.provenance}) as out,
    ):
        for response in sampler.responses(
            artifacts.read(table, "problems"),
            settings.samples,
            kept=kept,
            purpose="rollouts",
            label=f"rollouts {model} {problems} {engine}-{rollout}",
        ):
            out.write([response.row()])
