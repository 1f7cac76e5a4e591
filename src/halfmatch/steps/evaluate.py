"""Score one set of weights on one benchmark, in one engine and rollout dtype."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from halfmatch import artifacts, evaluation, jobs
from halfmatch.config import Config
from halfmatch.errors import UserError
from halfmatch.paths import Paths
from halfmatch.responses import KeptResponses
from halfmatch.sampling import Sampler
from halfmatch.steps import course, provenance


def run(config: Config, *, run: str, problems: str, engine: str, rollout: str) -> None:
    settings = config.evaluation
    if settings is None:
        raise UserError("the configuration has no section evaluation, so there is nothing to evaluate")
    paths = Paths(Path(config.output))
    names = {"run": run, "problems": problems, "engine": engine, "rollout": rollout}
    untrained = paths.of("model", model=config.solvability.model)
    weights = untrained if run == jobs.INITIAL else paths.of("trained", run=run)
    table = paths.of("problems", problems=problems)

    source = provenance(config, "evaluate", inputs={"problems": table, "model": weights}, **names)
    kept = KeptResponses(
        paths.of("responses", job="_".join(["evaluate", *names.values()])),
        course(config, "evaluate", source, without=["evaluation.samples", "evaluation.k"], **names),
    )
    with Sampler(config, weights, engine=engine, precision=rollout, sampling=settings.sampling) as sampler:
        source |= sampler.provenance
        responses = sampler.responses(
            artifacts.read(table, "problems"),
            settings.samples,
            kept=kept,
            purpose="evaluation",
            label=f"evaluate {run} {problems} {engine}-{rollout}",
        )
        counts, tallies = [], []
        with artifacts.Writer(paths.of("evaluated_responses", **names), "completions", source) as out:
            for _, group in itertools.groupby(responses, key=lambda response: response.problem_id):
                answered = list(group)
                out.write(response.row() for response in answered)
                row, tally = evaluation.counts(answered)
                counts.append(row)
                tallies.append(tally)
    scores = evaluation.scores(
        tallies,
        settings.k,
        bootstrap_samples=config.report.bootstrap_samples,
        seed=config.seed,
        confidence=config.report.confidence,
    )
    artifacts.write(paths.of("evaluation", **names), "evaluation", counts, source)
    artifacts.write_json(paths.of("evaluation_metrics", **names), scores, source)
    average = scores["metrics"]["avg"]
    print(
        f"{run} on {problems}: avg@{settings.samples} {average['value']:.3f} "
        f"({average['low']:.3f} to {average['high']:.3f})",
        file=sys.stderr,
    )
