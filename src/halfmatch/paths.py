"""Where every artefact lies below the output folder: rules, steps and stages take their paths from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# {step}: a step of the pipeline. {job}: a step and its wildcards. {problems}, {model}: names in the configuration.
# {rollout}, {train}: names of precisions. {run}: Run.name below, or "initial" for the untrained model. {iteration}:
# iteration_name below.
LAYOUT: dict[str, str] = {
    "code": "code/{step}.sha256",
    "problems": "problems/{problems}.parquet",
    "excluded": "problems/{problems}.excluded.parquet",
    "model": "models/{model}",
    "shard": "solvability/shards/{shard}.parquet",
    "perfectible": "solvability/perfectible.parquet",
    "rollouts": "mismatch/{model}/{problems}/{engine}-{rollout}/rollouts.parquet",
    "scores": "mismatch/{model}/{problems}/{engine}-{rollout}/{train}/scores.parquet",
    "mismatch": "mismatch/{model}/{problems}/{engine}-{rollout}/{train}/mismatch.json",
    "mismatch_curves": "mismatch/{model}/{problems}/{engine}-{rollout}/{train}/curves.csv",
    "fidelity": "mismatch/{model}/{problems}/{engine}-{rollout}/{train}/fidelity.json",
    "origin": "mismatch/{model}/{problems}/{engine}-{rollout}/{train}/origin.json",
    "training_log": "train/{run}/log.parquet",
    "training_curves": "train/{run}/log.csv",
    "trained": "train/{run}/model",
    "trained_weights": "trained_weights/{run}",
    "weights_of_iteration": "trained_weights/{run}/{iteration}",
    "checkpoints": "checkpoints/{run}",
    "responses": "checkpoints/responses/{job}",
    "evaluation": "evaluation/{run}/{problems}/{engine}-{rollout}.parquet",
    "evaluated_responses": "evaluation/{run}/{problems}/{engine}-{rollout}/responses.parquet",
    "evaluation_metrics": "evaluation/{run}/{problems}/{engine}-{rollout}.json",
    "validation": "validation/{run}/{engine}-{rollout}.parquet",
    "validation_metrics": "validation/{run}/{engine}-{rollout}.json",
    "report": "report/index.html",
    "headline": "report/headline.json",
    "figures": "report/figures",
}


@dataclass(frozen=True)
class Run:
    """One cell of the training matrix."""

    precision: str
    objective: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.precision}_{self.objective}_seed{self.seed}"

    @classmethod
    def parse(cls, name: str) -> Run:
        """The inverse of `name`; names of precisions and objectives carry no underscore."""
        precision, objective, seed = name.split("_")
        return cls(precision, objective, int(seed.removeprefix("seed")))


def iteration_name(iterations: int) -> str:
    """What is called a folder of a run as it was after so many iterations: a checkpoint, or its weights."""
    return f"iteration-{iterations:08d}"


def iterations_of(path: Path) -> int:
    """The inverse of `iteration_name`."""
    return int(path.name.removeprefix("iteration-"))


@dataclass(frozen=True)
class Paths:
    """Artefacts below one output folder: `Paths(root).of("scores", model="gain16", …)`."""

    root: Path

    def of(self, artefact: str, **names: object) -> Path:
        return self.root / LAYOUT[artefact].format(**names)

    def pattern(self, artefact: str) -> str:
        """The path with its {wildcards} left in, as a rule wants it."""
        return f"{self.root}/{LAYOUT[artefact]}"
