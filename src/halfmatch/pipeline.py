"""What the Snakefile asks of the package: the configuration, and paths, parameters and code of each step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from halfmatch import jobs
from halfmatch.artifacts import atomic
from halfmatch.code_files import checksums
from halfmatch.config import Config
from halfmatch.config_files import load, to_yaml
from halfmatch.errors import UserError
from halfmatch.paths import Paths
from halfmatch.steps import STEPS, parameter_keys, values_at

DEFAULT_CONFIG = Path("config/config.yaml")

# What each step's jobs leave behind; a rule has more outputs where a step writes more.
_RESULT: Mapping[str, str] = {
    "problems": "problems",
    "model": "model",
    "solvability": "shard",
    "perfectible": "perfectible",
    "rollouts": "rollouts",
    "scores": "scores",
    "mismatch": "mismatch",
    "fidelity": "fidelity",
    "origin": "origin",
    "train": "trained",
    "evaluate": "evaluation_metrics",
    "validate": "validation_metrics",
    "report": "report",
}


@dataclass(frozen=True)
class Pipeline:
    """One configuration's workflow. `file`: the configuration as the jobs read it, whole, and fixed when they start."""

    config: Config
    sources: tuple[Path, ...]

    @classmethod
    def read(cls, files: Sequence[Path], command_line: Mapping[str, Any]) -> Pipeline:
        """The configuration of Snakemake's --configfile, or of config/config.yaml; UserError where it is not valid."""
        if command_line:
            raise UserError(
                f"--config {' '.join(command_line)}: values given there become text; write them to a file and add it "
                "with --configfile, after the first"
            )
        sources = tuple(_below_here(Path(file)) for file in files) or (DEFAULT_CONFIG,)
        return cls(load(sources), sources)

    @property
    def paths(self) -> Paths:
        return Paths(Path(self.config.output))

    @property
    def file(self) -> str:
        return str(self.paths.root / "config.yaml")

    def write_files(self) -> None:
        """Write what jobs read beside artefacts: the configuration, and the checksums of the code of each step."""
        _write(Path(self.file), to_yaml(self.config))
        for step in STEPS:
            _write(Path(self.code(step)), checksums(step))

    def pattern(self, artefact: str) -> str:
        """The path of an artefact, with its {wildcards} left in."""
        return self.paths.pattern(artefact)

    def log(self, step: str, names: str = "") -> str:
        """Where a job's messages go."""
        return f"{self.paths.root}/logs/{step}/{names or step}.log"

    def benchmark(self, step: str, names: str = "") -> str:
        """Where Snakemake notes a job's time and memory."""
        return f"{self.paths.root}/benchmarks/{step}/{names or step}.tsv"

    def code(self, step: str) -> str:
        """The file that changes with the source files that a step runs."""
        return str(self.paths.of("code", step=step))

    def parameters(self, step: str) -> Callable[[Any], str]:
        """What of the configuration a job depends on, as a function of its wildcards.

        Of a step's thousands of jobs few depend on something of their own, so the text of each such slice is made once.
        """
        values = self.config.model_dump(mode="json")

        @cache
        def text(keys: tuple[tuple[str, ...], ...]) -> str:
            return json.dumps(values_at(values, keys), ensure_ascii=False)

        return lambda wildcards: text(parameter_keys(self.config, step, **dict(wildcards)))

    def results(self, step: str, artefact: str | None = None) -> list[str]:
        """The files of all jobs of a step."""
        return [str(self.paths.of(artefact or _RESULT[step], **names)) for names in jobs.jobs(self.config, step)]

    def benchmarks(self) -> list[str]:
        """The problem sets that weights are evaluated on."""
        evaluation = self.config.evaluation
        return [str(self.paths.of("problems", problems=name)) for name in evaluation.benchmarks] if evaluation else []

    def source_file(self, kind: str, name: str) -> list[str]:
        """The local file or folder that a problem set or model is read from, if it is: an input like any other."""
        source = self.config.problems[name] if kind == "problems" else self.config.models[name]
        return [source.path] if source.source in ("file", "folder", "gguf") and source.path else []

    def start(self, model: str) -> list[str]:
        """The model folder that a bootstrapped model continues from, if it does."""
        start = jobs.start_of(self.config, model)
        return [str(self.paths.of("model", model=start))] if start else []

    def weights(self, run: str) -> str:
        """The model folder of a run: what it trained, or what all runs start from."""
        if run == jobs.INITIAL:
            return str(self.paths.of("model", model=self.config.solvability.model))
        return str(self.paths.of("trained", run=run))

    def recorded(self) -> list[str]:
        """What `record` hands to DVC: the report, of the configuration that dvc.yaml versions."""
        if self.sources != (DEFAULT_CONFIG,):
            raise UserError(
                f"dvc.yaml versions the results of {DEFAULT_CONFIG}; to record another configuration write it there "
                "(halfmatch config --config FILE) and renew dvc.yaml (halfmatch config --as stages)"
            )
        return self.results("report")

    def gpus(self) -> int:
        """GPUs that a job with a model needs."""
        engine = self.config.engine
        return engine.tensor_parallel * engine.data_parallel if engine.device == "cuda" else 0

    def gpus_to_make(self, model: str) -> int:
        """GPUs that the job of one model needs: none where it is fetched or read, and not trained here."""
        return min(self.gpus(), 1) if self.config.models[model].bootstrap else 0

    @property
    def keeps_weights(self) -> bool:
        """Whether training runs leave their weights along the way."""
        return self.config.training is not None and self.config.training.keep_weights_every is not None

    def training_resources(self) -> dict[str, int | str]:
        """What a training run asks for: GPUs, and where it is spread over nodes, as many on each of them."""
        training, on_gpus = self.config.training, self.config.engine.device == "cuda"
        if training is None or training.nodes == 1:
            return {"gpu": max(self.gpus(), training.ranks if training and on_gpus else 0)}
        on_each = {"gres": f"gpu:{training.ranks // training.nodes}"} if on_gpus else {}
        launch = f"srun --nodes={training.nodes} --ntasks={training.nodes} --ntasks-per-node=1 --cpu-bind=none"
        return {"nodes": training.nodes, "tasks": training.nodes, "mpi": launch, **on_each}

    @property
    def training_command(self) -> str:
        """How `halfmatch train` is started: here, or on every node, by what the scheduler has for that."""
        spread = self.config.training is not None and self.config.training.nodes > 1
        return "{resources.mpi} halfmatch train" if spread else "halfmatch train"


def _write(path: Path, text: str) -> None:
    """Write a file that is not there or differs; one that says the same keeps its time."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        with atomic(path, "w") as file:
            file.write(text)


def _below_here(path: Path) -> Path:
    """The path relative to the working directory, where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path
