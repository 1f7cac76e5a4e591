import math

import pytest
import torch
from torch import nn

from halfmatch.precision.masters import MasterWeights


class Tied(nn.Module):
    """An embedding and a head that share their weight, a norm between them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens)))


def cast(dtype, reduce=torch.float32, keep_norm=False):
    torch.manual_seed(0)
    model = Tied()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.to(dtype)
    if keep_norm:
        model.norm.float()
    return model, weights, MasterWeights(model, weights, reduce)


def test_tied_weights_have_one_master():
    _, weights, masters = cast(torch.bfloat16)
    assert list(masters.parameters) == ["embedding.weight", "norm.weight", "norm.bias"] == list(weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_keep_what_rounding_would_lose(dtype):
    model, weights, masters = cast(dtype)
    for name, master in masters.named():
        assert master.dtype == torch.float32
        assert torch.equal(master, weights[name])
        assert torch.equal(dict(model.named_parameters())[name], weights[name].to(dtype))
    assert not torch.equal(weights["embedding.weight"], weights["embedding.weight"].to(dtype).float())


def test_a_float32_model_has_no_second_copy():
    model, _, masters = cast(torch.float32)
    for name, parameter in model.named_parameters():
        assert masters.parameters[name] is parameter


def test_a_float32_module_of_a_16_bit_model_is_its_own_master():
    model, _, masters = cast(torch.bfloat16, keep_norm=True)
    assert masters.parameters["norm.weight"] is model.norm.weight
    assert masters.parameters["embedding.weight"] is not model.embedding.weight


def micro_gradients(model, count):
    """Gradients of `count` micro-batches, each taken alone by plain autograd on the 16-bit weights."""
    for step in range(count):
        loss = model(torch.tensor([step, step + 1])).float().square().mean()
        yield dict(
            zip(
                (name for name, _ in model.named_parameters()),
                torch.autograd.grad(loss, list(model.parameters())),
                strict=True,
            )
        )


def accumulate(model, count):
    for step in range(count):
        model(torch.tensor([step, step + 1])).float().square().mean().backward()


def test_16_bit_gradients_are_summed_in_float32_and_freed():
    model, _, masters = cast(torch.bfloat16)
    expected = dict.fromkeys(masters.parameters, 0.0)
    in_16_bits = {name: torch.zeros((), dtype=torch.bfloat16) for name in masters.parameters}
    for gradients in micro_gradients(model, 5):
        for name, gradient in gradients.items():
            expected[name] = expected[name] + gradient.float()
            in_16_bits[name] = in_16_bits[name] + gradient
    accumulate(model, 5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(masters.parameters[name].grad, expected[name])
    assert any(not torch.equal(in_16_bits[name].float(), expected[name]) for name in expected)


@pytest.mark.parametrize("keep_norm", [False, True])
def test_reduce_rounds_the_running_sum(keep_norm):
    model, _, masters = cast(torch.float16, reduce=torch.bfloat16, keep_norm=keep_norm)
    plain, _, _ = cast(torch.float16, keep_norm=keep_norm)
    expected = {name: torch.zeros(()) for name in masters.parameters}
    if keep_norm:  # LayerNorm mixes dtypes only by hand
        model.forward = plain.forward = None
        for net in (model, plain):
            net.forward = lambda t, net=net: net.head(net.norm(net.embedding(t).float()).half())
    for gradients in micro_gradients(plain, 4):
        for name, gradient in gradients.items():
            expected[name] = (expected[name] + gradient.float()).bfloat16().float()
    accumulate(model, 4)
    for name, master in masters.parameters.items():
        assert torch.equal(master.grad, expected[name]), name


def test_clipping_by_the_global_norm():
    _, _, masters = cast(torch.bfloat16)
    for master in masters.parameters.values():
        master.grad = torch.full_like(master, 2.0)
    count = 7 * 5 + 5 + 5
    assert masters.clip_gradients(None) == pytest.approx(2 * math.sqrt(count))
    assert masters.clip_gradients(1.0) == pytest.approx(2 * math.sqrt(count))
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in masters.gradients))
    assert norm == pytest.approx(1.0, rel=1e-5)
    before = [gradient.clone() for gradient in masters.gradients]
    masters.clip_gradients(5.0)
    assert all(torch.equal(old, new) for old, new in zip(before, masters.gradients, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_gradients_that_are_not_finite_have_no_norm_and_are_not_touched(poison):
    _, _, masters = cast(torch.bfloat16)
    for master in masters.parameters.values():
        master.grad = torch.full_like(master, 2.0)
    masters.parameters["norm.bias"].grad[3] = poison
    assert math.isnan(masters.clip_gradients(1.0))
    assert masters.parameters["norm.weight"].grad.tolist() == [2.0] * 5


def test_small_updates_add_up_in_the_masters():
    """A change below half a unit in the last place is lost to a 16-bit weight, again and again."""
    model, weights, masters = cast(torch.bfloat16)
    start = model.embedding.weight.detach().clone()
    with torch.no_grad():
        for _ in range(64):
            masters.parameters["embedding.weight"] *= 1 + 2**-12
            masters.round_into_model()
    expected = weights["embedding.weight"].double() * (1 + 2**-12) ** 64
    torch.testing.assert_close(model.embedding.weight.double(), expected, rtol=2**-8, atol=0)
    assert (model.embedding.weight != start).float().mean() > 0.9
    assert torch.equal(start, start * torch.tensor(1 + 2**-12, dtype=torch.bfloat16))
    assert model.head.weight is model.embedding.weight


def test_masters_that_were_filled_are_rounded_into_the_model():
    model, _, masters = cast(torch.float16)
    weights = {name: torch.randn_like(weight) for name, weight in masters.named()}
    for name, master in masters.tensors().items():
        master.copy_(weights[name])
    masters.round_into_model()
    for name, parameter in model.named_parameters():
        assert torch.equal(masters.parameters[name], weights[name])
        assert torch.equal(parameter, weights[name].half())


def test_frozen_parameters_have_no_master():
    model = Tied()
    model.embedding.weight.requires_grad_(False)
    masters = MasterWeights(model, {name: p.detach().clone() for name, p in model.named_parameters()})
    assert list(masters.parameters) == ["norm.weight", "norm.bias"]
