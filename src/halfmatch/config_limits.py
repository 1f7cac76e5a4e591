"""Values of a configuration that are each of the right type and in range, and still of no use together or anywhere.

Every check yields "path: what is wrong" lines, as those of config_checks do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from halfmatch.errors import UserError
from halfmatch.rl.objective_rows import OBJECTIVES, named

if TYPE_CHECKING:
    from halfmatch.config import Config
    from halfmatch.rl.parts import Objective

SAMPLING_ROUNDS = 10  # the default of training.sampling_rounds


def unusable(config: Config) -> list[str]:
    """Everything that could not be run as it stands, or would be silently ignored."""
    checks = (
        *(_unusable_engines, _unusable_ranks, _unusable_routing, _unusable_values, _unusable_methods),
        _unusable_kept_weights,
    )
    return [*_unusable_output(config.output), *(complaint for check in checks for complaint in check(config))]


def _unusable_output(output: str) -> Iterator[str]:
    """The folder stands in Snakemake's patterns, whose wildcards are in braces."""
    if not output.strip():
        yield "output: is empty; name a folder, as in results/mine"
    elif not output.isprintable() or set(output) & set("{}"):
        yield f"output: {output!r} has braces or control characters in it; name another folder"
    elif output.startswith("~"):
        yield f"output: {output!r} would be a folder called ~ here; write the path out"


def _unusable_engines(config: Config) -> Iterator[str]:
    """Engines that stand twice, and settings of an engine that nothing runs."""
    used = {config.engine.name, *config.mismatch.engines, *(config.evaluation.engines if config.evaluation else ())}
    for key in ("server", "tensor_parallel", "draws"):
        value = getattr(config.engine, key)
        if value != type(config.engine).model_fields[key].default and "vllm" not in used:
            yield f"engine.{key}: is a setting of vllm, which nothing here runs; set engine.name: vllm, or remove it"
    if config.engine.draws and config.engine.server:
        yield "engine.draws: a server draws as it was started to; leave out engine.draws or engine.server"
    for section, engines in (
        ("mismatch", config.mismatch.engines),
        ("evaluation", getattr(config.evaluation, "engines", ())),
    ):
        if len(set(engines)) < len(engines):
            yield f"{section}.engines: an engine stands twice in {list(engines)}"
    if config.evaluation and config.evaluation.engines == ("trainer",):
        yield "evaluation.engines: trainer alone has nothing to be compared with; add the engine to deploy with"


def _unusable_ranks(config: Config) -> Iterator[str]:
    """Engines that do not fit the ranks of a training run, each of which has one or a part of one."""
    if config.training is None or config.training.ranks == 1:
        return
    ranks, engine = config.training.ranks, config.engine
    if engine.data_parallel > 1:
        yield f"engine.data_parallel: every one of {ranks} training.ranks has an engine of its own; remove it"
    if ranks % engine.tensor_parallel:
        yield f"engine.tensor_parallel: {ranks} training.ranks do not divide into engines of {engine.tensor_parallel}"
    if engine.tensor_parallel > 1 and engine.device == "cpu":
        yield "engine.tensor_parallel: on a CPU every one of several training.ranks runs an engine alone; remove it"


def _unusable_routing(config: Config) -> Iterator[str]:
    """Replayed routing is given to a forward pass, from an engine that gives it."""
    if not config.training or not config.training.router_replay:
        return
    if config.engine.name != "transformers":
        yield f"training.router_replay: the engine {config.engine.name} does not give its routing; use transformers"
    if config.training.activation_checkpointing:
        yield (
            "training.router_replay: blocks that are computed again in the backward pass would route tokens anew; "
            "leave out router_replay or activation_checkpointing"
        )


def _unusable_values(config: Config) -> Iterator[str]:
    """Values that are in range by themselves."""
    for name in config.shapes:
        if name in config.models and config.models[name].bootstrap:
            yield f"shapes.{name}: is the shape of a model that is made here, as its bootstrap section says; remove it"
    if config.training and config.training.shard_gradients and config.training.ranks == 1:
        yield "training.shard_gradients: one rank has nobody to share gradients with; add ranks, or remove it"
    if config.prompt.system is not None and config.prompt.template in ("plain", "boxed"):
        yield f"prompt.system: the template {config.prompt.template} has no place for it; use chat or r1, or remove it"
    if config.training and max(config.training.adam_betas) == 1:
        yield f"training.adam_betas: {list(config.training.adam_betas)} must be below 1, else nothing is ever learned"
    if config.evaluation and len(set(config.evaluation.k)) < len(config.evaluation.k):
        yield f"evaluation.k: a number stands twice in {list(config.evaluation.k)}"


def _unusable_kept_weights(config: Config) -> Iterator[str]:
    """Weights along the training that none would be of, or that nothing would read."""
    if config.training is None or (every := config.training.keep_weights_every) is None:
        return
    if every > config.training.iterations:
        yield f"training.keep_weights_every: {every} is more than training.iterations, {config.training.iterations}"
    if config.evaluation is None:
        yield "training.keep_weights_every: nothing reads them without the section evaluation; add it, or remove this"


def _unusable_methods(config: Config) -> Iterator[str]:
    """Settings of value models and of dynamic sampling that no objective has, and objectives where they cannot be."""
    trained = _trained_objectives(config)
    if not any(objective.critic for objective in trained):
        if config.training and config.training.critic_learning_rate is not None:
            yield "training.critic_learning_rate: no objective here trains a value model; add ppo, or remove it"
        for name, precision in config.precisions.items():
            if "value_head" in precision.fp32_modules:
                yield f"precisions.{name}.fp32_modules: no objective here trains a value model; remove value_head"
    rounds_set = config.training and config.training.sampling_rounds != SAMPLING_ROUNDS
    if rounds_set and not any(objective.dynamic_sampling for objective in trained):
        yield (
            "training.sampling_rounds: no objective here samples dynamically; set dynamic_sampling among its "
            "objective_settings, or remove it"
        )
    for name in config.mismatch.gradient_fidelity.objectives:
        row = OBJECTIVES.get(name)
        if row and row.critic:
            yield f"mismatch.gradient_fidelity.objectives: {name} has a value model, and there is none to be measured"
        elif row and row.needs_reference:
            yield f"mismatch.gradient_fidelity.objectives: {name} learns from pairs, and single responses are measured"


def _trained_objectives(config: Config) -> list[Objective]:
    """As they are set; without those whose settings are refused elsewhere."""
    objectives: list[Objective] = []
    if config.training:
        for name in config.training.objectives:
            with suppress(UserError):
                objectives.append(named(name, config.training.objective_settings.get(name)))
    return objectives
