"""Engines that compute a LoRA adapter beside their weights, against the trainer's own computation of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from halfmatch.config import EngineSettings, Lora, Sampling
from halfmatch.engines import Engine, NonFiniteError, Request, create, vllm_weights
from halfmatch.models import lora
from halfmatch.precision import Precision
from halfmatch.precision.casting import cast_model
from halfmatch.rl.scoring import response_logprobs

ADAPTER = Lora(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"))
SETTINGS = EngineSettings(slots=8, gpu_memory=0.2)
# Longer than the blocks of a prefix cache, so that a stale one would show.
REQUESTS = [Request((*(2 + index * 7 % 18 for index in range(150)), 3 + seed), seed) for seed in range(4)]


def trainer(folder: Path, dtype: str) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A cast model with an adapter, and the adapter's masters, which are 0 in B."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lora.add_adapter(model, ADAPTER, seed=3)
    masters = {name: weight.detach().clone() for name, weight in lora.adapter_weights(model).items()}
    cast_model(model, dtype, (), "always")  # type: ignore[arg-type]
    return model, masters


def change(model: PreTrainedModel, masters: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in lora.adapter_weights(model).items():
            if ".lora_B." in name:
                masters[name] = 0.1 * torch.randn(weight.shape, generator=generator)
            weight.copy_(masters[name])


def k3(engine: Engine, model: PreTrainedModel) -> float:
    found = engine.generate(REQUESTS, Sampling(max_tokens=16), stop_token_ids=[])
    scored = response_logprobs(
        model,
        [list(request.prompt_ids) for request in REQUESTS],
        [completion.token_ids for completion in found],
        micro_batch_tokens=4096,
    )
    d = np.concatenate(scored).astype(np.float64) - np.concatenate([completion.logprobs for completion in found])
    return float(np.mean(np.expm1(d) - d))


@pytest.mark.parametrize("name", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_an_engine_follows_an_adapter_that_it_is_given(name: str, tiny_model_folder: Path) -> None:
    model, masters = trainer(tiny_model_folder, "fp16")
    engine = create(name, tiny_model_folder, Precision.named("fp16", emulate="always"), SETTINGS, adapter=ADAPTER)
    try:
        for seed in (1, 2):
            before = k3(engine, model) if seed == 2 else None
            change(model, masters, seed)
            assert before is None or k3(engine, model) > 1e-2  # of the adapter before
            engine.load_weights(masters.items())
            assert k3(engine, model) < 1e-4
        masters["model.layers.0.mlp.down_proj.lora_B.default.weight"][0, 0] = torch.inf
        with pytest.raises(NonFiniteError, match="down_proj"):
            engine.load_weights(masters.items())
    finally:
        engine.close()


def test_an_engine_with_an_adapter_takes_that_and_nothing_else(tiny_model_folder: Path) -> None:
    _, masters = trainer(tiny_model_folder, "fp32")
    engine = create("transformers", tiny_model_folder, Precision.named("fp32"), SETTINGS, adapter=ADAPTER)
    first, *others = masters.items()
    with pytest.raises(ValueError, match="lack"):
        engine.load_weights(others)
    with pytest.raises(ValueError, match="no weights named"):
        engine.load_weights([first, *others, ("model.norm.weight", torch.ones(64))])


def test_vllm_reserves_the_next_rank_that_it_has() -> None:
    assert vllm_weights.adapter_settings(None) == {}
    assert vllm_weights.adapter_settings(ADAPTER)["max_lora_rank"] == 8
    assert vllm_weights.adapter_settings(Lora(rank=1))["max_lora_rank"] == 1
    assert vllm_weights.adapter_settings(Lora(rank=257))["max_lora_rank"] == 320
    largest = Lora.model_fields["rank"].metadata[1].le
    assert vllm_weights.adapter_settings(Lora(rank=largest))["max_lora_rank"] == largest


@pytest.mark.vllm
def test_vllm_is_given_a_folder_that_replaces_the_adapter_before(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is built as vLLM wants it, on any machine: what it reads, and that it reads it anew."""
    _, masters = trainer(tiny_model_folder, "fp32")
    seen = {}

    class Llm:
        class llm_engine:  # noqa: N801
            @staticmethod
            def add_lora(request: object) -> None:
                folder = Path(request.lora_path)  # type: ignore[attr-defined]
                seen["inplace"] = request.load_inplace  # type: ignore[attr-defined]
                seen["weights"] = load_file(folder / "adapter_model.safetensors")
                seen["config"] = json.loads((folder / "adapter_config.json").read_text())

    request = vllm_weights.load_adapter(Llm(), masters, ADAPTER)
    assert seen["inplace"]
    assert (seen["config"]["r"], seen["config"]["lora_alpha"]) == (4, 8)
    assert len(seen["weights"]) == len(masters)
    name = "model.layers.1.self_attn.q_proj.lora_A"
    stored = seen["weights"][f"base_model.model.{name}.weight"]
    assert torch.equal(stored, masters[f"{name}.default.weight"])
    assert not request.load_inplace


def test_experts_have_the_names_of_a_checkpoint(tiny_moe_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_folder, dtype=torch.float32)
    stored = load_file(tiny_moe_folder / "model.safetensors")
    found = dict(vllm_weights.checkpoint_weights((name, w.detach()) for name, w in model.named_parameters()))
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)


@pytest.mark.vllm
def test_vllm_takes_new_weights_of_experts(tiny_moe_folder: Path) -> None:
    """Its CPU kernels multiply by packed copies of them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    cast_model(model, "fp16", (), "always")
    engine = create("vllm", tiny_moe_folder, Precision.named("fp16"), SETTINGS)
    try:
        assert k3(engine, model) > 1e-2
        engine.load_weights(weights.items())
        assert k3(engine, model) < 1e-4
        engine.load_weights(weights.items())
        assert k3(engine, model) < 1e-4
    finally:
        engine.close()
