"""The emulated matmul against float64 and against PyTorch's native 16-bit kernels, forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.precision import emulation
from halfmatch.precision.emulation import EmulatedLinear, RoundingLinear, is_emulated, linear

DTYPES = [torch.bfloat16, torch.float16]
SIGNIFICAND_BITS = {torch.bfloat16: 8, torch.float16: 11}
LOWEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}
SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 70), st.integers(1, 20), st.booleans(), st.integers(0, 2**31))


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbours in `dtype` at `values`, in float64."""
    exponents = (torch.frexp(values.double()).exponent - 1).clamp_min(LOWEST_EXPONENT[dtype])
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponents - SIGNIFICAND_BITS[dtype] + 1)


def tensors(shape: tuple[int, int, int, bool, int], dtype: torch.dtype):
    """x [2, rows, in], w [out, in], b [out] or None, dy [2, rows, out]: normal numbers of `dtype`."""
    rows, width, out, biased, seed = shape
    torch.manual_seed(seed)
    x, w, b, dy = (torch.randn(size).to(dtype) for size in ((2, rows, width), (out, width), (out,), (2, rows, out)))
    return x, w, b if biased else None, dy


def forward_and_backward(function, x, w, b, dy):
    """[y, dx, dw, db] of `function`, and no db without b."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, w, b) if tensor is not None]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def accumulation_bounds(x, w, b, dy):
    """How far fp32 sums may be from exact ones: terms · 2⁻²³ · Σ|terms|, for [y, dx, dw, db]."""
    magnitudes = forward_and_backward(
        torch.nn.functional.linear, *(None if tensor is None else tensor.double().abs() for tensor in (x, w, b, dy))
    )
    rows, width, out = x.shape[0] * x.shape[1], x.shape[2], w.shape[0]
    return [(terms + 1) * 2.0**-23 * sums for terms, sums in zip((width, out, rows, rows), magnitudes, strict=False)]


@pytest.mark.parametrize("dtype", DTYPES)
@given(shape=SHAPES)
def test_rounding_inputs_alone_gives_float64s_of_the_rounded_inputs(dtype, shape):
    given_tensors = [None if tensor is None else tensor * 1.001 for tensor in tensors(shape, torch.float32)]
    x, w, b, dy = given_tensors
    layer = RoundingLinear(torch.nn.Linear(w.shape[1], w.shape[0], bias=b is not None), dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
        if b is not None:
            layer.bias.copy_(b)
    inputs = x.clone().requires_grad_()
    result = layer(inputs)
    found = [result.detach(), *torch.autograd.grad(result, [inputs, *layer.parameters()], dy)]
    rounded = [tensor.to(dtype).float() for tensor in (x, w)] + [b, dy.to(dtype).float()]
    exact = forward_and_backward(
        torch.nn.functional.linear, *(None if tensor is None else tensor.double() for tensor in rounded)
    )
    if b is not None:
        exact[-1] = dy.double().sum((0, 1))  # a sum, not a product: of what was not rounded
    for value, right, bound in zip(found, exact, accumulation_bounds(x, w, b, dy), strict=True):
        assert value.dtype == torch.float32
        assert ((value - right).abs() <= 1.02 * bound).all()
    with torch.no_grad():
        assert torch.equal(layer(x), result)
        layer.weight.mul_(2)
        assert not torch.equal(layer(x), result)


@pytest.mark.parametrize("dtype", DTYPES)
@given(shape=SHAPES)
def test_result_and_gradients_are_float64s_rounded_once(dtype, shape):
    given_tensors = tensors(shape, dtype)
    exact = forward_and_backward(
        torch.nn.functional.linear, *(None if tensor is None else tensor.double() for tensor in given_tensors)
    )
    found = forward_and_backward(linear, *given_tensors)
    for value, right, bound in zip(found, exact, accumulation_bounds(*given_tensors), strict=True):
        assert value.dtype == dtype
        # one rounding is half a unit of either neighbour, after sums in fp32
        assert ((value.double() - right).abs() <= ulp(right, dtype) / 2 * (1 + 2.0**-10) + bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(shape=SHAPES)
def test_result_and_gradients_are_native_ones_to_a_unit_in_the_last_place(dtype, shape):
    given_tensors = tensors(shape, dtype)
    native = forward_and_backward(torch.nn.functional.linear, *given_tensors)
    found = forward_and_backward(linear, *given_tensors)
    for value, other, bound in zip(found, native, accumulation_bounds(*given_tensors), strict=True):
        assert value.dtype == other.dtype
        assert value.shape == other.shape
        assert ((value.double() - other.double()).abs() <= ulp(value, dtype) + 2 * bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(shape=SHAPES)
def test_where_fp32_sums_are_exact_the_result_is_float64s_rounded(dtype, shape):
    rows, width, out, biased, seed = shape
    torch.manual_seed(seed)
    x, w, b, dy = (
        torch.randint(-7, 8, size).to(dtype) for size in ((2, rows, width), (out, width), (out,), (2, rows, out))
    )
    b = b if biased else None
    exact = forward_and_backward(
        torch.nn.functional.linear, *(None if tensor is None else tensor.double() for tensor in (x, w, b, dy))
    )
    for value, right in zip(forward_and_backward(linear, x, w, b, dy), exact, strict=True):
        assert torch.equal(value, right.to(dtype))


def test_products_are_not_rounded_before_they_are_summed():
    """1 + 2⁻¹¹ is exact in fp32, and halfway between two neighbours in fp16, which rounds it to 1, the even one."""
    x = torch.tensor([[1.0, 2.0**-11, 2.0**-11]], dtype=torch.float16)
    w = torch.ones(1, 3, dtype=torch.float16)
    assert linear(x[:, :2], w[:, :2]).item() == 1.0
    # two such halves make a whole unit in the last place, lost if the running sum were fp16
    assert linear(x, w).item() == 1.0 + 2.0**-10


def test_fp16_overflows_to_infinity_as_native_kernels_do():
    x = torch.tensor([[256.0, 1.0], [-256.0, 0.0], [255.0, 239.0]], dtype=torch.float16)
    w = torch.tensor([[256.0, 1.0]], dtype=torch.float16)
    assert linear(x, w).flatten().tolist() == [float("inf"), float("-inf"), 65504.0]
    assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w))
    large = torch.full((1, 1), 300.0, dtype=torch.float16, requires_grad=True)
    (gradient,) = torch.autograd.grad(linear(large, large.detach()), large, torch.full_like(large, 300.0))
    assert gradient.item() == float("inf")


def test_only_what_needs_a_gradient_gets_one():
    x, w, b, dy = tensors((2, 3, 4, True, 0), torch.bfloat16)
    y = linear(x.requires_grad_(), w, b)
    y.backward(dy)
    assert x.grad is not None
    assert w.grad is None
    assert b.grad is None


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float16)])
def test_other_dtypes_are_refused(x_dtype, w_dtype):
    with pytest.raises(TypeError, match="16-bit"):
        linear(torch.ones(2, 2, dtype=x_dtype), torch.ones(2, 2, dtype=w_dtype))


def test_the_layer_refuses_inputs_of_another_dtype():
    layer = EmulatedLinear(torch.nn.Linear(2, 2, dtype=torch.float16))
    with torch.no_grad(), pytest.raises(TypeError, match="16-bit"):
        layer(torch.ones(2, 2))


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_the_function_with_and_without_autograd(bias):
    plain = torch.nn.Linear(5, 7, bias=bias, dtype=torch.bfloat16)
    layer, x = EmulatedLinear(plain), torch.randn(3, 5).bfloat16()
    assert layer.weight is plain.weight
    assert [name for name, _ in layer.named_parameters()] == [name for name, _ in plain.named_parameters()]
    expected = linear(x, plain.weight, plain.bias)
    assert torch.equal(layer(x), expected)
    assert expected.requires_grad
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)


def test_the_layer_sees_new_weights():
    layer = EmulatedLinear(torch.nn.Linear(4, 4, bias=False, dtype=torch.float16)).requires_grad_(False)
    x = torch.randn(8, 4).half()
    for change in (lambda w: w.copy_(torch.randn(4, 4)), lambda w: torch._foreach_copy_([w], [torch.randn(4, 4)])):
        with torch.no_grad():
            layer(x)
            change(layer.weight)
            assert torch.equal(layer(x), linear(x, layer.weight))
    layer.weight.data = torch.randn(4, 4).half()
    with torch.no_grad():
        assert torch.equal(layer(x), linear(x, layer.weight))


@pytest.mark.parametrize("fused", [True, False])
def test_a_layer_that_is_trained_sees_what_the_optimizer_did(fused):
    """A fused optimizer changes weights without the counter that tells of changes."""
    layer = RoundingLinear(torch.nn.Linear(8, 8), torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=fused)
    x = torch.randn(4, 8)
    for _ in range(2):
        with torch.no_grad():
            layer(x)
        layer(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            expected = x.bfloat16().float() @ layer.weight.bfloat16().float().T + layer.bias
            torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    ("units", "dtype", "emulate", "device", "expected"),
    [
        ({"avx512_bf16"}, "bf16", "auto", "cpu", False),
        ({"amx_bf16"}, "bf16", "auto", "cpu", False),
        ({"avx512_bf16"}, "fp16", "auto", "cpu", True),
        ({"avx512_fp16"}, "fp16", "auto", "cpu", False),
        ({"amx_fp16"}, "bf16", "auto", "cpu", True),
        (set(), "bf16", "auto", "cpu", True),
        (set(), "fp16", "never", "cpu", False),
        ({"avx512_bf16"}, "bf16", "always", "cpu", True),
        (set(), "fp32", "always", "cpu", False),
        (set(), "bf16", "always", "cuda", False),
        (set(), "bf16", "auto", "cuda:1", False),
    ],
)
def test_what_is_emulated(monkeypatch, units, dtype, emulate, device, expected):
    monkeypatch.setattr(emulation, "cpu_units", lambda: frozenset(units))
    assert is_emulated(dtype, emulate, device) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\nbugs : spectre\n", {"avx512_bf16"}),
        ("flags : fpu avx2\n", set()),
        ("processor : 0\nFeatures\t: fp asimd fphp asimdhp bf16 i8mm\n", {"bf16"}),
        ("", set()),
    ],
)
def test_units_are_read_from_the_kernels_list(monkeypatch, text, expected):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert emulation.cpu_units() == expected


def test_a_machine_without_the_kernels_list_has_no_known_units(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert emulation.cpu_units() == frozenset()
