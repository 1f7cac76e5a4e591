"""What casting a model changes, and what it keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from halfmatch.errors import UserError
from halfmatch.precision import attention, torch_dtype
from halfmatch.precision.casting import cast_model
from halfmatch.precision.emulation import EmulatedLinear

SIZES = {
    "vocab_size": 24,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.2,
}
IDS = torch.arange(24).reshape(2, 12)


def qwen3(tied=False):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)).eval()


def cosine(first, second):
    return torch.nn.functional.cosine_similarity(first.float().flatten(), second.float().flatten(), dim=0).item()


@pytest.mark.parametrize("emulate", ["always", "never"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_cast_model_is_the_fp32_model_to_its_precision(dtype, emulate):
    model = qwen3()
    exact = model(IDS).logits
    cast_model(model, dtype, emulate=emulate)
    assert {parameter.dtype for parameter in model.parameters()} == {torch_dtype(dtype)}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}, "rotary frequencies must not be rounded"
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert {isinstance(module, EmulatedLinear) for module in linears} == {emulate == "always"}
    logits = model(IDS).logits
    assert logits.dtype == torch_dtype(dtype)
    error = (logits.float() - exact).norm() / exact.norm()
    assert 0 < error < 8 * torch.finfo(torch_dtype(dtype)).eps


def test_emulated_and_native_kernels_agree():
    native, emulated = qwen3(), qwen3()
    cast_model(native, "bf16", emulate="never")
    cast_model(emulated, "bf16", emulate="always")
    difference = native(IDS).logits.float() - emulated(IDS).logits.float()
    assert difference.norm() / native(IDS).logits.float().norm() < torch.finfo(torch.bfloat16).eps


def test_fp32_keeps_every_weight_and_rounds_nothing():
    model = qwen3()
    exact, before = model(IDS).logits, copy.deepcopy(model.state_dict())
    cast_model(model, "fp32", fp32_modules=("lm_head", "norm"), emulate="always")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(isinstance(module, EmulatedLinear) for module in model.modules())
    torch.testing.assert_close(model(IDS).logits, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_an_fp32_head_gives_fp32_logits_of_the_rounded_states(tied):
    model = qwen3(tied)
    weight = model.lm_head.weight.detach().clone()
    cast_model(model, "bf16", fp32_modules=("lm_head",))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert torch.equal(model.lm_head.weight, weight)
    embedded = model.model.embed_tokens(IDS)
    assert embedded.dtype == torch.bfloat16
    assert torch.equal(embedded, model.model.embed_tokens.weight.bfloat16()[IDS])
    states = model.model(IDS).last_hidden_state
    assert states.dtype == torch.bfloat16
    logits = model(IDS).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), states.double() @ weight.double().T, atol=1e-4, rtol=1e-5)


def test_fp32_norms_compute_in_fp32_and_round_their_result():
    model = qwen3()
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    weight = model.model.norm.weight.detach().clone()
    cast_model(model, "bf16", fp32_modules=("norm",))
    norms = [module for module in model.modules() if isinstance(module, Qwen3RMSNorm)]
    assert len(norms) == 2 * 4 + 1  # two a layer, two on queries and keys, one at the end
    assert {norm.weight.dtype for norm in norms} == {torch.float32}
    x = torch.randn(5, 64).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + model.model.norm.variance_epsilon).rsqrt()
    found = model.model.norm(x)
    assert found.dtype == torch.bfloat16
    assert (found == (exact * weight.double()).bfloat16()).float().mean() > 0.99
    assert model(IDS).logits.dtype == torch.bfloat16


def test_an_fp32_value_head_gives_fp32_values():
    model = qwen3()
    model.value_head = torch.nn.Linear(64, 1)
    cast_model(model, "fp16", fp32_modules=("value_head",), emulate="always")
    assert model.value_head.weight.dtype == torch.float32
    assert model.value_head(torch.ones(3, 64, dtype=torch.float16)).dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.float16


def test_an_fp32_router_decides_in_fp32():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    model = Qwen3MoeForCausalLM(config).eval()
    exact = model(IDS).logits
    cast_model(model, "bf16", fp32_modules=("router",))
    fp32 = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32]
    assert fp32 == [f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)]
    logits = model(IDS).logits
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact).norm() / exact.norm() < 0.05
    # What it is given is rounded; what it decides by is not: neither its weights nor its logits.
    given = torch.randn(2048, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    gate = model.model.layers[0].mlp.gate
    probabilities = (given.double() @ gate.weight.double().T).softmax(-1)
    assert torch.equal(gate(given)[2], probabilities.topk(2).indices)
    assert not torch.equal(gate(given)[2], (given @ gate.weight.bfloat16().T).float().softmax(-1).topk(2).indices)


def watched(model, module):
    """What a module is called with and what it gives, in a forward pass of the model."""
    calls = []
    handle = module.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True
    )
    model(IDS)
    handle.remove()
    return calls[0]


@pytest.mark.parametrize("fp32_modules", [("attention",), ("attention", "norm"), ("attention", "mlp", "lm_head")])
def test_fp32_attention_computes_in_fp32_and_rounds_its_result(fp32_modules):
    exact, model = qwen3(), qwen3()
    cast_model(exact, "fp32")
    cast_model(model, "bf16", fp32_modules, emulate="always")
    attention = model.model.layers[1].self_attn
    assert {parameter.dtype for parameter in attention.parameters()} == {torch.float32}
    _, given, (found, _) = watched(model, attention)
    assert found.dtype == torch.bfloat16
    assert all(angles.dtype == torch.float32 for angles in given["position_embeddings"])
    expected, _ = exact.model.layers[1].self_attn(
        hidden_states=given["hidden_states"].float(),
        position_embeddings=exact.model.rotary_emb(given["hidden_states"].float(), torch.arange(12)[None]),
        attention_mask=None,
    )
    assert (found == expected.bfloat16()).float().mean() > 0.99


def test_fp32_mlps_compute_in_fp32_and_round_their_result():
    exact, model = qwen3(), qwen3()
    cast_model(model, "fp16", ("mlp",), emulate="always")
    assert not any(isinstance(module, EmulatedLinear) for module in model.model.layers[0].mlp.modules())
    assert isinstance(model.model.layers[0].self_attn.q_proj, EmulatedLinear)
    (given,), _, found = watched(model, model.model.layers[0].mlp)
    assert torch.equal(given, given.half().float())
    assert found.dtype == torch.float16
    assert (found == exact.model.layers[0].mlp(given.float()).half()).float().mean() > 0.99


def test_a_part_that_a_model_does_not_have_is_refused():
    model = qwen3()
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(UserError, match="Qwen3ForCausalLM has no module that is known as its attention"):
        cast_model(model, "bf16", ("attention",))


def test_between_matmuls_only_what_is_multiplied_is_rounded():
    exact, model, rounded = qwen3(tied=True), qwen3(tied=True), qwen3(tied=True)
    cast_model(exact, "fp32")
    cast_model(model, "bf16", ("between_matmuls",))
    cast_model(rounded, "bf16", emulate="always")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    layer = model.model.layers[0]
    (given,), _, found = watched(model, layer.mlp.up_proj)
    assert given.dtype == found.dtype == torch.float32
    exactly = given.bfloat16().double() @ layer.mlp.up_proj.weight.bfloat16().double().T
    torch.testing.assert_close(found.double(), exactly, rtol=1e-5, atol=1e-5)
    _, _, (attended, _) = watched(model, layer.self_attn)
    assert attended.dtype == torch.float32
    logits = model(IDS).logits
    assert logits.dtype == torch.float32
    error, of_all = ((logits_ - exact(IDS).logits).norm() for logits_ in (logits, rounded(IDS).logits.float()))
    assert 0 < error < of_all


def test_between_matmuls_attention_multiplies_rounded_queries_keys_and_values():
    model = qwen3()
    cast_model(model, "bf16", ("between_matmuls",))
    seen = []
    name = model.config._attn_implementation
    assert name == attention.rounding_name(attention.NAME, "bf16")
    plain = attention.attention

    def watching(module, query, key, value, *args, **options):
        seen.extend([query.dtype, key.dtype, value.dtype])
        return plain(module, query, key, value, *args, **options)

    query, key, value = (torch.randn(1, heads, 5, 32) for heads in (2, 1, 1))
    found, _ = attention._of_rounded(watching, torch.bfloat16)(model, query, key, value, None)
    assert set(seen) == {torch.bfloat16}
    expected, _ = plain(model, query.bfloat16(), key.bfloat16(), value.bfloat16(), None)
    assert torch.equal(found, expected)


def test_between_matmuls_parts_in_fp32_round_nothing():
    exact, model = qwen3(), qwen3()
    cast_model(exact, "fp32")
    cast_model(model, "bf16", ("between_matmuls", "attention", "mlp", "lm_head"))
    assert torch.equal(model(IDS).logits, exact(IDS).logits)


def test_between_matmuls_other_matmuls_than_linear_layers_are_refused():
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32))
    with pytest.raises(UserError, match=r"between_matmuls.*multiplies by its weights in a way of its own"):
        cast_model(model, "bf16", ("between_matmuls",))


@pytest.mark.parametrize("fp32_modules", [(), ("lm_head", "norm"), ("attention",), ("mlp",), ("between_matmuls",)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_are_the_fp32_models_to_their_precision(dtype, fp32_modules):
    exact, model = qwen3(tied=True), qwen3(tied=True)
    cast_model(model, dtype, fp32_modules, emulate="always")
    for each in (exact, model):
        logprobs = torch.log_softmax(each(IDS).logits.float(), dim=-1)
        (-logprobs[:, :-1].gather(2, IDS[:, 1:, None]).mean() * 64).backward()
    names = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype
        assert cosine(parameter.grad, names[name].grad) > 0.99, name


def test_checkpointed_and_plain_backward_passes_are_equal():
    gradients = []
    for checkpointed in (False, True):
        model = qwen3()
        cast_model(model, "bf16", fp32_modules=("norm",), emulate="always")
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(IDS, use_cache=False).logits.float().square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


def test_a_padding_mask_is_obeyed():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    cast_model(model, "bf16")
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), IDS[:1]], dim=1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 12, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = model(padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.float(), model(IDS[:1]).logits.float(), atol=0.1, rtol=0.05)


def test_a_cast_model_can_be_copied():
    model = qwen3(tied=True)
    cast_model(model, "bf16", fp32_modules=("lm_head", "norm"), emulate="always")
    twin = copy.deepcopy(model)
    assert torch.equal(twin(IDS).logits, model(IDS).logits)
    with torch.no_grad():
        twin.model.norm.weight.mul_(2)
    assert not torch.equal(twin(IDS).logits, model(IDS).logits)


def test_a_model_with_its_own_attention_is_refused():
    model = qwen3()
    model._can_set_attn_implementation = lambda: False
    with pytest.raises(UserError, match="Qwen3ForCausalLM computes attention in its own way"):
        cast_model(model, "bf16")
