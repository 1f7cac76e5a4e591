"""The memory estimate: parameter counts as published, formulas by hand, activations as autograd really keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from halfmatch import memory
from halfmatch.config import Config, Lora, ModelShape, Training
from halfmatch.config_files import load, validate
from halfmatch.errors import UserError
from halfmatch.precision import Precision
from halfmatch.rl import scoring
from halfmatch.rl.learner import Learner

REPOSITORY = Path(__file__).parents[1]
# Billions, as the models' publishers give them.
PUBLISHED = {
    "paper-lora": 1.54,
    "paper-octothinker": 3.21,
    "paper-moe": 30.5,
    "paper-14b": 14.8,
    "paper": 1.78,
    "released": 1.78,
}
BF16, FP32 = Precision.named("bf16"), Precision.named("fp32")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attn_implementation": "sdpa",
}


def shape(**changes: Any) -> ModelShape:
    values = {"layers": 3, "hidden_size": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocabulary": 64}
    return ModelShape.model_validate({**values, "intermediate_size": 768, **changes})


def training(**changes: Any) -> Training:
    base = {"micro_batch_tokens": 128, "max_prompt_tokens": 8, "sampling": {"max_tokens": 100}}
    return Training.model_validate({**base, **changes})


def parts(*arguments: Any, **options: Any) -> dict[str, float]:
    return {part.name: part.bytes for part in memory.training_parts(*arguments, **options)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_numbers_of_parameters(name: str) -> None:
    (of_model,) = load([REPOSITORY / f"config/{name}.yaml"]).shapes.values()
    assert memory.parameters(of_model) / 1e9 == pytest.approx(PUBLISHED[name], rel=5e-3)


@pytest.mark.parametrize("folder", ["tiny_model_folder", "tiny_moe_folder"])
def test_a_shape_is_read_from_a_model_s_folder(folder: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(folder)
    config = Config().model_copy(
        update={"models": {"here": Config().models["gain16"].model_copy(
            update={"source": "folder", "path": str(path), "bootstrap": None}
        )}}
    )  # fmt: skip
    found = memory.shape_of(config, "here")
    assert found is not None
    model = AutoModelForCausalLM.from_pretrained(path)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)
    assert memory.parameters(found) == matrices


def test_a_folder_of_another_kind_has_no_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"n_embd": 8}))
    assert memory._shape_in(tmp_path / "config.json") is None


def test_the_shape_of_a_bootstrapped_model_is_that_of_its_section(tiny_run: Any) -> None:
    config = load([tiny_run.folder / "results/tiny/config.yaml"])
    found = memory.shape_of(config, "small")
    stored = memory._shape_in(tiny_run.folder / "results/tiny/models/small/config.json")
    assert found == stored


def saved_by_autograd(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of what a forward pass of the decoder keeps for the backward pass, weights apart."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model.model(input_ids=torch.randint(0, 64, (1, tokens)), use_cache=False)
    assert result.last_hidden_state.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


MIXTURE = {"moe_intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 4}


@pytest.mark.parametrize(
    ("model", "of_model"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=768)), shape()),
        (lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, intermediate_size=768)), shape(query_key_norm=True)),
        (
            lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MIXTURE)),
            shape(query_key_norm=True, intermediate_size=96, experts=16, experts_per_token=4),
        ),
    ],
)
@pytest.mark.parametrize("precision", [BF16, FP32])
def test_activations_are_what_autograd_keeps(model: Any, of_model: ModelShape, precision: Precision) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision.compute]
    # what the embedding and the last norm keep is not in the estimate: 1/12 of three layers
    assert saved_by_autograd(model().to(dtype), 128) == pytest.approx(
        parts(of_model, training(), precision)["activations"], rel=0.1
    )


def test_with_activation_checkpointing_a_block_s_input_and_one_block_are_kept() -> None:
    plain = parts(shape(), training(), BF16)["activations"]
    less = parts(shape(), training(activation_checkpointing=True), BF16)["activations"]
    assert less == plain / 3 + 128 * 3 * 2 * 256


def test_weights_masters_gradients_and_moments_are_what_a_learner_holds(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    found = memory._shape_in(tiny_model_folder / "config.json")
    assert found is not None
    learner = Learner(model, training(), BF16)
    model(input_ids=torch.arange(2, 12)[None]).logits.float().sum().backward()
    masters = list(learner.masters.parameters.values())
    gradients = [master.grad for master in masters]
    learner.optimizer.step()
    moments = [state[name] for state in learner.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    held = {
        "weights": model.parameters(),
        "fp32 masters": masters,
        "fp32 gradients": gradients,
        "AdamW moments": moments,
        "θ_0, in the first steps": learner.initial.values(),
    }
    estimated = parts(found, training(), BF16)
    for name, tensors in held.items():
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        assert estimated[name] == pytest.approx(nbytes, rel=0.02), name  # biases and norms


def test_an_adapter_is_what_is_trained(tiny_model_folder: Path) -> None:
    lora = Lora(rank=4, alpha=8)
    found = memory._shape_in(tiny_model_folder / "config.json")
    assert found is not None
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    learner = Learner(model, training(), BF16, lora=lora)
    count = sum(weight.numel() for weight in learner.masters.parameters.values())
    assert memory.adapter_parameters(found, lora) == count
    estimated = parts(found, training(lora=lora), BF16)
    assert estimated["fp32 masters"] == 4 * count
    assert estimated["AdamW moments"] == 8 * count
    assert estimated["weights"] == 2 * memory.parameters(found)


def test_shards_are_a_rank_s_part() -> None:
    p = memory.parameters(shape())
    alone, shared = parts(shape(), training(), BF16), parts(shape(), training(ranks=4), BF16)
    assert shared["weights, fp32 shards"] == 4 * p / 4
    assert shared["AdamW moments"] == alone["AdamW moments"] / 4
    # until they are reduced, gradients of several micro-batches are whole
    assert shared["fp32 gradients, whole"] == 4 * p
    sharded = parts(shape(), training(ranks=4, shard_gradients=True), BF16)
    assert sharded["fp32 gradients"] == 4 * p / 4
    assert parts(shape(), training(), BF16, reference=True)["weights"] == 2 * alone["weights"]


def test_logits_are_held_once_and_in_chunks_of_float32() -> None:
    """128 tokens × 64 entries × 2 bytes; 2^24 float32 numbers a chunk, four copies."""
    assert parts(shape(), training(), BF16)["logits, then their gradient"] == 128 * 64 * 2 + 4 * 4 * 2**24
    assert scoring.CHUNK_ELEMENTS * 4 == memory.CHUNK_BYTES


def test_a_sequence_longer_than_the_budget_is_a_micro_batch() -> None:
    long = training(micro_batch_tokens=16, max_prompt_tokens=50, sampling={"max_tokens": 150})
    assert memory.micro_batch_tokens(long) == 200


def test_the_table_ends_with_the_smallest_gpu_and_needs_a_shape(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load([REPOSITORY / "config/paper-moe.yaml"])
    text = list(memory.lines(config))
    assert "30,531,911,680 parameters, 64 ranks, micro-batches of 21,504 tokens" in text[0]
    assert text[-1].split()[:2] == ["smallest", "GPU"]
    on_one = config.model_copy(update={"engine": config.engine.model_copy(update={"tensor_parallel": 1})})
    # the 16-bit weights of the engine, in its share of 0.6 of one GPU: 2 · 30.53e9 / 0.6 bytes
    assert f"{2 * 30_531_911_680 / 0.6 / 2**30:.1f} GiB" in list(memory.lines(on_one))[-1]
    unknown = config.model_copy(update={"shapes": {}})
    assert list(memory.lines(unknown)) == [
        "Memory of a GPU in training: ? (give the shape of qwen3-30b-a3b-base in shapes, or run the step model)"
    ]
    assert list(memory.lines(Config())) == []  # the laptop run trains on no GPU


def test_shapes_of_models_that_do_not_exist_or_are_known_are_refused() -> None:
    of_model = shape().model_dump()
    with pytest.raises(UserError, match=r"shapes: there is no model 'gain17'; did you mean gain16"):
        validate({"shapes": {"gain17": of_model}}, "")
    with pytest.raises(UserError, match=r"shapes\.gain16: is the shape of a model that is made here"):
        validate({"shapes": {"gain16": of_model}}, "")
    with pytest.raises(UserError, match="experts_per_token 3 of 2 experts"):
        validate({"shapes": {"gain16": {**of_model, "experts": 2, "experts_per_token": 3}}}, "")
