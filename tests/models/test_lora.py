"""LoRA: peft's own gradients and files, merges worked out in float64, and how much of an update survives rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from halfmatch.config import Lora
from halfmatch.errors import UserError
from halfmatch.models import lora
from halfmatch.precision import Precision
from halfmatch.precision.casting import cast_model
from halfmatch.precision.masters import MasterWeights
from halfmatch.rl.batching import collate
from halfmatch.rl.scoring import token_logprobs

SETTINGS = Lora(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"))
BATCH = collate([[2, 3, 4], [5, 6]], [[7, 8, 9, 10], [11, 12, 13]], stop_token_ids=())


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def adapted(folder: Path, dtype: str = "fp32", size: float = 0.02) -> tuple[PreTrainedModel, MasterWeights]:
    """A cast model whose B is random (as after training) and not 0, and its masters."""
    model = load(folder)
    lora.add_adapter(model, SETTINGS, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in lora.adapter_weights(model).items():
            if ".lora_B." in name:
                weight.normal_(0, size, generator=generator)
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    cast_model(model, dtype, (), "always")  # type: ignore[arg-type]
    return model, MasterWeights(model, initial)


def merged_in_float64(folder: Path, masters: MasterWeights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """round(W) + 2 B A, of W in `dtype`, by matrices read from the file and the masters' names."""
    weights = {name: weight.to(dtype).double() for name, weight in load(folder).named_parameters()}
    adapter = dict(masters.named())
    for name in adapter:
        if ".lora_A." in name:
            path = name.removesuffix(".lora_A.default.weight")
            b = adapter[f"{path}.lora_B.default.weight"].double()
            weights[f"{path}.weight"] = weights[f"{path}.weight"] + 8 / 4 * (b @ adapter[name].double())
    return weights


def test_gradients_are_those_of_peft(tiny_model_folder: Path) -> None:
    ours, masters = adapted(tiny_model_folder)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=list(SETTINGS.targets))
    theirs = get_peft_model(load(tiny_model_folder), config).eval()
    values = dict(masters.named())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_" in name:
                parameter.copy_(values[name.removeprefix("base_model.model.")])
    for model in (ours, theirs):
        logp, _ = token_logprobs(model, BATCH)
        logp.sum().backward()
    for name, parameter in theirs.named_parameters():
        if ".lora_" in name:
            gradient = masters.parameters[name.removeprefix("base_model.model.")].grad
            assert parameter.grad.abs().max() > 0
            # the attention functions differ in the order of their sums
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def test_only_the_adapter_is_trained_with_fp32_masters(tiny_model_folder: Path) -> None:
    model, masters = adapted(tiny_model_folder, "bf16")
    assert set(masters.parameters) == set(lora.adapter_weights(model))
    assert len(masters.parameters) == 2 * 3 * 2  # A and B of three layers in each of two
    assert {weight.dtype for weight in masters.parameters.values()} == {torch.float32}
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    logp, _ = token_logprobs(model, BATCH)
    logp.sum().backward()
    assert all(weight.grad is None for weight in model.parameters())
    assert all(master.grad is not None and master.grad.dtype == torch.float32 for master in masters.parameters.values())


def test_a_new_adapter_changes_nothing_and_follows_from_its_seed(tiny_model_folder: Path) -> None:
    plain, model, again, other = (load(tiny_model_folder) for _ in range(4))
    random = torch.get_rng_state()
    for each, seed in ((model, 5), (again, 5), (other, 6)):
        lora.add_adapter(each, SETTINGS, seed=seed)
    assert torch.equal(torch.get_rng_state(), random)
    ids = BATCH.input_ids
    assert torch.equal(plain(input_ids=ids).logits, model(input_ids=ids).logits)
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    first, same, different = (lora.adapter_weights(each)[name] for each in (model, again, other))
    assert torch.equal(first, same)
    assert not torch.equal(first, different)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_merged_weights_rounded_once_are_the_merge_in_float64(tiny_model_folder: Path, dtype: str) -> None:
    rounded_to = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    model, masters = adapted(tiny_model_folder, dtype)
    expected = merged_in_float64(tiny_model_folder, masters, rounded_to)
    merged = dict(lora.merged_weights(model, masters.parameters, Precision.named(dtype)))  # type: ignore[arg-type]
    assert merged.keys() == expected.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(weight.double(), expected[name], rtol=0, atol=1e-7)
        ours, best = weight.to(rounded_to), expected[name].to(rounded_to)
        # Another neighbour only where both are as near: a tie, to fp32's accuracy.
        assert ((ours - expected[name]).abs() <= (best - expected[name]).abs() + 1e-7).all()
        assert (ours != best).float().mean() < (1 if dtype == "fp32" else 2e-3), name
    adapted_name = "model.layers.1.mlp.down_proj.weight"
    assert merged[adapted_name].dtype == torch.float32
    assert not torch.equal(merged[adapted_name], load(tiny_model_folder).get_parameter(adapted_name))


def test_what_a_merge_loses_is_measured_and_undone(tiny_model_folder: Path) -> None:
    """fp16 has 8 times the resolution of bf16, so of the same large Δ it loses an eighth."""
    found = {}
    for dtype in ("bf16", "fp16", "fp32"):
        model, masters = adapted(tiny_model_folder, dtype, size=0.05)
        before = {name: weight.clone() for name, weight in model.named_parameters()}

        def score(model: PreTrainedModel = model) -> torch.Tensor:
            return token_logprobs(model, BATCH)[0]

        unmerged = score()
        found[dtype] = lora.merge_rounding(model, masters.parameters, score, BATCH.response_mask)
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        assert torch.equal(score(), unmerged)
    assert found["bf16"].lost > 0.005
    assert found["bf16"].lost == pytest.approx(8 * found["fp16"].lost, rel=0.1)
    assert found["bf16"].k3 > 10 * found["fp16"].k3 > 0
    assert found["fp32"].lost < 1e-4
    assert found["fp32"].k3 < 1e-9


def test_of_a_small_update_a_merge_loses_all(tiny_model_folder: Path) -> None:
    """Far below half a unit in the last place of W, rounding gives W again."""
    model, masters = adapted(tiny_model_folder, "bf16", size=1e-6)
    found = lora.merge_rounding(model, masters.parameters, lambda: token_logprobs(model, BATCH)[0], BATCH.response_mask)
    assert found.lost == pytest.approx(1, abs=0.05)


def test_nothing_is_lost_before_there_is_an_update(tiny_model_folder: Path) -> None:
    model, masters = adapted(tiny_model_folder, "bf16", size=0.0)
    found = lora.merge_rounding(model, masters.parameters, lambda: token_logprobs(model, BATCH)[0], BATCH.response_mask)
    assert (found.k3, found.lost) == (0, 0)


def test_peft_reads_the_adapter(tiny_model_folder: Path, tmp_path: Path) -> None:
    model, masters = adapted(tiny_model_folder)
    lora.save_adapter(masters.parameters, SETTINGS, tmp_path, base="someone/model")
    theirs = PeftModel.from_pretrained(load(tiny_model_folder), tmp_path).eval()
    ids = BATCH.input_ids
    torch.testing.assert_close(theirs(input_ids=ids).logits, model(input_ids=ids).logits)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "someone/model"
    assert str(tiny_model_folder) not in (tmp_path / "adapter_config.json").read_text()


def test_targets_that_are_not_there_or_not_linear_are_refused(tiny_model_folder: Path) -> None:
    for target in ("query", "embed_tokens"):
        with pytest.raises(UserError, match=r"training\.lora\.targets"):
            lora.add_adapter(load(tiny_model_folder), Lora(targets=(target,)), seed=0)
