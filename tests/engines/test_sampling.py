"""The inverse CDF, the race and the nucleus against numpy, and at their edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.engines.sampling import Exponentials, Uniforms, log_distribution
from halfmatch.seeds import uniforms

SEEDS = st.integers(0, 2**31)


def draw(logprobs, uniforms):
    return Uniforms.draw(logprobs, uniforms[:, None])


def numbers_of(kind, seed, vocabulary=30):
    return kind(seed, 40, vocabulary, torch.device("cpu"))


def logits_of(seed, rows=5, vocabulary=30, scale=3.0):
    return scale * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@given(seed=SEEDS, temperature=st.floats(0.1, 5))
def test_log_distribution_is_the_softmax_at_the_temperature(seed, temperature):
    logits = logits_of(seed)
    scaled = logits.double().numpy() / temperature
    expected = (
        scaled - np.log(np.exp(scaled - scaled.max(1, keepdims=True)).sum(1, keepdims=True)) - scaled.max(1)[:, None]
    )
    np.testing.assert_allclose(log_distribution(logits, temperature), expected, atol=1e-5, rtol=1e-5)


def test_16_bit_logits_are_taken_as_they_are():
    logits = logits_of(0).bfloat16()
    found = log_distribution(logits, 1.0)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.log_softmax(logits.float(), -1))


def test_the_nucleus_by_hand():
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]]).log()
    probabilities = log_distribution(logits, 1.0, top_p=0.6).exp()
    # 0.4 alone falls short of 0.6, 0.4 + 0.3 reaches it; of equals the lower ids come first
    torch.testing.assert_close(probabilities, torch.tensor([[0, 4 / 7, 3 / 7, 0], [1 / 3, 1 / 3, 1 / 3, 0]]))
    torch.testing.assert_close(log_distribution(logits, 1.0, top_p=0.39)[0].exp(), torch.tensor([0.0, 1, 0, 0]))


@given(seed=SEEDS, top_p=st.floats(0.05, 0.999))
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(seed, top_p):
    everything = log_distribution(logits_of(seed), 1.0).exp()
    nucleus = log_distribution(logits_of(seed), 1.0, top_p).exp()
    kept = nucleus > 0
    for row, inside, renormalised in zip(everything.double(), kept, nucleus, strict=True):
        assert row[inside].sum() >= top_p - 1e-6
        assert row[inside].sum() - row[inside].min() < top_p + 1e-6
        assert inside.all() or row[inside].min() >= row[~inside].max()
        torch.testing.assert_close(renormalised[inside].double(), row[inside] / row[inside].sum(), atol=1e-6, rtol=1e-5)


@given(seed=SEEDS)
def test_draw_inverts_the_cdf(seed):
    generator = np.random.default_rng(seed)
    logprobs, uniforms = log_distribution(logits_of(seed), 1.0), generator.random(5)
    expected = [
        int(np.argmax(np.cumsum(row) > u * row.sum()))
        for row, u in zip(np.exp(logprobs.double().numpy()), uniforms, strict=True)
    ]
    assert draw(logprobs, torch.from_numpy(uniforms)).tolist() == expected


def test_draw_at_the_edges_of_the_cdf():
    half = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).log()
    uniforms = [0.0, np.nextafter(0.5, 0), 0.5, np.nextafter(1, 0)]
    found = [draw(half, torch.tensor([u], dtype=torch.float64)).item() for u in uniforms]
    assert found == [1, 1, 3, 3], "a token of probability zero is never drawn"


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_draw_takes_a_token_of_positive_probability_however_close_to_one(scale):
    logprobs = log_distribution(logits_of(3, rows=200, vocabulary=1000, scale=scale), 1.0, top_p=0.9)
    tokens = draw(logprobs, torch.full((200,), np.nextafter(1, 0), dtype=torch.float64))
    assert (logprobs.gather(1, tokens[:, None]) > -torch.inf).all()


def test_even_uniforms_draw_each_token_as_often_as_it_is_probable():
    logprobs = log_distribution(logits_of(1, rows=1, scale=1.0), 1.0).expand(10_000, -1)
    tokens = draw(logprobs, (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000)
    shares = torch.bincount(tokens, minlength=30) / 10_000
    torch.testing.assert_close(shares, logprobs[0].exp(), atol=1.1e-4, rtol=0)


@given(seed=SEEDS, rows=st.integers(1, 40))
def test_a_row_does_not_notice_the_others(seed, rows):
    logits = logits_of(seed, rows=40)
    uniforms = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for top_p in (1.0, 0.9):
        everything, some = (log_distribution(part, 0.7, top_p) for part in (logits, logits[:rows]))
        assert torch.equal(everything[:rows], some)
        assert torch.equal(draw(everything, uniforms)[:rows], draw(some, uniforms[:rows]))


# ------------------------------------------------------------------------------------------------------------ the race
@given(seed=SEEDS, top_p=st.sampled_from([1.0, 0.8]))
def test_the_first_to_arrive_is_drawn(seed, top_p):
    """vLLM's words for it: the largest of probability / exponential."""
    logprobs = log_distribution(logits_of(seed), 1.0, top_p)
    exponentials = np.random.default_rng(seed).exponential(size=(5, 30))
    expected = np.argmax(np.exp(logprobs.double().numpy()) / exponentials, axis=1)
    assert Exponentials.draw(logprobs, torch.from_numpy(exponentials)).tolist() == expected.tolist()


def test_a_race_by_hand():
    logprobs = torch.tensor([[0.0, 0.2, 0.8], [0.0, 0.2, 0.8], [0.0, 0.0, 1.0]]).log()
    times = torch.tensor([[9, 1, 3], [9, 1, 5], [1e-300, 1e-300, 9.0]], dtype=torch.float64)
    # 1/0.2 = 5 is later than 3/0.8 = 3.75 and earlier than 5/0.8 = 6.25; what cannot be drawn never arrives
    assert Exponentials.draw(logprobs, times).tolist() == [2, 1, 2]


def test_a_race_draws_each_token_as_often_as_it_is_probable():
    logprobs = log_distribution(logits_of(1, rows=1, vocabulary=5, scale=1.0), 1.0)
    numbers = numbers_of(Exponentials, 7, vocabulary=5)
    tokens = Exponentials.draw(logprobs.expand(20_000, -1), numbers.take(20_000))
    shares = torch.bincount(tokens, minlength=5) / 20_000
    torch.testing.assert_close(shares, logprobs[0].exp(), atol=4 * 0.5 / 20_000**0.5, rtol=0)  # 4 standard errors


def test_the_numbers_of_a_race_are_those_of_the_request_s_generator_a_position_after_the_other():
    generator = torch.Generator().manual_seed(123)
    expected = torch.stack([torch.empty(7, dtype=torch.float64).exponential_(generator=generator) for _ in range(6)])
    assert torch.equal(numbers_of(Exponentials, 123, vocabulary=7).take(6), expected)


@pytest.mark.parametrize("kind", [Uniforms, Exponentials])
@given(seed=st.integers(0, 2**63 - 1), counts=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_numbers_depend_on_seed_and_position_alone(kind, seed, counts):
    one, other = numbers_of(kind, seed), numbers_of(kind, seed)
    assert torch.equal(torch.cat([one.take(count) for count in counts]), other.take(sum(counts)))


def test_uniform_numbers_are_the_seed_s():
    assert numbers_of(Uniforms, 5).take(4).flatten().tolist() == uniforms(5, 4).tolist()
