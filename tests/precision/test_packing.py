"""Packed sequences: every one as if it were alone, in whatever model and attention, and no padding computed."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from halfmatch.errors import UserError
from halfmatch.precision import attention
from halfmatch.precision.casting import cast_model
from halfmatch.precision.packing import Packing, Rows, of_packed

SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral, a window of 4": (MistralForCausalLM, MistralConfig, {"sliding_window": 4}),
    "qwen2, a window of 4 in the second layer": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4},
    ),
}
SEQUENCES = [[*range(3, 18)] * 5, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [5], [2, 7, 1, 8, 2, 8, 1], [16, 1, 8]]
LENGTHS = torch.tensor([len(sequence) for sequence in SEQUENCES])


def model_of(kind):
    torch.manual_seed(0)
    model, config, more = MODELS[kind]
    return model(config(**SIZES, **more)).eval()


def padded():
    rows = torch.full((len(SEQUENCES), int(LENGTHS.max()) + 2), 18)
    for row, sequence in zip(rows, SEQUENCES, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return rows


def test_neighbours_with_as_many_blocks_of_keys_are_computed_together():
    groups = Packing.of(torch.tensor([130, 129, 128, 70, 65, 64, 1, 100])).groups
    assert [(group.count, group.width) for group in groups] == [(2, 130), (3, 128), (2, 64), (1, 100)]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_what_is_packed_and_unpacked_is_what_it_was_and_zeros(lengths):
    packing = Rows.of(torch.tensor(lengths))
    rows = torch.arange(1.0, 1 + len(lengths) * packing.width * 2).view(len(lengths), packing.width, 2)
    packed = packing.pack(rows)
    expected = [rows[row, place].tolist() for row, length in enumerate(lengths) for place in range(length)]
    assert packed[0].tolist() == expected
    inside = torch.arange(packing.width) < torch.tensor(lengths)[:, None]
    assert torch.equal(packing.unpack(packed), rows * inside[:, :, None])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("implementation", [attention.NAME, attention.FUSED_NAME])
def test_every_sequence_is_computed_as_if_it_were_alone(kind, implementation):
    """Against one pass a sequence with PyTorch's attention, which knows nothing of packing; gradients too."""
    alone, model = model_of(kind), model_of(kind)
    cast_model(model, "fp32")
    model.set_attn_implementation(implementation)
    packing = Packing.of(LENGTHS)
    logits = model(**packing.inputs(model, padded())).logits
    expected = torch.cat([alone(torch.tensor([sequence]), use_cache=False).logits for sequence in SEQUENCES], dim=1)
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    for each in (logits, expected):
        (each * weights).sum().backward()
    for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fp32_modules", [(), ("attention", "norm"), ("between_matmuls",)])
def test_in_16_bits_a_sequence_has_the_same_bits_in_any_company(dtype, fp32_modules):
    model = model_of("llama")
    cast_model(model, dtype, fp32_modules, emulate="always")
    company = Packing.of(LENGTHS)
    rows = padded()
    together = company.rows.unpack(model(**company.inputs(model, rows)).logits)
    alone = Packing.of(LENGTHS[:1])
    assert torch.equal(model(**alone.inputs(model, rows[:1])).logits[0], together[0])


def test_a_model_in_float64_finds_the_sequences_by_their_positions():
    model = model_of("llama").double()
    packing = Packing.of(LENGTHS)
    found = model(**packing.inputs(model, padded())).logits
    expected = torch.cat([model(torch.tensor([sequence]), use_cache=False).logits for sequence in SEQUENCES], dim=1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_layers_are_given_no_padding():
    model, seen = model_of("llama"), []
    cast_model(model, "bf16")
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, result: seen.append(result.shape))
    packing = Packing.of(LENGTHS)
    model(**packing.inputs(model, padded()))
    assert seen == [(1, 96, 16)]  # 75 + 10 + 1 + 7 + 3 tokens


def test_a_model_that_does_not_tell_its_attention_is_an_error():
    model = model_of("llama")
    cast_model(model, "fp32")
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *given, packing, _forward=forward, **options: _forward(*given, **options)
    with pytest.raises(UserError, match="does not hand options of its forward pass on to LlamaAttention"):
        model(**Packing.of(LENGTHS).inputs(model, padded()))


def test_kinds_of_layers_that_are_not_known_are_an_error():
    config = SimpleNamespace(_attn_implementation=attention.NAME, layer_types=["full_attention", "linear_attention"])
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    with pytest.raises(UserError, match="layers of the kind linear_attention, which are not known"):
        Packing.of(LENGTHS).inputs(model, padded())


def test_without_packing_an_attention_function_is_what_it_was():
    def plain(module, query, key, value, mask, scaling, **options):
        return (query, key, value, mask, scaling, options), None

    query = torch.zeros(1, 1, 2, 3)
    assert of_packed(plain)(None, query, 2, 3, None, 0.5, sliding_window=7)[0] == (
        query, 2, 3, None, 0.5, {"sliding_window": 7},
    )  # fmt: skip
