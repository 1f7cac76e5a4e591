"""The training engine as a sampler: against pass after pass over every prefix, and against the trainer's scores."""

from __future__ import annotations

import pytest
import torch

from halfmatch import models
from halfmatch.config import EngineSettings, Sampling
from halfmatch.engines import NonFiniteError, Request, create, full_pass, side_of
from halfmatch.engines.decoding import GuidedDecoding
from halfmatch.engines.sampling import NUMBERS, log_distribution
from halfmatch.precision import Precision
from halfmatch.precision.casting import cast_model, round_as_a_pass
from halfmatch.rl.scoring import response_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 1
REQUESTS = [
    *(Request((2, 5, 9), seed) for seed in range(12)),
    *(Request(tuple(2 + index % 18 for index in range(62)), 100 + seed) for seed in range(3)),
    *(Request((4 + index, *range(2, 9 + index)), 300 + index) for index in range(5)),
]
SAMPLING = Sampling(max_tokens=24)


@pytest.fixture(scope="module")
def sharp(tiny_model_folder, tmp_path_factory):
    """The tiny model with logits so large that 16-bit rounding changes what is drawn."""
    model = models.load(tiny_model_folder, torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(8)
    folder = tmp_path_factory.mktemp("sharp")
    model.save_pretrained(folder)
    return folder


def engine_of(folder, precision, name="trainer", draws=None):
    return create(name, folder, precision, EngineSettings(slots=8, draws=draws))


def generate(engine, requests=REQUESTS, sampling=SAMPLING):
    return engine.generate(requests, sampling, stop_token_ids=(EOS,))


def policy_of(folder, precision):
    policy = models.load(folder, torch.float32)
    cast_model(policy, precision.compute, precision.fp32_modules, precision.emulate)
    return policy


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("draws", [None, "race"])
@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(max_tokens=12, temperature=0.6, top_p=0.9)])
def test_every_token_is_the_draw_of_a_pass_over_what_stands_before_it(dtype, draws, sampling, sharp, monkeypatch):
    monkeypatch.setattr(full_pass, "CHUNK_ELEMENTS", 20 * 50)  # 50 positions at a time, across responses
    precision = Precision.named(dtype, emulate="always")
    policy = policy_of(sharp, precision)
    completions = generate(engine_of(sharp, precision, draws=draws), sampling=sampling)
    for request, completion in list(zip(REQUESTS, completions, strict=True))[::4]:
        tokens = list(request.prompt_ids)
        numbers = NUMBERS[draws](request.seed, sampling.max_tokens, 20, torch.device("cpu"))
        for place, token in enumerate(completion.token_ids):
            # 8 tokens behind, which a causal model does not see: a row of a matmul has its bits for 8 rows or more
            with torch.no_grad():
                logits = policy(torch.tensor([[*tokens, *[0] * 8]]), use_cache=False).logits[:, len(tokens) - 1]
            distribution = log_distribution(logits, sampling.temperature, sampling.top_p)
            assert token == int(numbers.draw(distribution, numbers.take(1)))
            assert completion.logprobs[place] == float(distribution[0, token])
            tokens.append(token)
        assert completion.finish_reason == ("stop" if tokens[-1] == EOS else "length")
        assert len(completion.token_ids) == sampling.max_tokens or tokens[-1] == EOS


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_logprobs_are_those_that_the_trainer_scores(dtype, sharp):
    precision = Precision.named(dtype, emulate="always")
    completions = generate(engine_of(sharp, precision))
    scored = response_logprobs(
        policy_of(sharp, precision),
        [request.prompt_ids for request in REQUESTS],
        [completion.token_ids for completion in completions],
        micro_batch_tokens=512,
    )
    assert [completion.logprobs for completion in completions] == [one.tolist() for one in scored]


@pytest.mark.parametrize("draws", [None, "race"])
def test_it_differs_from_the_rollout_engine_where_rounding_does(draws, sharp):
    bf16, fp32 = (Precision.named(dtype, emulate="always") for dtype in ("bf16", "fp32"))
    ours, theirs = (generate(engine_of(sharp, bf16, name, draws)) for name in ("trainer", "transformers"))
    differing = sum(a.token_ids != b.token_ids for a, b in zip(ours, theirs, strict=True))
    assert 0 < differing < len(REQUESTS)  # the same seeds draw the same numbers
    ours, theirs = (generate(engine_of(sharp, fp32, name, draws)) for name in ("trainer", "transformers"))
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]


@pytest.mark.parametrize("draws", [None, "race"])
def test_a_response_does_not_depend_on_the_others(draws, sharp):
    engine = engine_of(sharp, Precision.named("bf16", emulate="always"), draws=draws)
    together = generate(engine)
    for place in (0, 7, 13, 19):
        assert generate(engine, [REQUESTS[place]]) == [together[place]]
    assert generate(engine, REQUESTS[::-1]) == together[::-1]


@pytest.mark.parametrize("draws", [None, "race"])
def test_bad_drafts_cost_passes_and_change_nothing(draws, sharp, monkeypatch):
    engine = engine_of(sharp, Precision.named("bf16", emulate="always"), draws=draws)
    expected = generate(engine)

    class Fours(GuidedDecoding):
        def _draw(self, logprobs, slots, counts):
            drawn = super()._draw(logprobs, slots, counts)
            given = self._given[[self._request_of[slot] for slot in slots], counts]
            return torch.where(given >= 0, drawn, 4)

    monkeypatch.setattr(full_pass, "GuidedDecoding", Fours)
    assert generate(engine) == expected


def test_it_computes_in_the_trainer_s_dtype(sharp):
    precision = Precision(compute="bf16", rollout="fp16", emulate="always")
    assert side_of("trainer") == "compute"
    engine = engine_of(sharp, precision)
    assert engine.dtype == "bf16"
    assert (engine.description["name"], engine.description["dtype"]) == ("trainer", "bf16")
    assert generate(engine) == generate(engine_of(sharp, Precision.named("bf16", emulate="always")))


def test_the_attention_of_drafts_gives_a_pass_the_same_bits(sharp):
    precision = Precision.named("bf16", emulate="always")
    one, other = policy_of(sharp, precision), policy_of(sharp, precision)
    round_as_a_pass(other)
    tokens = torch.tensor([[2, 5, 9, 4, 6, 11, 3, 8, 12]])
    with torch.no_grad():
        assert torch.equal(one(tokens, use_cache=False).logits, other(tokens, use_cache=False).logits)


def test_logits_that_are_not_finite_are_an_error(sharp, monkeypatch):
    engine = engine_of(sharp, Precision.named("fp16", emulate="always"))
    response_logits = full_pass.response_logits

    def overflowed(model, batch):
        return response_logits(model, batch).index_fill(0, torch.tensor([0]), torch.inf)

    monkeypatch.setattr(full_pass, "response_logits", overflowed)
    with pytest.raises(NonFiniteError, match="trainer's pass"):
        generate(engine)


def test_progress_counts_every_response_once(sharp):
    told = []
    engine = engine_of(sharp, Precision.named("bf16", emulate="always"))
    engine.generate(REQUESTS, SAMPLING, stop_token_ids=(EOS,), progress=told.append)
    assert sum(told) == len(REQUESTS)
