"""Values of a configuration that are each of the right type and in range, and still of no use together or anywhere.

Every check yields "path: what is wrong" lines, as those of config_checks do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfmatch.config import Config


def unusable(config: Config) -> list[str]:
    """Everything that could not be run as it stands, or would be silently ignored."""
    checks = (_unusable_engines, _unusable_routing, _unusable_values)
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
    for key in ("server", "tensor_parallel"):
        value = getattr(config.engine, key)
        if value != type(config.engine).model_fields[key].default and "vllm" not in used:
            yield f"engine.{key}: is a setting of vllm, which nothing here runs; set engine.name: vllm, or remove it"
    for section, engines in (
        ("mismatch", config.mismatch.engines),
        ("evaluation", getattr(config.evaluation, "engines", ())),
    ):
        if len(set(engines)) < len(engines):
            yield f"{section}.engines: an engine stands twice in {list(engines)}"
    if config.evaluation and config.evaluation.engines == ("trainer",):
        yield "evaluation.engines: trainer alone has nothing to be compared with; add the engine to deploy with"


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
    if config.prompt.system is not None and config.prompt.template in ("plain", "boxed"):
        yield f"prompt.system: the template {config.prompt.template} has no place for it; use chat or r1, or remove it"
    if config.training and max(config.training.adam_betas) == 1:
        yield f"training.adam_betas: {list(config.training.adam_betas)} must be below 1, else nothing is ever learned"
    if config.evaluation and len(set(config.evaluation.k)) < len(config.evaluation.k):
        yield f"evaluation.k: a number stands twice in {list(config.evaluation.k)}"
