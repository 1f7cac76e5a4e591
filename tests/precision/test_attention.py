"""Attention on a CPU against float64, against the roundings written out, and under padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.errors import UserError
from halfmatch.precision.attention import BLOCK, attention

DTYPES = [torch.bfloat16, torch.float16]
MODULE = torch.nn.Module()


def random_states(batch=2, heads=4, groups=2, queries=9, seen=9, width=16, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    shapes = (batch, heads, queries, width), (batch, groups, seen, width), (batch, groups, seen, width)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def exact(query, key, value, mask=None):
    """Softmax attention in float64, [B, T, H, D]; causal without a mask."""
    query, key, value = (states.double() for states in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@given(
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    queries=st.integers(1, 80),
    past=st.integers(0, 70),
    seed=st.integers(0, 1000),
)
def test_fp32_is_softmax_attention_forward_and_backward(groups, shared, queries, past, seed):
    states = random_states(2, groups * shared, groups, queries, queries + past, 8, seed=seed)
    leaves = [states_.requires_grad_() for states_ in states]
    result, _ = attention(MODULE, *leaves, None)
    expected = exact(*leaves)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn_like(result)
    found = torch.autograd.grad(result, leaves, direction)
    for gradient, right in zip(found, torch.autograd.grad(expected, leaves, direction.double()), strict=True):
        torch.testing.assert_close(gradient, right.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_full_pass_rounds_as_flash_attention(dtype):
    query, key, value = random_states(queries=40, seen=40, groups=4, dtype=dtype)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    scores = (query.double() @ key.double().mT / 4).masked_fill(~mask, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    expected = (weights.to(dtype).double() @ value.double() / weights.sum(-1, keepdim=True)).to(dtype)
    result, _ = attention(MODULE, query, key, value, None)
    assert result.dtype == dtype
    # fp32 sums flip a rounding now and then; another rounding of the weights would differ in half of all places
    assert (result.transpose(1, 2) == expected).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_rounds_as_paged_attention(dtype):
    query, key, value = random_states(batch=64, queries=1, seen=40, groups=4, dtype=dtype)
    weights = (query.double() @ key.double().mT / 4).softmax(-1)
    expected = (weights.to(dtype).double() @ value.double()).to(dtype)
    result, _ = attention(MODULE, query, key, value, None)
    assert result.dtype == dtype
    assert (result.transpose(1, 2) == expected).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
def test_16_bit_gradients_are_float64s_to_their_precision(dtype):
    leaves = [states.requires_grad_() for states in random_states(queries=30, seen=30, dtype=dtype)]
    result, _ = attention(MODULE, *leaves, None)
    expected, direction = exact(*leaves), torch.randn_like(result)
    found = torch.autograd.grad(result, leaves, direction)
    for gradient, right in zip(found, torch.autograd.grad(expected, leaves, direction.double()), strict=True):
        assert gradient.dtype == dtype
        error = (gradient.double() - right.double()).norm() / right.double().norm()
        assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@given(queries=st.integers(1, 40), past=st.integers(0, 300), behind=st.integers(1, 400), seed=st.integers(0, 100))
def test_what_stands_behind_the_mask_changes_no_bit(dtype, queries, past, behind, seed):
    seen = queries + past
    query, key, value = random_states(queries=queries, seen=seen + behind, dtype=dtype, seed=seed)
    mask = torch.ones(queries, seen, dtype=torch.bool).tril(past)[None, None]
    alone, _ = attention(MODULE, query, key[:, :, :seen], value[:, :, :seen], mask)
    padded, _ = attention(MODULE, query, key, value, torch.nn.functional.pad(mask, (0, behind)))
    assert torch.equal(alone, padded)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_a_sequence_does_not_notice_the_others_nor_later_queries(dtype):
    query, key, value = random_states(batch=24, queries=2 * BLOCK + 5, seen=2 * BLOCK + 5, dtype=dtype)
    result, _ = attention(MODULE, query, key, value, None)
    for rows, queries in ((slice(3, 4), 2 * BLOCK + 5), (slice(8, 24), BLOCK), (slice(0, 24), 20)):
        some, _ = attention(MODULE, *(states[rows, :, :queries] for states in (query, key, value)), None)
        assert torch.equal(some, result[rows, :queries])


def test_cached_fp32_copies_of_16_bit_values_give_the_same_bits():
    query, key, value = random_states(queries=1, seen=70, dtype=torch.bfloat16)
    plain, _ = attention(MODULE, query, key, value, None)
    upcast, _ = attention(MODULE, query, key.float(), value.float(), None)
    assert upcast.dtype == torch.bfloat16
    assert torch.equal(plain, upcast)


def test_a_query_without_any_key_stays_finite():
    leaves = [states.requires_grad_() for states in random_states()]
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask[:3] = False
    result, _ = attention(MODULE, *leaves, mask[None, None])
    assert torch.isfinite(result).all()
    assert all(torch.isfinite(gradient).all() for gradient in torch.autograd.grad(result.sum(), leaves))
    torch.testing.assert_close(result[:, 3:].double(), exact(*leaves, mask)[:, 3:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("option", ["softcap", "s_aux", "position_bias"])
def test_what_it_does_not_have_is_refused(option):
    with pytest.raises(UserError, match=option):
        attention(MODULE, *random_states(), None, **{option: torch.ones(1)})


def test_dropout_is_refused():
    with pytest.raises(UserError, match="dropout"):
        attention(MODULE, *random_states(), None, dropout=0.1)
