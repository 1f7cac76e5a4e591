"""The value model against its definition, in every precision; PPO's value loss against a float64 loop."""

import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.precision import Precision
from halfmatch.precision.casting import cast_model
from halfmatch.precision.monitors import audit_matmuls
from halfmatch.rl.batching import collate
from halfmatch.rl.values import ValueModel, explained_variance, token_values, value_loss

EOS = 1
PROMPTS = [[2, 10, 3], [4], [5, 6, 7, 8, 9]]
RESPONSES = [[13, 14, 15, 11, EOS], [12, 13, 14, 15, 16, 17, 18], [11, EOS]]


@pytest.fixture
def model(tiny_model_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()


def with_random_head(model):
    values = ValueModel(model)
    torch.nn.init.normal_(values.value_head.weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(values.value_head.bias, 0.5)
    return values


# ------------------------------------------------------------------------------------------------------ the model
def test_values_are_those_of_the_states_that_tokens_were_sampled_in(model):
    values = with_random_head(model)
    found = token_values(values, collate(PROMPTS, RESPONSES, {EOS}))
    assert found.dtype == torch.float32
    assert found.shape == (3, 7)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        for position, token in enumerate(response):
            before = torch.tensor([[*prompt, *response[:position]]])  # the token itself is not known yet
            hidden = model.base_model(input_ids=before).last_hidden_state[0, -1]
            expected = hidden @ values.value_head.weight[0] + 0.5
            assert found[row, position].item() == pytest.approx(expected.item(), abs=1e-4), (row, position, token)
        assert not found[row, len(response) :].any()


def test_a_new_critic_values_everything_at_zero_and_shares_no_weight_with_the_policy(model):
    values = ValueModel(model)
    found = token_values(values, collate(PROMPTS, RESPONSES, {EOS}))
    assert not found.any()
    storages = {parameter.data_ptr() for parameter in model.parameters()}
    assert not storages & {parameter.data_ptr() for parameter in values.parameters()}
    assert {name.split(".")[0] for name, _ in values.named_parameters()} == {"backbone", "value_head"}


@pytest.mark.parametrize("fp32_modules", [(), ("value_head",), ("value_head", "norm", "attention")])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_the_critic_computes_in_the_policys_precision(model, name, fp32_modules):
    precision = Precision.named(name, emulate="always", fp32_modules=fp32_modules)
    exact = with_random_head(model)
    values = deepcopy(exact)
    cast_model(values, precision.compute, precision.fp32_modules, precision.emulate)
    audited = audit_matmuls(values, precision, torch.tensor([PROMPTS[0]]))
    dtype = (
        torch.float32
        if "value_head" in fp32_modules or name == "fp32"
        else values.backbone.layers[0].mlp.up_proj.weight.dtype
    )
    assert audited["value_head"] == values.value_head.weight.dtype == dtype
    batch = collate(PROMPTS, RESPONSES, {EOS})
    found, expected = token_values(values, batch), token_values(exact, batch)
    assert found.dtype == torch.float32
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}[name]
    assert (found - expected).norm() < 20 * unit * expected.norm()
    if name != "fp32":
        rounded = found[batch.response_mask].to(dtype).float()
        assert torch.equal(rounded, found[batch.response_mask])
        found.sum().backward()
        assert values.value_head.weight.grad.dtype == dtype


# ------------------------------------------------------------------------------------------------------- the loss
def naive_loss(values, old, returns, mask, clip):
    """Mean over tokens of the larger of the two squared errors, halved; and how often the clipped one is larger."""
    total, binding, tokens = 0.0, 0, 0
    for row in range(len(values)):
        for column in range(len(values[0])):
            if not mask[row][column]:
                continue
            value, before, target = values[row][column], old[row][column], returns[row][column]
            clipped = min(max(value, before - clip), before + clip)
            total += 0.5 * max((value - target) ** 2, (clipped - target) ** 2)
            binding += (clipped - target) ** 2 > (value - target) ** 2
            tokens += 1
    return total / max(tokens, 1), binding


@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.2, 0.5, math.inf]))
def test_the_loss_and_its_gradient_against_loops_in_float64(seed, clip):
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    values.requires_grad_()
    loss, binding = value_loss(values, values_old=old, returns=returns, mask=mask, clip=clip, tokens=int(mask.sum()))
    arguments = [tensor.tolist() for tensor in (values, old, returns, mask)]
    expected, expected_binding = naive_loss(*arguments, clip)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert binding == expected_binding
    loss.backward()
    for row in range(4):
        for column in range(5):
            shifted = []
            for step in (1e-6, -1e-6):
                moved = deepcopy(arguments[0])
                moved[row][column] += step
                shifted.append(naive_loss(moved, *arguments[1:], clip)[0])
            slope = (shifted[0] - shifted[1]) / 2e-6
            if clip > 0:  # else every value stands at a corner
                assert values.grad[row, column].item() == pytest.approx(slope, abs=1e-5)


def test_a_clipped_value_by_hand():
    # V' 0, R 1, clip 0.2: V 0.5 is beyond the clip and better than it, so the loss is that of 0.2, without gradient;
    # V −0.5 is beyond it and worse, so it is pulled back.
    values = torch.tensor([[0.5, -0.5, 0.1]], requires_grad=True)
    loss, binding = value_loss(
        values, values_old=torch.zeros(1, 3), returns=torch.ones(1, 3),
        mask=torch.ones(1, 3, dtype=torch.bool), clip=0.2, tokens=3,
    )  # fmt: skip
    loss.backward()
    assert loss.item() == pytest.approx((0.64 + 2.25 + 0.81) / 6)
    assert values.grad[0].tolist() == pytest.approx([0, -0.5, -0.3])
    assert binding == 1


def test_what_stands_behind_the_mask_reaches_neither_loss_nor_gradient():
    values = torch.tensor([[0.5, math.nan]], requires_grad=True)
    behind = torch.tensor([[0.0, math.nan]])
    mask = torch.tensor([[True, False]])
    loss, _ = value_loss(values, values_old=behind, returns=behind, mask=mask, clip=1.0, tokens=1)
    loss.backward()
    assert loss.item() == 0.125
    assert values.grad.tolist() == [[0.5, 0.0]]


def test_explained_variance_by_hand():
    mask = torch.tensor([[True, True, True, True, False]])
    returns = torch.tensor([[0.0, 0.0, 1.0, 1.0, 9.0]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((1, 5), 0.5), returns, mask) == 0.0
    assert explained_variance(1 - returns, returns, mask) == -3.0
    assert explained_variance(returns, torch.ones(1, 5), mask) is None
