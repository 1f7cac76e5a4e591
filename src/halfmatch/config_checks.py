"""What the parts of a configuration must agree on: names that exist, starts that lead on, names that tell the dtype.

Every check yields "path: what is wrong" lines, so that a user sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from halfmatch.errors import UserError, nearest
from halfmatch.rl.objective_rows import OBJECTIVES, named, settings_of

if TYPE_CHECKING:
    from halfmatch.config import Config, ModelSource
    from halfmatch.precision import Precision


def cross_check(config: Config) -> list[str]:
    """Everything in which the parts of a configuration disagree."""
    return [*_unknown_names(config), *_broken_starts(config.models), *_misnamed_precisions(config.precisions)]


def _unknown_names(config: Config) -> Iterator[str]:
    references: list[tuple[str, Iterable[str], Iterable[str], str]] = [
        ("solvability.model", (config.solvability.model,), config.models, "model"),
        ("solvability.problems", (config.solvability.problems,), config.problems, "problem set"),
        ("solvability.precision", (config.solvability.precision,), config.precisions, "precision"),
        ("shapes", config.shapes, config.models, "model"),
        ("mismatch.models", config.mismatch.models, config.models, "model"),
        ("mismatch.problems", config.mismatch.problems, config.problems, "problem set"),
        ("mismatch.precisions", config.mismatch.precisions, config.precisions, "precision"),
        ("mismatch.grid", config.mismatch.grid, config.precisions, "precision"),
        (
            "mismatch.gradient_fidelity.objectives",
            config.mismatch.gradient_fidelity.objectives,
            OBJECTIVES,
            "objective",
        ),
    ]
    if config.training:
        references += [
            ("training.precisions", config.training.precisions, config.precisions, "precision"),
            ("training.objectives", config.training.objectives, OBJECTIVES, "objective"),
            ("training.objective_settings", config.training.objective_settings, OBJECTIVES, "objective"),
        ]
    if config.evaluation:
        references += [
            ("evaluation.benchmarks", config.evaluation.benchmarks, config.problems, "problem set"),
            ("evaluation.precisions", config.evaluation.precisions or (), config.precisions, "precision"),
        ]
    for path, names, known, kind in references:
        names = list(names)
        for name in dict.fromkeys(names):
            if name not in known:
                yield f"{path}: there is no {kind} {name!r}; {nearest(name, known)}"
            if names.count(name) > 1:
                yield f"{path}: {name!r} stands there twice"
    for name in config.mismatch.grid:
        if name in config.precisions and name not in config.mismatch.precisions:
            yield f"mismatch.grid: {name!r} is not sampled in; add it to mismatch.precisions"
    if not config.training:
        return
    for objective, settings in config.training.objective_settings.items():
        if objective in OBJECTIVES:
            yield from _bad_settings(objective, settings)
    if len(set(config.training.seeds)) < len(config.training.seeds):
        yield f"training.seeds: a seed stands twice in {list(config.training.seeds)}"


def _bad_settings(objective: str, settings: Mapping[str, float | bool | str]) -> Iterator[str]:
    """Settings that an objective does not have, or else values that it cannot have."""
    known = settings_of(OBJECTIVES[objective])
    unknown = [setting for setting in settings if setting not in known]
    for setting in unknown:
        yield f"training.objective_settings.{objective}.{setting}: unknown setting; {nearest(setting, known)}"
    if unknown:
        return
    try:
        named(objective, settings)
    except UserError as error:
        yield f"training.{error}"


def _broken_starts(models: Mapping[str, ModelSource]) -> Iterator[str]:
    """A bootstrapped model continues from another of the same architecture, and the chain has an end."""
    shape = ("layers", "hidden_size", "heads", "kv_heads", "intermediate_size")
    for name, source in models.items():
        if source.bootstrap is None or source.bootstrap.start is None:
            continue
        path, start = f"models.{name}.bootstrap.start", source.bootstrap.start
        if start not in models:
            yield f"{path}: there is no model {start!r}; {nearest(start, models)}"
            continue
        first = models[start].bootstrap
        if first is None:
            yield f"{path}: {start!r} is not bootstrapped here (source: {models[start].source})"
            continue
        differing = [key for key in shape if getattr(first, key) != getattr(source.bootstrap, key)]
        if differing:
            yield f"{path}: {start!r} has another architecture ({', '.join(differing)}); its weights do not fit"
        chain: list[str] = [name]
        ahead: str | None = start
        while ahead is not None and ahead in models and ahead not in chain:
            chain.append(ahead)
            bootstrap = models[ahead].bootstrap
            ahead = bootstrap.start if bootstrap else None
        if ahead == name:
            yield f"{path}: goes round in a circle ({' → '.join([*chain, name])})"


def _misnamed_precisions(precisions: Mapping[str, Precision]) -> Iterator[str]:
    """A report goes by the names, so an engine that computes in another dtype than the trainer shows in the name."""
    for name, precision in precisions.items():
        dtypes = f"{precision.compute}-{precision.rollout}"
        if precision.compute != precision.rollout:
            if not name.startswith(dtypes):
                yield (
                    f"precisions.{name}: the trainer computes in {precision.compute} and the engine in "
                    f"{precision.rollout}; if that is meant, call it {dtypes}"
                )
        elif name in ("bf16", "fp16", "fp32") and name != precision.compute:
            yield f"precisions.{name}: computes in {precision.compute}; call it {precision.compute}"
