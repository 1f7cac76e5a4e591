"""The steps of the pipeline, and what each depends on.

A step is a module here with `run(config, **wildcards)`: it reads artefacts, calls the package, and writes artefacts.
This table says what a step may use of the configuration. The rules and the DVC stages take their `params` from it, and
every artefact the digest in its provenance, so a change of anything else reruns nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from halfmatch import __version__
from halfmatch.code_files import checksums
from halfmatch.config import Config
from halfmatch.paths import Run

_MODEL_PACKAGES = ("torch", "transformers")
_GRADING_PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy")
_PROMPT = ("prompt", "grading.rule", "grading.timeout_s")
_ENGINE = ("engine.slots", "engine.device", "engine.tensor_parallel", "engine.draws")
_INTERVALS = ("report.confidence", "report.bootstrap_samples")
# Keys that change nothing while they are null: results without them are those of before there were such keys.
_WHERE_SET = ("engine.draws", "training.keep_weights_every")
_MEASURED = ("model", "problems", "engine", "rollout", "train")


@dataclass(frozen=True)
class Step:
    """What a step depends on.

    wildcards: what one job of it is of, as `run`'s arguments and as the command line's options.
    parameters: keys of the configuration; a {name} is filled from the wildcards, or from what they imply.
    packages: the distributions whose version can change its result.
    """

    wildcards: tuple[str, ...]
    parameters: tuple[str, ...]
    packages: tuple[str, ...] = ()


STEPS: Mapping[str, Step] = {
    "problems": Step(("problems",), ("problems.{problems}", "seed", "grading.rule"), _GRADING_PACKAGES),
    "model": Step(("model",), ("models.{model}", "seed", "engine.device"), _MODEL_PACKAGES),
    "solvability": Step(
        ("shard",),
        (
            "seed",
            *_PROMPT,
            "engine.name",
            *_ENGINE,
            "precisions.{solvability_precision}",
            "solvability.samples",
            "solvability.shards",
            "solvability.sampling",
        ),
        (*_MODEL_PACKAGES, *_GRADING_PACKAGES),
    ),
    "perfectible": Step((), ("solvability.low", "solvability.high", "report.confidence")),
    "rollouts": Step(
        ("model", "problems", "engine", "rollout"),
        ("seed", *_PROMPT, *_ENGINE, "precisions.{rollout}", "mismatch.samples", "mismatch.sampling"),
        (*_MODEL_PACKAGES, *_GRADING_PACKAGES),
    ),
    "scores": Step(
        _MEASURED,
        ("engine.device", "precisions.{train}", "mismatch.sampling.temperature", "mismatch.micro_batch_tokens"),
        _MODEL_PACKAGES,
    ),
    "mismatch": Step(_MEASURED, ("seed", *_INTERVALS)),
    "fidelity": Step(
        _MEASURED,
        (
            "seed",
            "engine.device",
            "precisions.{train}",
            "mismatch.sampling",
            "mismatch.micro_batch_tokens",
            "mismatch.gradient_fidelity.objectives",
            "report.confidence",
        ),
        _MODEL_PACKAGES,
    ),
    "origin": Step(
        _MEASURED,
        (
            "seed",
            "engine.device",
            "precisions.{rollout}",
            "precisions.{train}",
            "mismatch.sampling",
            "mismatch.origin.responses",
            "mismatch.origin.parts",
            *_INTERVALS,
        ),
        _MODEL_PACKAGES,
    ),
    "train": Step(
        ("run",),
        (
            *_PROMPT,
            "engine.name",
            *_ENGINE,
            "precisions.{precision}",
            "training.iterations",
            "training.prompts_per_iteration",
            "training.samples_per_prompt",
            "training.gradient_steps",
            "training.max_prompt_tokens",
            "training.sampling",
            "training.learning_rate",
            "training.warmup_steps",
            "training.adam_betas",
            "training.adam_eps",
            "training.weight_decay",
            "training.clip_norm",
            "training.micro_batch_tokens",
            "training.activation_checkpointing",
            "training.shard_gradients",
            "training.ranks",
            "training.nodes",
            "training.probe",
            "training.lora",
            "training.router_replay",
            "training.objective_settings.{objective}",
            "training.sampling_rounds",
            "training.critic_learning_rate",
            "training.max_skip_share",
            "training.on_collapse",
            "training.keep_weights_every",
        ),
        (*_MODEL_PACKAGES, *_GRADING_PACKAGES),
    ),
    "evaluate": Step(
        ("run", "problems", "engine", "rollout"),
        (
            "seed",
            *_PROMPT,
            *_ENGINE,
            "precisions.{rollout}",
            "evaluation.samples",
            "evaluation.k",
            "evaluation.sampling",
            *_INTERVALS,
        ),
        (*_MODEL_PACKAGES, *_GRADING_PACKAGES),
    ),
    "validate": Step(
        ("run", "engine", "rollout"),
        (
            "seed",
            *_PROMPT,
            *_ENGINE,
            "precisions.{rollout}",
            "training.keep_weights_every",
            "evaluation.benchmarks",
            "evaluation.samples",
            "evaluation.k",
            "evaluation.sampling",
            *_INTERVALS,
        ),
        (*_MODEL_PACKAGES, *_GRADING_PACKAGES),
    ),
    "report": Step(
        (), ("seed", "mismatch", "training", "evaluation", "precisions", "report"), ("jinja2", "matplotlib", "numpy")
    ),
}


def parameters(config: Config, step: str, **wildcards: str) -> dict[str, Any]:
    """The values of the configuration that one job of a step depends on, by their keys; plain JSON values."""
    return values_at(config.model_dump(mode="json"), parameter_keys(config, step, **wildcards))


def parameter_keys(config: Config, step: str, **wildcards: str) -> tuple[tuple[str, ...], ...]:
    """The keys of those values, in their parts."""
    names = {**wildcards, "solvability_precision": config.solvability.precision}
    if wildcards.get("run", "initial") != "initial":
        run = Run.parse(wildcards["run"])
        names |= {"precision": run.precision, "objective": run.objective}
    return tuple(tuple(part.format(**names) for part in key.split(".")) for key in STEPS[step].parameters)


def values_at(values: Mapping[str, Any], keys: Iterable[tuple[str, ...]]) -> dict[str, Any]:
    """The values at some keys of a configuration as plain values; null where a section on the way is not there."""
    slice_: dict[str, Any] = {}
    for parts in keys:
        key = ".".join(parts)
        value: Any = values
        for part in parts:
            value = value.get(part) if value is not None else None
        if value is not None or key not in _WHERE_SET:
            slice_[key] = value
    return slice_


def digest(value: Any) -> str:
    """A short name for a JSON value: the first 16 hex digits of its SHA-256."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def provenance(
    config: Config, step: str, *, inputs: Mapping[str, Path] | None = None, **wildcards: str
) -> dict[str, Any]:
    """What an artefact says of where it came from: a function of the inputs and the installed versions alone.

    inputs: the artefacts that were read, by a name for each; files by the SHA-256 of their bytes, model folders by
    their digest.
    """
    return {
        "step": step,
        "names": wildcards,
        "config": digest(parameters(config, step, **wildcards)),
        "inputs": {name: artefact_digest(Path(path)) for name, path in sorted((inputs or {}).items())},
        "versions": {
            "halfmatch": __version__,
            **{package: metadata.version(package) for package in ("pyarrow", *STEPS[step].packages)},
        },
    }


def course(
    config: Config, step: str, source: Mapping[str, Any], *, without: Collection[str], **wildcards: str
) -> dict[str, str]:
    """Digests of what an interrupted job must have been of to go on from what it kept, by what they are of.

    source: its provenance. without: keys that say how much there is to do, and change nothing of what has been done.
    """
    settings = {key: value for key, value in parameters(config, step, **wildcards).items() if key not in without}
    return {
        "settings": digest(settings),
        "model or problems": digest(source["inputs"]),
        "package versions": digest(source["versions"]),
        "code": digest(checksums(step)),
    }


def artefact_digest(path: Path) -> str:
    """What an artefact is called among the inputs of another: the SHA-256 of a file, the digest of a model folder."""
    if path.is_dir():
        from halfmatch import models

        return models.digest(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(step: str, config: Config, **wildcards: str) -> None:
    """Run one job of a step."""
    importlib.import_module(f"halfmatch.steps.{step}").run(config, **wildcards)
