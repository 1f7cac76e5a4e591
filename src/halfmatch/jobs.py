"""Which jobs a configuration asks for: every cell of every step, by its wildcards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from halfmatch.config import Config, Evaluation
from halfmatch.paths import Run

Job = dict[str, str]

INITIAL = "initial"  # the run that is none: the untrained model
TRAINER = "trainer"  # the engine that is the training engine: it evaluates weights in the precision of their training


def jobs(config: Config, step: str) -> list[Job]:
    """The wildcards of every job of a step."""
    return _JOBS[step](config)


def runs(config: Config) -> list[Run]:
    """The training matrix."""
    training = config.training
    if training is None:
        return []
    return [
        Run(precision, objective, seed)
        for precision in training.precisions
        for objective in training.objectives
        for seed in training.seeds
    ]


def shards(config: Config) -> list[str]:
    """The names of the parts that solvability is split into."""
    return [f"{shard}-of-{config.solvability.shards}" for shard in range(config.solvability.shards)]


def problem_sets(config: Config) -> list[str]:
    """The problem sets that some step reads."""
    benchmarks = config.evaluation.benchmarks if config.evaluation else ()
    return _unique([config.solvability.problems, *config.mismatch.problems, *benchmarks])


def model_names(config: Config) -> list[str]:
    """The models that some step reads, each after the one that it starts from."""
    names: list[str] = []
    for name in [config.solvability.model, *config.mismatch.models]:
        chain = [name]
        while start := start_of(config, chain[-1]):
            chain.append(start)
        names += reversed(chain)
    return _unique(names)


def start_of(config: Config, model: str) -> str | None:
    """The model that a bootstrapped one continues from."""
    bootstrap = config.models[model].bootstrap
    return bootstrap.start if bootstrap else None


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _rollouts(config: Config) -> list[Job]:
    return [
        {"model": model, "problems": problems, "engine": engine, "rollout": precision}
        for model in config.mismatch.models
        for problems in config.mismatch.problems
        for engine in config.mismatch.engines
        for precision in config.mismatch.precisions
    ]


def _scores(config: Config) -> list[Job]:
    """Rollouts of a precision are scored in the same precision, whose two dtypes may differ; and those of the grid in
    all of its precisions."""
    grid = config.mismatch.grid
    return [
        {**job, "train": train}
        for job in _rollouts(config)
        for train in _unique([job["rollout"], *(grid if job["rollout"] in grid else ())])
    ]


def _origin(config: Config) -> list[Job]:
    """What the trainer's own forward pass is compared with is the transformers engine's decoding."""
    if not config.mismatch.origin.enabled:
        return []
    return [job for job in _scores(config) if job["engine"] == "transformers" and job["train"] == job["rollout"]]


def _evaluate(config: Config) -> list[Job]:
    evaluation = config.evaluation
    if evaluation is None:
        return []
    trained_in = config.training.precisions if config.training else (config.solvability.precision,)
    own: dict[str, tuple[str, ...]] = {INITIAL: trained_in, **{run.name: (run.precision,) for run in runs(config)}}
    return [
        {"run": run, "problems": problems, "engine": engine, "rollout": precision}
        for run, precisions in own.items()
        for problems in evaluation.benchmarks
        for engine, precision in _deployments(evaluation, precisions)
    ]


def _validate(config: Config) -> list[Job]:
    """One job a run, engine and precision starts the engine once, for all weights and benchmarks."""
    if config.training is None or config.training.keep_weights_every is None or config.evaluation is None:
        return []
    return [
        {"run": run.name, "engine": engine, "rollout": precision}
        for run in runs(config)
        for engine, precision in _deployments(config.evaluation, (run.precision,))
    ]


def _deployments(evaluation: Evaluation, own: Sequence[str]) -> list[tuple[str, str]]:
    """Engines and the precisions that weights are deployed in: those listed, or else their own; by the trainer always
    that."""
    return [
        (engine, precision)
        for engine in evaluation.engines
        for precision in ((evaluation.precisions or own) if engine != TRAINER else own)
    ]


_JOBS: Mapping[str, Callable[[Config], list[Job]]] = {
    "problems": lambda config: [{"problems": name} for name in problem_sets(config)],
    "model": lambda config: [{"model": name} for name in model_names(config)],
    "solvability": lambda config: [{"shard": shard} for shard in shards(config)],
    "perfectible": lambda config: [{}],
    "rollouts": _rollouts,
    "scores": _scores,
    "mismatch": _scores,
    "fidelity": lambda config: _scores(config) if config.mismatch.gradient_fidelity.enabled else [],
    "origin": _origin,
    "train": lambda config: [{"run": run.name} for run in runs(config)],
    "evaluate": _evaluate,
    "validate": _validate,
    "report": lambda config: [{}],
}
