"""Everything a report is made of, as far as it is there; what the configuration asks for and is not there, by name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from halfmatch import artifacts, jobs
from halfmatch.config import Config
from halfmatch.paths import Paths, Run
from halfmatch.report import scores, training
from halfmatch.report.training import TrainingRun
from halfmatch.statistics import Estimate, t_interval
from halfmatch.steps import STEPS

T = TypeVar("T")

UNKNOWN = Estimate(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Artefact:
    """A file that the report was made from."""

    path: str  # below the output folder
    sha256: str
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class Missing:
    """A file that the configuration asks for and that is not there."""

    path: str  # below the output folder
    step: str
    names: Mapping[str, str]

    @property
    def command(self) -> str:
        """The command that makes it, without its --config."""
        return " ".join(["halfmatch", self.step, *(f"--{key} {value}" for key, value in self.names.items())])


@dataclass(frozen=True)
class Setup:
    """What the mismatch was measured on; precisions are compared within one."""

    model: str
    problems: str
    engine: str


@dataclass(frozen=True)
class MismatchCell:
    """The mismatch of one setup, sampled in one precision and scored in one."""

    setup: Setup
    rollout: str
    train: str
    analysis: Mapping[str, Any]  # as halfmatch.mismatch.offline.analyse gives it
    panels: scores.Panels | None
    fidelity: Mapping[str, Any] | None

    @property
    def precision(self) -> str:
        """That of both sides, where they have the same; else the trainer's."""
        return self.train

    def metric(self, name: str) -> Estimate:
        return estimate(self.analysis["metrics"].get(name))

    @property
    def objectives(self) -> list[str]:
        """Those whose gradient has been compared with fp32's."""
        return list(self.fidelity["objectives"]) if self.fidelity else []

    def cosine(self, objective: str) -> Estimate:
        """Of an objective's gradient with fp32's."""
        known = self.fidelity["objectives"].get(objective) if self.fidelity else None
        return estimate(known and known["cosine"])


@dataclass(frozen=True)
class OriginCell:
    """Where the mismatch of one setup arises in one precision."""

    setup: Setup
    precision: str
    content: Mapping[str, Any]  # as halfmatch.mismatch.origin.measure gives it


@dataclass(frozen=True)
class EvaluationCell:
    """The scores of one set of weights on one benchmark, sampled in one precision."""

    run: str  # Run.name, or "initial"
    problems: str
    engine: str
    precision: str
    metrics: Mapping[str, Any]
    counts: pa.Table | None
    responses: Path | None = None  # the table of them


@dataclass(frozen=True)
class ValidationCell:
    """The scores of the weights along one training, sampled in one precision."""

    run: Run
    engine: str
    precision: str
    metrics: Mapping[str, Any]  # as the step validate writes them


@dataclass(frozen=True)
class Results:
    """All of it."""

    config: Config
    cells: Sequence[MismatchCell]  # sampled and scored in one precision
    crossed: Sequence[MismatchCell]  # the rest of the grid: sampled in one precision and scored in another
    runs: Sequence[TrainingRun]
    evaluations: Sequence[EvaluationCell]
    perfectible: pa.Table | None
    excluded: Mapping[str, pa.Table]  # by problem set
    missing: Sequence[Missing]
    artefacts: Sequence[Artefact]
    origins: Sequence[OriginCell] = ()
    validations: Sequence[ValidationCell] = ()

    @property
    def setups(self) -> list[Setup]:
        """In the order of the configuration."""
        return list(dict.fromkeys(cell.setup for cell in self.cells))

    @property
    def measured_precisions(self) -> list[str]:
        """Those that some mismatch has been measured in, in the order of the configuration."""
        measured = {cell.precision for cell in self.cells}
        return [precision for precision in self.config.mismatch.precisions if precision in measured]

    def cell(self, setup: Setup, precision: str) -> MismatchCell | None:
        return next((cell for cell in self.cells if (cell.setup, cell.precision) == (setup, precision)), None)

    def setup_label(self, setup: Setup) -> str:
        """The model, and of problem set and engine what differs between setups."""
        parts = [setup.model]
        if len({other.problems for other in self.setups}) > 1:
            parts.append(setup.problems)
        if len({other.engine for other in self.setups}) > 1:
            parts.append(setup.engine)
        return ", ".join(parts)

    @property
    def matrix(self) -> list[tuple[str, str]]:
        """Precision and objective of every cell of the training matrix; its seeds are runs."""
        return list(dict.fromkeys((run.precision, run.objective) for run in jobs.runs(self.config)))

    def training_runs(self, precision: str, objective: str) -> list[TrainingRun]:
        """The seeds of one cell of the matrix that have been trained."""
        return [run for run in self.runs if (run.name.precision, run.name.objective) == (precision, objective)]


def collect(config: Config) -> Results:
    """Read what the steps of this configuration have written; UserError for a file that is there but broken."""
    reader = _Reader(config)
    measured = _present(map(reader.mismatch, jobs.jobs(config, "mismatch")))
    return Results(
        config=config,
        cells=[cell for cell in measured if cell.rollout == cell.train],
        crossed=[cell for cell in measured if cell.rollout != cell.train],
        runs=_present(map(reader.run, jobs.runs(config))),
        evaluations=_present(map(reader.evaluation, jobs.jobs(config, "evaluate"))),
        validations=_present(map(reader.validation, jobs.jobs(config, "validate"))),
        perfectible=reader.table("perfectible", "perfectible", {}),
        excluded=reader.excluded(),
        origins=_present(map(reader.origin, jobs.jobs(config, "origin"))),
        missing=reader.missing,
        artefacts=sorted(reader.artefacts, key=lambda artefact: artefact.path),
    )


def estimate(value: Mapping[str, float | None] | None) -> Estimate:
    """An estimate as JSON has it, {value, low, high} with null for NaN."""
    if value is None:
        return UNKNOWN
    return Estimate(*(math.nan if (number := value[key]) is None else number for key in ("value", "low", "high")))


def over_runs(values: Sequence[float], results: Results) -> Estimate:
    """The mean of one number a run, with Student's interval; without one for a single run."""
    return Estimate(math.fsum(values) / len(values), *t_interval(values, results.config.report.confidence))


def _present(items: Iterable[T | None]) -> list[T]:
    return [item for item in items if item is not None]


class _Reader:
    """Reads artefacts and keeps count of what was there and what was not."""

    def __init__(self, config: Config):
        self.config = config
        self.paths = Paths(Path(config.output))
        self.missing: list[Missing] = []
        self.artefacts: list[Artefact] = []

    def find(self, artefact: str, step: str, names: Mapping[str, str]) -> Path | None:
        """The path of an artefact that is there."""
        path = self.paths.of(artefact, **names)
        below = path.relative_to(self.paths.root).as_posix()
        if not path.is_file():
            self.missing.append(Missing(below, step, names))
            return None
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        self.artefacts.append(Artefact(below, sha256, artifacts.provenance(path)))
        return path

    def table(self, artefact: str, step: str, names: Mapping[str, str]) -> pa.Table | None:
        path = self.find(artefact, step, names)
        return artifacts.read(path, artefact) if path else None

    def json(self, artefact: str, step: str, names: Mapping[str, str]) -> dict[str, Any] | None:
        path = self.find(artefact, step, names)
        return artifacts.read_json(path) if path else None

    def mismatch(self, job: jobs.Job) -> MismatchCell | None:
        analysis = self.json("mismatch", "mismatch", job)
        fidelity = self.json("fidelity", "fidelity", job) if self.config.mismatch.gradient_fidelity.enabled else None
        scored = self.find("scores", "scores", job)
        self.find("rollouts", "rollouts", {name: job[name] for name in STEPS["rollouts"].wildcards})
        if analysis is None:
            return None
        panels = scores.gather(scored) if scored and job["rollout"] == job["train"] else None
        setup = Setup(job["model"], job["problems"], job["engine"])
        return MismatchCell(setup, job["rollout"], job["train"], analysis, panels, fidelity)

    def origin(self, job: jobs.Job) -> OriginCell | None:
        content = self.json("origin", "origin", job)
        if content is None:
            return None
        return OriginCell(Setup(job["model"], job["problems"], job["engine"]), job["train"], content)

    def run(self, name: Run) -> TrainingRun | None:
        path = self.find("training_log", "train", {"run": name.name})
        planned = self.config.training.iterations if self.config.training else 0
        return training.read(path, name, planned) if path else None

    def evaluation(self, job: jobs.Job) -> EvaluationCell | None:
        metrics = self.json("evaluation_metrics", "evaluate", job)
        counts = self.table("evaluation", "evaluate", job)
        responses = self.find("evaluated_responses", "evaluate", job)
        if metrics is None:
            return None
        return EvaluationCell(job["run"], job["problems"], job["engine"], job["rollout"], metrics, counts, responses)

    def validation(self, job: jobs.Job) -> ValidationCell | None:
        metrics = self.json("validation_metrics", "validate", job)
        return ValidationCell(Run.parse(job["run"]), job["engine"], job["rollout"], metrics) if metrics else None

    def excluded(self) -> dict[str, pa.Table]:
        tables = {
            name: self.table("excluded", "problems", {"problems": name}) for name in jobs.problem_sets(self.config)
        }
        return {name: table for name, table in tables.items() if table is not None}
