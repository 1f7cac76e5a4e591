"""Routers and experts on a CPU: emulated as Linear layers are, and independent of the batch."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, PreTrainedModel

from halfmatch.precision import Precision, torch_dtype
from halfmatch.precision.casting import cast_model
from halfmatch.precision.monitors import audit_matmuls
from halfmatch.precision.own_matmuls import OwnMatmuls

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(2, 20).reshape(2, 9)  # without the padding token, whose zeros a norm turns into large gradients


def cast(folder: Path, dtype: str, fp32_modules: tuple[str, ...] = ()) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cast_model(model, dtype, fp32_modules, "always")  # type: ignore[arg-type]
    return model


def states(rows: int, dtype: str) -> torch.Tensor:
    return torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(2)).to(torch_dtype(dtype))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_experts_round_each_product_once(tiny_moe_folder: Path, dtype: str) -> None:
    """A token's two experts by hand: every matmul in fp32 of 16-bit values, its result rounded, nothing else."""
    block = cast(tiny_moe_folder, dtype).model.layers[0].mlp
    x, rounded = states(12, dtype), torch_dtype(dtype)
    found = block(x)[0]
    for row in range(12):
        hidden = x[0, row].float()
        logits = (block.gate.weight.float() @ hidden).to(rounded)
        weights, chosen = logits.float().softmax(0).topk(2)
        weights = (weights / weights.sum()).to(rounded)
        expected = torch.zeros(64, dtype=rounded)
        for weight, expert in sorted(zip(weights, chosen.tolist(), strict=True), key=lambda pair: pair[1]):
            gate, up = (block.experts.gate_up_proj[expert].float() @ hidden).to(rounded).chunk(2)
            inner = (silu(gate) * up).float()
            expected += (block.experts.down_proj[expert].float() @ inner).to(rounded) * weight
        # fp32 sums in another order move a rounding now and then
        torch.testing.assert_close(found[row], expected, rtol=2 * torch.finfo(rounded).eps, atol=1e-3)
        assert (found[row] == expected).float().mean() > 0.9


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_row_has_the_same_bits_in_any_company(tiny_moe_folder: Path, dtype: str) -> None:
    block = cast(tiny_moe_folder, dtype).model.layers[1].mlp
    x = states(40, dtype)
    together = block(x)
    for first, last in ((0, 1), (3, 8), (5, 21), (17, 40)):
        assert torch.equal(block(x[:, first:last]), together[:, first:last])


def test_in_fp32_results_and_gradients_are_those_of_the_grouped_kernel(tiny_moe_folder: Path) -> None:
    ours = cast(tiny_moe_folder, "fp32")
    theirs = AutoModelForCausalLM.from_pretrained(tiny_moe_folder, dtype=torch.float32).eval()
    assert theirs.config._experts_implementation == "grouped_mm"
    for model in (ours, theirs):
        model.requires_grad_(True)
        torch.log_softmax(model(IDS).logits, dim=-1)[..., 3].sum().backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_are_the_fp32_models_to_their_precision(tiny_moe_folder: Path, dtype: str) -> None:
    exact, model = cast(tiny_moe_folder, "fp32"), cast(tiny_moe_folder, dtype)
    for each in (exact, model):
        each.requires_grad_(True)
        torch.log_softmax(each(IDS).logits.float(), dim=-1)[..., 3].sum().backward()
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        wide, narrow = (each.get_parameter(name).grad.flatten() for each in (exact, model))
        assert narrow.dtype == torch_dtype(dtype)
        assert torch.cosine_similarity(wide, narrow.float(), dim=0) > 0.98


@pytest.mark.parametrize("fp32_modules", [(), ("router",), ("mlp",)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_audit_knows_them(tiny_moe_folder: Path, dtype: str, fp32_modules: tuple[str, ...]) -> None:
    model = cast(tiny_moe_folder, dtype, fp32_modules)
    audited = audit_matmuls(model, Precision.named(dtype, fp32_modules=fp32_modules), IDS)  # type: ignore[arg-type]
    wide, compute = torch.float32, torch_dtype(dtype)
    assert audited["model.layers.0.mlp.gate"] == (wide if fp32_modules else compute)
    assert audited["model.layers.0.mlp.experts"] == (wide if "mlp" in fp32_modules else compute)


def test_a_copied_model_computes_with_its_own_weights(tiny_moe_folder: Path) -> None:
    model = cast(tiny_moe_folder, "bf16")
    copied = deepcopy(model)
    before = copied(IDS).logits
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.zero_()
    assert torch.equal(copied(IDS).logits, before)
    assert not torch.equal(model(IDS).logits, before)
    assert isinstance(copied.model.layers[0].mlp.gate, OwnMatmuls)
