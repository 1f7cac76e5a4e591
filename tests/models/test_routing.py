"""Routing of a mixture of experts: as recorded while sampling, and replayed in a forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from halfmatch.config import EngineSettings, Sampling
from halfmatch.engines import Request, create
from halfmatch.engines.decoding import forced_routing
from halfmatch.errors import UserError
from halfmatch.models.routing import recorded, replayed, routers
from halfmatch.precision import Precision
from halfmatch.precision.casting import cast_model

IDS = torch.arange(2, 20).reshape(2, 9)
REQUESTS = [Request((2, 5, 7), 1), Request((2, 5, 7), 2), Request((9, 3, 4, 11, 6), 3), Request((8,), 4)]


def cast(folder: Path, dtype: str, fp32_modules: tuple[str, ...] = ()) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cast_model(model, dtype, fp32_modules, "always")  # type: ignore[arg-type]
    return model


def routing_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with recorded(model) as recorder:
        model(input_ids=ids)
        return recorder.take().view(*ids.shape, 2, 2)


def test_what_is_recorded_is_the_top_of_the_routers_logits(tiny_moe_folder: Path) -> None:
    model = cast(tiny_moe_folder, "fp32")
    logits = model(input_ids=IDS, output_router_logits=True).router_logits  # [tokens, experts] a layer
    expected = torch.stack([layer.topk(2).indices for layer in logits], dim=1).view(2, 9, 2, 2)
    found = routing_of(model, IDS)
    assert found.dtype == torch.int16
    assert torch.equal(found.long(), expected)


@pytest.mark.parametrize("fp32_modules", [(), ("router",)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_to_replay_a_models_own_routing_changes_no_bit(
    tiny_moe_folder: Path, dtype: str, fp32_modules: tuple[str, ...]
) -> None:
    model = cast(tiny_moe_folder, dtype, fp32_modules)
    own, plain = routing_of(model, IDS), model(input_ids=IDS).logits
    with replayed(model, own):
        assert torch.equal(model(input_ids=IDS).logits, plain)
    other = (own + 1) % 8
    with replayed(model, other):
        assert not torch.equal(model(input_ids=IDS).logits, plain)
        assert torch.equal(routing_of(model, IDS), other)
    assert torch.equal(model(input_ids=IDS).logits, plain)


def test_replayed_experts_are_weighted_by_the_models_own_router(tiny_moe_folder: Path) -> None:
    """One layer by hand in fp32, and gradients that reach the router."""
    model = cast(tiny_moe_folder, "fp32").requires_grad_(True)
    block = model.model.layers[0].mlp
    given = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    routing = torch.tensor([[[[5, 1]], [[0, 7]], [[3, 2]]]])  # [1, 3 tokens, 1 layer, 2]
    with replayed(block, routing):
        found = block(given)
    probabilities = (given[0] @ block.gate.weight.T).softmax(-1)
    for token, experts in enumerate(routing[0, :, 0].tolist()):
        total = sum(probabilities[token, expert] for expert in experts)
        expected = torch.zeros(64)
        for expert in experts:
            gate, up = (block.experts.gate_up_proj[expert] @ given[0, token]).chunk(2)
            result = block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            expected = expected + probabilities[token, expert] / total * result
        torch.testing.assert_close(found[0, token], expected, rtol=1e-4, atol=1e-5)
    found.sum().backward()
    assert block.gate.weight.grad.abs().max() > 0
    untouched = [expert for expert in range(8) if expert not in {0, 1, 2, 3, 5, 7}]
    assert block.experts.down_proj.grad[untouched].abs().max() == 0


@pytest.mark.parametrize("slots", [8, 2])
def test_an_engine_says_which_experts_its_completions_took(tiny_moe_folder: Path, slots: int) -> None:
    """In fp32 the same as one forward pass over prompt and response; the last token was never fed."""
    settings = EngineSettings(slots=8)
    engine = create("transformers", tiny_moe_folder, Precision.named("fp32"), settings, record_routing=True)
    engine._slots = slots  # type: ignore[attr-defined]
    plain = create("transformers", tiny_moe_folder, Precision.named("fp32"), settings)
    sampling = Sampling(max_tokens=12)
    found = engine.generate(REQUESTS, sampling, stop_token_ids=[1])
    assert found == plain.generate(REQUESTS, sampling, stop_token_ids=[1])
    assert len({len(completion.token_ids) for completion in found}) > 1
    model = cast(tiny_moe_folder, "fp32")
    for request, completion in zip(REQUESTS, found, strict=True):
        fed = torch.tensor([[*request.prompt_ids, *completion.token_ids[:-1]]])
        expected = routing_of(model, fed)[0].numpy()
        assert completion.routing is not None
        np.testing.assert_array_equal(completion.routing, expected)
        forced = forced_routing(model, request.prompt_ids, completion.token_ids)
        np.testing.assert_array_equal(forced, expected)


def test_engines_and_models_that_do_not_say_are_refused(tiny_moe_folder: Path, tiny_model_folder: Path) -> None:
    precision, settings = Precision.named("bf16"), EngineSettings(slots=8)
    with pytest.raises(UserError, match="router_replay"):
        create("vllm", tiny_moe_folder, precision, settings, record_routing=True)
    dense = cast(tiny_model_folder, "fp32")
    assert routers(dense) == []
    with pytest.raises(UserError, match="no routers"), recorded(dense):
        pass


def test_routers_of_another_kind_are_not_replayed() -> None:
    """Mixtral's weighs its experts in a way of its own."""
    config = MixtralConfig(
        vocab_size=24, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    with pytest.raises(UserError, match="router_replay"), replayed(MixtralForCausalLM(config), torch.zeros(1, 2, 1, 2)):
        pass
