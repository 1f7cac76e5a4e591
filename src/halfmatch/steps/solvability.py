"""Sample one shard of the problems, to learn how often the untrained model solves each."""

from __future__ import annotations

from pathlib import Path

from halfmatch import artifacts
from halfmatch.config import Config
from halfmatch.paths import Paths
from halfmatch.responses import KeptResponses
from halfmatch.sampling import Sampler
from halfmatch.steps import course, provenance


def run(config: Config, *, shard: str) -> None:
    paths, settings = Paths(Path(config.output)), config.solvability
    model = paths.of("model", model=settings.model)
    problems = paths.of("problems", problems=settings.problems)
    first, step = (int(number) for number in shard.split("-of-"))
    mine = artifacts.read(problems, "problems")
    mine = mine.take(list(range(first, mine.num_rows, step)))
    source = provenance(config, "solvability", inputs={"problems": problems, "model": model}, shard=shard)
    kept = KeptResponses(
        paths.of("responses", job=f"solvability_{shard}"),
        course(config, "solvability", source, without=["solvability.samples"], shard=shard),
    )
    with (
        Sampler(
            config, model, engine=config.engine.name, precision=settings.precision, sampling=settings.sampling
        ) as sampler,
        artifacts.Writer(paths.of("shard", shard=shard), "completions", {**source, **sampler.provenance}) as out,
    ):
        for response in sampler.responses(
            mine, settings.samples, kept=kept, purpose="solvability", label=f"solvability {shard}"
        ):
            out.write([response.row()])
