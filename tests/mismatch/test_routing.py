"""Agreement of routing between decoding and a forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from halfmatch.mismatch.routing import agreement, same_experts
from halfmatch.precision.casting import cast_model

PROMPTS = [[2, 5, 7], [3, 8], [4, 4, 9, 12], [6, 7, 8, 9, 10]]
RESPONSES = [list(np.random.default_rng(seed).integers(2, 20, size=40 + seed)) for seed in range(4)]
INTERVALS = {"bootstrap_samples": 100, "seed": 0, "confidence": 0.95}


def cast(folder: Path, dtype: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cast_model(model, dtype, (), "always")  # type: ignore[arg-type]
    return model


def test_the_order_of_experts_does_not_matter() -> None:
    a = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 0]]])
    b = np.array([[[2, 1], [3, 5]], [[5, 6], [0, 7]]])
    assert same_experts(a, b).tolist() == [[True, False], [True, True]]


def test_the_same_model_agrees_with_itself_and_less_so_with_fewer_bits(tiny_moe_folder: Path) -> None:
    models = {dtype: cast(tiny_moe_folder, dtype) for dtype in ("bf16", "fp32")}
    found = {
        pair: agreement(models[pair[0]], models[pair[1]], PROMPTS, RESPONSES, **INTERVALS)
        for pair in (("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"))
    }
    exact = found["fp32", "fp32"]
    assert exact["tokens"] == sum(len(response) for response in RESPONSES)
    assert exact["responses"] == 4
    assert exact["share"] == {"value": 1, "low": 1, "high": 1}
    assert len(exact["layers"]) == 2
    coarse = found["bf16", "bf16"]["share"]
    assert 0.8 < coarse["low"] <= coarse["value"] <= coarse["high"] <= 1
    assert found["fp32", "bf16"]["share"]["value"] < 1


def test_shares_are_of_tokens(tiny_moe_folder: Path) -> None:
    """Against counts by hand, of two models that differ in the second layer's router alone."""
    engine, trainer = cast(tiny_moe_folder, "fp32"), cast(tiny_moe_folder, "fp32")
    with torch.no_grad():
        trainer.model.layers[1].mlp.gate.weight.mul_(-1)
    found = agreement(engine, trainer, PROMPTS, RESPONSES, **INTERVALS)
    first, second = (layer["value"] for layer in found["layers"])
    assert first == 1
    agreeing = total = 0
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([[*prompt, *response[:-1]]])
        logits = engine(input_ids=ids, output_router_logits=True).router_logits[1][len(prompt) - 1 :]
        high, low = logits.topk(2).indices, (-logits).topk(2).indices
        agreeing += sum(set(a) == set(b) for a, b in zip(high.tolist(), low.tolist(), strict=True))
        total += len(response)
    assert second == pytest.approx(agreeing / total)
    assert found["share"]["value"] == pytest.approx((1 + second) / 2)
