"""Tracing the mismatch: against float64 formulas written out, the engine's own log-probs, and the whole vocabulary."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from halfmatch import models
from halfmatch.config import EngineSettings, Sampling
from halfmatch.engines import Request, create
from halfmatch.engines.decoding import forced_logprobs
from halfmatch.errors import UserError
from halfmatch.mismatch import origin
from halfmatch.mismatch.origin import Response, Setting, measure
from halfmatch.mismatch.tracing import InFloat64, operations, traced
from halfmatch.precision import Precision
from halfmatch.precision.casting import cast_model
from halfmatch.rl.scoring import response_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPERATURE = 0.8
VOCABULARY = 20
REQUESTS = [Request((2, 5, 3), seed) for seed in range(2)] + [Request((7, 4 + seed), seed) for seed in range(3)]


def precision(dtype, *fp32_modules):
    return Precision.named(dtype, emulate="always", fp32_modules=fp32_modules)


@pytest.fixture(scope="module")
def sampled(tiny_model_folder):
    """Responses that the engine sampled in each dtype."""
    found = {}
    for dtype in ("bf16", "fp16", "fp32"):
        engine = create("transformers", tiny_model_folder, precision(dtype), EngineSettings(slots=8))
        sampling = Sampling(max_tokens=20, temperature=TEMPERATURE)
        completions = engine.generate(REQUESTS, sampling, stop_token_ids=())
        found[dtype] = [
            Response(f"p{number}", list(request.prompt_ids), completion.token_ids, completion.logprobs)
            for number, (request, completion) in enumerate(zip(REQUESTS, completions, strict=True))
        ]
    return found


def run(folder, responses, dtype, *fp32_modules, trainer=None, parts=()):
    sides = (Setting(folder, "cpu", precision(name, *fp32_modules), TEMPERATURE) for name in (dtype, trainer or dtype))
    return measure(*sides, responses, parts, bootstrap_samples=100, seed=0)


@pytest.fixture(scope="module")
def measured(tiny_model_folder, sampled):
    return {
        dtype: run(tiny_model_folder, responses, dtype, parts=("lm_head", "attention") if dtype == "bf16" else ())
        for dtype, responses in sampled.items()
    }


def values(result, name):
    return {one["path"]: one[name]["value"] for one in result["operations"]}


# ---------------------------------------------------------------------------------------------------------- the sides
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_given_its_own_tokens_the_engine_says_what_it_said(tiny_model_folder, sampled, measured, dtype):
    model = models.load(tiny_model_folder, torch.float32)
    cast_model(model, dtype, emulate="always")
    for response in sampled[dtype]:
        assert forced_logprobs(model, response.prompt_ids, response.token_ids, TEMPERATURE) == response.logp_rollout
    assert measured[dtype]["recorded_difference"] == 0


def test_what_was_recorded_by_another_engine_shows(tiny_model_folder, sampled):
    assert run(tiny_model_folder, sampled["bf16"], "fp16")["recorded_difference"] > 1e-3


def test_kl_is_of_both_sides_distributions_over_the_whole_vocabulary(tiny_model_folder, sampled, measured):
    """Log-probs of every token in the place of each, from the engine's and the trainer's own functions."""
    model = models.load(tiny_model_folder, torch.float32)
    cast_model(model, "bf16", emulate="always")
    response = dataclasses.replace(sampled["bf16"][0], token_ids=sampled["bf16"][0].token_ids[:6], logp_rollout=None)
    kl = k3 = 0.0
    for position, token in enumerate(response.token_ids):
        variants = [[*response.token_ids[:position], other] for other in range(VOCABULARY)]
        prompts = [response.prompt_ids] * VOCABULARY
        pi = response_logprobs(model, prompts, variants, temperature=TEMPERATURE, micro_batch_tokens=1000)
        mu = [forced_logprobs(model, response.prompt_ids, one, TEMPERATURE) for one in variants]
        pairs = [(one[-1], float(other[-1])) for one, other in zip(mu, pi, strict=True)]
        kl += sum(math.exp(one) * (one - other) for one, other in pairs)
        d = pairs[token][1] - pairs[token][0]
        k3 += math.expm1(d) - d
    found = run(tiny_model_folder, [response], "bf16")
    assert found["tokens"] == 6
    assert found["kl"]["value"] == pytest.approx(kl / 6, rel=1e-3)
    assert found["k3"]["value"] == pytest.approx(k3 / 6, rel=1e-6)


def test_a_part_in_fp32_is_both_sides_computed_again_with_it(tiny_model_folder, sampled, measured):
    parts = {one["part"]: one for one in measured["bf16"]["parts"]}
    for part in ("lm_head", "attention"):
        again = run(tiny_model_folder, sampled["bf16"], "bf16", part)
        assert parts[part]["kl"] == again["kl"]
        assert parts[part]["k3"] == again["k3"]
        removed = 1 - again["kl"]["value"] / measured["bf16"]["kl"]["value"]
        assert parts[part]["removed"]["value"] == pytest.approx(removed)
    # All that the two paths do differently is attention; with fp32 states hardly anything is left of that.
    assert parts["attention"]["removed"]["value"] > 0.9
    assert parts["attention"]["removed"]["low"] <= parts["attention"]["removed"]["value"]


# ---------------------------------------------------------------------------------------------------------- operations
def test_operations_stand_in_the_order_of_the_forward_pass(measured):
    rows = [(one["layer"], one["operation"]) for one in measured["bf16"]["operations"]]
    layer = ["norm", "attention", "norm", "mlp", "residual"]
    assert rows == [*((0, one) for one in layer), *((1, one) for one in layer), (None, "norm"), (None, "lm_head")]


def test_errors_are_as_small_as_the_dtype_is_fine(measured):
    bf16, fp16, fp32 = (measured[dtype] for dtype in ("bf16", "fp16", "fp32"))
    for name in ("engine", "trainer", "weights", "engine_own", "trainer_own"):
        for path, error in values(bf16, name).items():
            if error is None or math.isnan(error):
                assert name.endswith("own")
                assert path.split(".")[-1].isdigit()  # the residual stream
                continue
            assert 3e-4 < error < 3e-2, (name, path)
            assert 4 < error / values(fp16, name)[path] < 16, (name, path)
            if name != "weights":
                assert values(fp32, name)[path] < 1e-5
    assert set(values(fp32, "weights").values()) == {0.0}


def test_the_mismatch_begins_where_the_paths_part(measured):
    """Embedding and first norm are the same on both sides, bit for bit; attention is the first thing that differs."""
    differences = values(measured["bf16"], "difference")
    assert differences["model.layers.0.input_layernorm"] == 0
    assert differences["model.layers.0.self_attn"] > 1e-4


def test_errors_against_formulas_in_float64(tiny_model_folder, sampled):
    """The first norm and the head of one response, from the embedding and from the last norm."""
    response = sampled["bf16"][0]
    model = models.load(tiny_model_folder, torch.float32)
    cast_model(model, "bf16", emulate="always")
    places = operations(model)
    ids = torch.tensor([[*response.prompt_ids, *response.token_ids[:-1]]])
    n = len(response.token_ids)
    with traced(model, places) as calls, torch.no_grad():
        model(ids, logits_to_keep=n)
    norm = model.model.layers[0].input_layernorm
    x = model.model.embed_tokens.weight.detach()[ids[0]].double()
    exact = x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight.detach().double()

    def relative(found, exact):
        error, exact = (found.double() - exact)[-n:], exact[-n:]
        return math.sqrt((error.square().sum(-1) / exact.square().sum(-1)).mean())

    found = run(tiny_model_folder, [response], "bf16")
    first = calls["model.layers.0.input_layernorm"].result[0].detach()
    for name in ("trainer", "engine", "trainer_own", "engine_own"):
        assert values(found, name)["model.layers.0.input_layernorm"] == pytest.approx(relative(first, exact), rel=1e-9)
    states = calls["model.norm"].result[0].detach().double()
    logits = states[-n:] @ model.lm_head.weight.detach().double().T
    expected = relative(calls["lm_head"].result[0].detach(), logits)
    assert values(found, "trainer_own")["lm_head"] == pytest.approx(expected, rel=1e-6)


def test_other_dtypes_on_the_two_sides_have_references_of_their_own(tiny_model_folder, sampled):
    found = run(tiny_model_folder, sampled["fp16"], "fp16", trainer="bf16")
    engine, trainer = values(found, "engine"), values(found, "trainer")
    assert engine["lm_head"] < 0.3 * trainer["lm_head"]
    assert found["kl"]["value"] > 1e-5


# ---------------------------------------------------------------------------------------------------------- float64
def test_float64_passes_are_float64_throughout():
    """Norms, softmax and rotary angles ask for float32 by name, and do not get it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=24,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).eval().double()
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad(), InFloat64():
        exact = model(ids).logits
        norm = model.model.layers[0].input_layernorm
        x = torch.randn(5, 64, dtype=torch.float64)
        found = norm(x)
    assert torch.allclose(found, x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt(), atol=1e-14)
    with torch.no_grad():
        mixed = model(ids).logits
    assert exact.dtype == mixed.dtype == torch.float64
    assert 1e-9 < (mixed - exact).abs().max() / exact.abs().max() < 1e-5  # what float32 norms and angles would cost


def test_tracing_leaves_no_hook_behind_and_takes_the_first_row(tiny_model_folder):
    model = models.load(tiny_model_folder, torch.float32)
    places = operations(model)
    with traced(model, places) as calls, torch.no_grad():
        model(torch.tensor([[2, 3, 4], [5, 6, 7]]))
        model(torch.tensor([[8]]))
    assert not any(module._forward_hooks for module in model.modules())
    assert calls["model.layers.1.mlp"].given.shape == (1, 4, 64)
    assert calls["lm_head"].result.shape == (1, 4, VOCABULARY)
    with torch.no_grad():
        alone = model(torch.tensor([[2, 3, 4]])).logits
    torch.testing.assert_close(calls["lm_head"].result[:, :3], alone)


def test_a_model_without_decoder_layers_is_refused(tiny_model_folder):
    model = models.load(tiny_model_folder, torch.float32)
    del model.model.layers
    with pytest.raises(UserError, match="is no stack of decoder layers"):
        operations(model)


def test_statistics_are_means_over_the_positions_of_resampled_responses():
    tokens = np.array([1.0, 3.0])
    errors = np.array([[[4.0]], [[12.0]]])  # one place, one measure: sums of squares
    mismatch = np.array([[[0.2, 0.1], [0.1, 0.1]], [[0.6, 0.3], [0.0, 0.1]]])
    found = origin._statistics(np.array([[1.0, 1.0], [2.0, 0.0]]), tokens, errors, mismatch)
    assert found["errors"].ravel() == pytest.approx([2.0, 2.0])  # √(16/4), √(8/2)
    assert found["mismatch"][:, 0, 0] == pytest.approx([0.2, 0.2])
    assert found["removed"] == pytest.approx(np.array([[0, 1 - 0.1 / 0.8], [0, 0.5]]))
