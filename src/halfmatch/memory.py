"""What a training job needs of a GPU's memory, estimated from the model's shape and the settings, with the formulas.

An estimate: what the allocator leaves unused, the libraries' own memory and the sampling engine are not in it.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmatch.config import Bootstrap, Config, Lora, ModelShape, Training
from halfmatch.paths import Paths
from halfmatch.precision import Precision
from halfmatch.rl.objective_rows import named

GIB = 2**30
LEGEND = (
    "P parameters, T trained, a value model's too; b bytes of the compute dtype; r ranks; t tokens of a micro-batch, "
    "or of the longest sequence; L layers of width h, queries q, keys and values k each, an MLP m (all experts of a "
    "token), e experts a token; V rows of the vocabulary"
)
# The logits are turned into float32 so much at a time, in a few copies (halfmatch.rl.scoring).
CHUNK_BYTES = 4 * 2**24
CHUNK_COPIES = 4
# Tokens of the bootstrapped model's vocabulary; it ties its embeddings.
_TINY_VOCABULARY = 20


@dataclass(frozen=True)
class Part:
    """One use of memory. `kept`: also while the engine samples."""

    name: str
    formula: str
    bytes: float
    kept: bool


# -------------------------------------------------------------------------------------------------------------- shapes
def shape_of(config: Config, name: str) -> ModelShape | None:
    """The shape of a model: of its folder if it is there, else as the configuration gives it; None if nobody knows."""
    source = config.models[name]
    if source.bootstrap:
        return _bootstrap_shape(source.bootstrap)
    folders = [Paths(Path(config.output)).of("model", model=name), *([Path(source.path)] if source.path else [])]
    for folder in folders:
        if (folder / "config.json").is_file():
            return _shape_in(folder / "config.json")
    return config.shapes.get(name)


def _bootstrap_shape(shape: Bootstrap) -> ModelShape:
    return ModelShape(
        layers=shape.layers,
        hidden_size=shape.hidden_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.hidden_size // shape.heads,
        intermediate_size=shape.intermediate_size,
        vocabulary=_TINY_VOCABULARY,
        tied_embeddings=True,
        query_key_norm=True,
    )


def _shape_in(path: Path) -> ModelShape | None:
    """From a config.json with the names that most architectures have; None for others."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        heads = values["num_attention_heads"]
        experts = values.get("num_experts") or values.get("num_local_experts") or 1
        mixture = {"experts": experts, "experts_per_token": values["num_experts_per_tok"]} if experts > 1 else {}
        return ModelShape(
            layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            intermediate_size=(experts > 1 and values.get("moe_intermediate_size")) or values["intermediate_size"],
            vocabulary=values["vocab_size"],
            tied_embeddings=values.get("tie_word_embeddings", False),
            query_key_norm=str(values.get("model_type")).startswith("qwen3"),
            **mixture,
        )
    except (ValueError, KeyError, TypeError):
        return None


def parameters(shape: ModelShape) -> int:
    """Without biases and norms, a thousandth of them."""
    return shape.layers * layer_parameters(shape) + _end_parameters(shape)


def layer_parameters(shape: ModelShape) -> int:
    """Of one decoder layer: attention, MLP or all its experts, and router."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * queries + 2 * keys)
    router = shape.experts * shape.hidden_size if shape.experts > 1 else 0
    return attention + router + 3 * shape.experts * shape.hidden_size * shape.intermediate_size


def _end_parameters(shape: ModelShape) -> int:
    return shape.vocabulary * shape.hidden_size * (1 if shape.tied_embeddings else 2)


def adapter_parameters(shape: ModelShape, lora: Lora) -> int:
    """rank × (inputs + outputs) of each target whose name is one of Llama's and Qwen's; experts have none."""
    width, queries, keys = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q_proj": width + queries,
        "k_proj": width + keys,
        "v_proj": width + keys,
        "o_proj": width + queries,
    }
    if shape.experts == 1:
        sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), width + shape.intermediate_size)
    return shape.layers * lora.rank * sum(sizes.get(target, 0) for target in lora.targets)


# -------------------------------------------------------------------------------------------------------------- parts
def training_parts(
    shape: ModelShape, training: Training, precision: Precision, *, reference: bool = False, critic: bool = False
) -> Iterator[Part]:
    """What the trainer holds on a GPU. reference: with a frozen copy of the initial policy; critic: with a value model,
    which is as large and trained along.

    Activations are those that autograd keeps of a decoder with fused attention, whose norms compute in float32.
    """
    p, b, r = parameters(shape), 4 if precision.compute == "fp32" else 2, training.ranks
    adapted = adapter_parameters(shape, training.lora) if training.lora else p
    copies, trained = 1 + reference + critic, adapted + (p if critic else 0)
    if r > 1:
        gathered = b * (2 * layer_parameters(shape) + _end_parameters(shape))
        yield Part("weights, fp32 shards", "4 P / r" + _times(copies), copies * 4 * p / r, True)
        yield Part("weights, gathered", "b (2 layers + embeddings)", gathered, False)
    else:
        yield Part("weights", "b P" + _times(copies), copies * b * p, True)
        if b < 4:
            yield Part("fp32 masters", "4 T", 4 * trained, True)
    yield Part("AdamW moments", "8 T / r", 8 * trained / r, True)
    if r > 1 and not training.shard_gradients and _several_micro_batches(training):
        yield Part("fp32 gradients, whole", "4 T", 4 * trained, False)
    else:
        yield Part("fp32 gradients", "4 T / r", 4 * trained / r, False)
    yield Part("θ_0, in the first steps", "4 T / r, of the policy", 4 * adapted / r, True)
    yield _activations(shape, training, b)
    logits = b * micro_batch_tokens(training) * shape.vocabulary
    chunks = CHUNK_COPIES * CHUNK_BYTES
    yield Part("logits, then their gradient", "b t V + 0.25 GiB", logits + chunks, False)


def micro_batch_tokens(training: Training) -> int:
    """Of the largest micro-batch: a sequence that is longer than the budget goes alone."""
    return max(training.micro_batch_tokens, training.max_prompt_tokens + training.sampling.max_tokens)


def _several_micro_batches(training: Training) -> bool:
    """Whether a rank has more than one a step, if responses are as long as they may be."""
    rows = training.prompts_per_iteration * training.samples_per_prompt / training.gradient_steps / training.ranks
    longest = training.max_prompt_tokens + training.sampling.max_tokens
    return rows * longest > micro_batch_tokens(training)


def _activations(shape: ModelShape, training: Training, b: int) -> Part:
    t, h, e = micro_batch_tokens(training), shape.hidden_size, shape.experts_per_token
    q, k, m = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, e * shape.intermediate_size
    layer, formula = b * (4 * h + 2 * q + 2 * k + 4 * m) + 8 * h, "b (4 h + 2 q + 2 k + 4 m) + 8 h"
    if shape.query_key_norm:
        layer, formula = layer + (b + 4) * (q + k), f"{formula} + (b + 4) (q + k)"
    if shape.experts > 1:
        layer, formula = layer + 2 * b * e * h, f"{formula} + 2 b e h"
    if training.activation_checkpointing:
        return Part("activations", f"t (L b h + {formula})", t * (shape.layers * b * h + layer), False)
    return Part("activations", f"t L ({formula})", t * shape.layers * layer, False)


def _times(copies: int) -> str:
    return f" × {copies}" if copies > 1 else ""


# ---------------------------------------------------------------------------------------------------------------- text
def lines(config: Config) -> Iterator[str]:
    """A table of the parts, a column a training precision; nothing where nothing is trained on a GPU."""
    training, name = config.training, config.solvability.model
    if training is None or config.engine.device != "cuda":
        return
    shape = shape_of(config, name)
    if shape is None:
        yield f"Memory of a GPU in training: ? (give the shape of {name} in shapes, or run the step model)"
        return
    objectives = [named(one, training.objective_settings.get(one)) for one in training.objectives]
    largest = max(
        ({"reference": one.needs_reference, "critic": one.critic is not None} for one in objectives),
        key=lambda models: (models["critic"], models["reference"]),
    )
    tables = {
        precision: list(training_parts(shape, training, config.precisions[precision], **largest))
        for precision in training.precisions
    }
    trained = f", {adapter_parameters(shape, training.lora):,} of an adapter" if training.lora else ""
    yield (
        f"Memory of a GPU in training, estimated: {name}, {parameters(shape):,} parameters{trained}, "
        f"{training.ranks} rank{'s' * (training.ranks > 1)}, micro-batches of {micro_batch_tokens(training):,} tokens"
    )
    yield from textwrap.wrap(LEGEND, 118, initial_indent="  ", subsequent_indent="  ")
    names = {part.name: part.formula for parts in tables.values() for part in parts}
    rows = [(part, formula, [_found(parts, part) for parts in tables.values()]) for part, formula in names.items()]
    rows += [
        ("training, in all", "the sum", [sum(part.bytes for part in parts) for parts in tables.values()]),
        ("kept while sampling", "", [sum(part.bytes for part in parts if part.kept) for parts in tables.values()]),
        ("smallest GPU", _smallest_formula(config), [_smallest(config, shape, parts) for parts in tables.values()]),
    ]
    yield f"  {'':<28}{''.join(f'{precision:>12}' for precision in tables)}"
    for part, formula, sizes in rows:
        yield f"  {part:<28}{''.join(_column(size) for size in sizes)}  {formula}".rstrip()


def _found(parts: list[Part], name: str) -> float | None:
    return next((part.bytes for part in parts if part.name == name), None)


def _column(size: float | None) -> str:
    return f"{'':>12}" if size is None else f"{size / GIB:>8.1f} GiB"


def _smallest(config: Config, shape: ModelShape, parts: list[Part]) -> float:
    """The engine has its share of a GPU for itself while it samples, and sleeps while the trainer trains."""
    share, kept = config.engine.gpu_memory, sum(part.bytes for part in parts if part.kept)
    weights = 2 * parameters(shape) / config.engine.tensor_parallel
    return max(sum(part.bytes for part in parts), kept / (1 - share) if share < 1 else math.inf, weights / share)


def _smallest_formula(config: Config) -> str:
    share = config.engine.gpu_memory
    return f"max(training, kept / {1 - share:g}, 16-bit weights / ({share:g} × {config.engine.tensor_parallel} GPUs))"
