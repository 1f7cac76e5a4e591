"""What the parts of a configuration must agree on: names that exist, starts that lead on, names that tell the dtype.

Every check yields "path: what is wrong" lines, so that a user sees all of them at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfmatch.config import Config, ModelSource
    from halfmatch.precision import Precision

# The rows of rl/objectives.py and which of their settings can be changed, named here so that a configuration can be
# checked without torch; a test compares the two.
_ANY = ("denominator", "scale_by_std", "kl_coefficient", "kl_estimator", "kl_place")
_CLIP = ("clip_low", "clip_high", "dual_clip")
_BOUNDS = ("bound", "bound_low")
OBJECTIVE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "grpo": (*_CLIP, *_ANY),
    "grpo-token-tis": (*_BOUNDS, *_CLIP, *_ANY),
    "grpo-seq-mis": (*_BOUNDS, *_CLIP, *_ANY),
    "gspo": (*_CLIP, *_ANY),
    "pg": _ANY,
    "pg-token-is": (*_BOUNDS, *_ANY),
    "pg-token-tis": (*_BOUNDS, *_ANY),
    "pg-seq-is": (*_BOUNDS, *_ANY),
    "pg-seq-tis": (*_BOUNDS, *_ANY),
    "pg-seq-mis": (*_BOUNDS, *_ANY),
    "dapo": (*_CLIP, *_ANY),
    "grpo-dual-clip": (*_CLIP, *_ANY),
    "cispo": ("clip_low", "clip_high", *_ANY),
    "icepop": (*_BOUNDS, *_CLIP, *_ANY),
    "grpo-geo-mask": ("keep_low", "keep_high", *_CLIP, *_ANY),
    "grpo-k3-mask": ("keep_high", *_CLIP, *_ANY),
    "dppo-tv": ("limit", *_BOUNDS, *_ANY),
    "dppo-kl": ("limit", *_BOUNDS, *_ANY),
    "rloo": _ANY,
    "reinforce-plus-plus": (*_CLIP, *_ANY),
}
OBJECTIVE_NAMES = tuple(OBJECTIVE_SETTINGS)


def cross_check(config: Config) -> list[str]:
    """Everything in which the parts of a configuration disagree."""
    return [*_unknown_names(config), *_broken_starts(config.models), *_misnamed_precisions(config.precisions)]


def nearest(name: str, known: Iterable[str]) -> str:
    """How a message ends that names something unknown: the nearest known name, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known) or 'none'}"


def _unknown_names(config: Config) -> Iterator[str]:
    references: list[tuple[str, Iterable[str], Iterable[str], str]] = [
        ("solvability.model", (config.solvability.model,), config.models, "model"),
        ("solvability.problems", (config.solvability.problems,), config.problems, "problem set"),
        ("solvability.precision", (config.solvability.precision,), config.precisions, "precision"),
        ("mismatch.models", config.mismatch.models, config.models, "model"),
        ("mismatch.problems", config.mismatch.problems, config.problems, "problem set"),
        ("mismatch.precisions", config.mismatch.precisions, config.precisions, "precision"),
        ("mismatch.grid", config.mismatch.grid, config.precisions, "precision"),
        (
            "mismatch.gradient_fidelity.objectives",
            config.mismatch.gradient_fidelity.objectives,
            OBJECTIVE_NAMES,
            "objective",
        ),
    ]
    if config.training:
        references += [
            ("training.precisions", config.training.precisions, config.precisions, "precision"),
            ("training.objectives", config.training.objectives, OBJECTIVE_NAMES, "objective"),
            ("training.objective_settings", config.training.objective_settings, OBJECTIVE_NAMES, "objective"),
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
        known = OBJECTIVE_SETTINGS.get(objective, tuple(settings))
        for setting in settings:
            if setting not in known:
                yield f"training.objective_settings.{objective}.{setting}: unknown setting; {nearest(setting, known)}"
    if len(set(config.training.seeds)) < len(config.training.seeds):
        yield f"training.seeds: a seed stands twice in {list(config.training.seeds)}"


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
