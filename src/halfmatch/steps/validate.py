"""Score the weights that a run kept along its training on every benchmark, in one engine and rollout dtype.

The engine starts once, on the model that training began with, and gets one set of weights after the other. The requests
are the evaluation's, with the same random numbers whatever the weights: curves have less noise, and a trained model
scores as its evaluation says.
"""

from __future__ import annotations

import itertools
import logging
import sys
from pathlib import Path
from typing import Any

from halfmatch import artifacts, evaluation
from halfmatch.config import Config
from halfmatch.engines import NonFiniteError
from halfmatch.errors import UserError
from halfmatch.evaluation import Tally
from halfmatch.paths import Paths, iterations_of
from halfmatch.responses import KeptResponses
from halfmatch.sampling import Sampler
from halfmatch.steps import course, provenance

logger = logging.getLogger(__name__)

# Say how much there is to do; they change no response.
HOW_MUCH = ("evaluation.benchmarks", "evaluation.samples", "evaluation.k", "training.keep_weights_every")


def run(config: Config, *, run: str, engine: str, rollout: str) -> None:
    """Write the counts of every problem, and the scores by benchmark and iteration."""
    settings = config.evaluation
    if settings is None or config.training is None or config.training.keep_weights_every is None:
        raise UserError("training.keep_weights_every and a section evaluation are needed to validate along a training")
    paths = Paths(Path(config.output))
    names = {"run": run, "engine": engine, "rollout": rollout}
    untrained = paths.of("model", model=config.solvability.model)
    folders = _kept(paths.of("trained_weights", run=run))
    tables = {name: paths.of("problems", problems=name) for name in sorted(settings.benchmarks)}
    inputs = {f"problems-{name}": table for name, table in tables.items()}
    inputs |= {"model": untrained, **{folder.name: folder for folder in folders}}
    source = provenance(config, "validate", inputs=inputs, **names)

    def answered(sampler: Sampler, folder: Path, name: str) -> list[tuple[dict[str, Any], Tally]]:
        """What became of every problem of a benchmark, with the weights of a folder, which the engine has."""
        read = {"problems": source["inputs"][f"problems-{name}"], "model": source["inputs"][folder.name]}
        kept = KeptResponses(
            paths.of("responses", job="_".join(["validate", *names.values(), folder.name, name])),
            course(config, "validate", {**source, "inputs": read}, without=HOW_MUCH, **names),
        )
        responses = sampler.responses(
            artifacts.read(tables[name], "problems"),
            settings.samples,
            kept=kept,
            purpose="evaluation",
            label=f"validate {run} {engine}-{rollout} {folder.name} {name}",
        )
        by_problem = itertools.groupby(responses, key=lambda response: response.problem_id)
        return [evaluation.counts(list(group)) for _, group in by_problem]

    rows: list[dict[str, Any]] = []
    scores: dict[str, dict[str, Any]] = {name: {} for name in tables}
    not_finite: dict[str, str] = {}
    if folders:  # there is none where a monitor ended the run before the first was due
        with Sampler(config, untrained, engine=engine, precision=rollout, sampling=settings.sampling) as sampler:
            source |= sampler.provenance
            for folder in folders:
                iteration = iterations_of(folder)
                try:
                    sampler.load_weights(folder)
                    found = {name: answered(sampler, folder, name) for name in tables}
                except NonFiniteError as error:  # of a training that went wrong: it has no score here, and others have
                    logger.warning("%s after %d iterations: %s", run, iteration, error)
                    not_finite[str(iteration)] = str(error)
                    continue
                for name, counts in found.items():
                    rows += [{"iteration": iteration, "problems": name, **row} for row, _ in counts]
                    scores[name][str(iteration)] = evaluation.scores(
                        [tally for _, tally in counts],
                        settings.k,
                        bootstrap_samples=config.report.bootstrap_samples,
                        seed=config.seed,
                        confidence=config.report.confidence,
                    )
                    average = scores[name][str(iteration)]["metrics"]["avg"]["value"]
                    print(f"{run} on {name} after {iteration} iterations: {average:.3f}", file=sys.stderr)
    artifacts.write(paths.of("validation", **names), "validation", rows, source)
    content = {"scores": scores, "not_finite": not_finite}
    artifacts.write_json(paths.of("validation_metrics", **names), content, source)


def _kept(folder: Path) -> list[Path]:
    """The model folders that a run left along its training, in their order."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there are no weights along this training; run its step train")
    return sorted(folder.glob("iteration-*"))
