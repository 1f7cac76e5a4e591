"""The transformers engine against plain forward passes, and against itself in other company."""

from __future__ import annotations

import gc
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from halfmatch.config import EngineSettings, Sampling
from halfmatch.engines import Completion, NonFiniteError, Request, create
from halfmatch.engines.transformers import check_layers
from halfmatch.errors import UserError
from halfmatch.precision import Precision, torch_dtype
from halfmatch.precision.casting import cast_model
from halfmatch.seeds import uniforms

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 1
SIZES = {
    "vocab_size": 20,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
# Three prompts of several samples, of lengths on both sides of a block of 64 positions, and some alone.
REQUESTS = [
    *(Request((2, 5), seed) for seed in range(5)),
    *(Request(tuple(2 + index % 18 for index in range(62)), 100 + seed) for seed in range(3)),
    *(Request((7, 3, 12, 9), 200 + seed) for seed in range(6)),
    *(Request((4 + index, *range(2, 9 + index)), 300 + index) for index in range(5)),
]
SAMPLING = Sampling(max_tokens=24)


def engine_of(folder, dtype="fp32", slots=8, **changes):
    return create("transformers", folder, Precision.named(dtype, **changes), EngineSettings(slots=slots))


def generate(engine, requests, sampling=SAMPLING, stop=(EOS,), **options) -> list[Completion]:
    return engine.generate(requests, sampling, stop_token_ids=stop, **options)


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------ what is sampled
@pytest.mark.parametrize(
    ("config", "model"),
    [
        (LlamaConfig, LlamaForCausalLM),
        (Qwen3Config, Qwen3ForCausalLM),
        (MistralConfig, MistralForCausalLM),
        (GPT2Config, GPT2LMHeadModel),
        (None, None),
    ],
)
def test_tokens_and_logprobs_are_those_of_plain_forward_passes(config, model, tiny_model_folder, tmp_path):
    torch.manual_seed(0)
    folder = tiny_model_folder if model is None else saved(model(config(**SIZES)), tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    sampling = Sampling(max_tokens=8, temperature=0.7)
    for request, completion in zip(REQUESTS, generate(engine_of(folder), REQUESTS, sampling), strict=True):
        tokens = list(request.prompt_ids)
        for position, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            with torch.no_grad():
                logits = plain(torch.tensor([tokens])).logits[0, -1].double().numpy() / 0.7
            probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            u = uniforms(request.seed, position + 1)[position]
            assert token == int(np.argmax(probabilities.cumsum() > u))
            assert logprob == pytest.approx(np.log(probabilities[token]), abs=2e-5)
            tokens.append(token)
        assert completion.finish_reason == ("stop" if tokens[-1] == EOS else "length")
        assert EOS not in completion.token_ids[:-1]
        assert len(completion.token_ids) == 8 or completion.finish_reason == "stop"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_logprobs_are_of_logits_rounded_to_the_rollout_dtype(dtype, tiny_model_folder):
    """With one token sampled the engine ran a prefill alone, which is the very forward pass of a cast model."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder).eval()
    cast_model(model, dtype)
    for request, completion in zip(
        REQUESTS, generate(engine_of(tiny_model_folder, dtype), REQUESTS, Sampling(max_tokens=1)), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids]), logits_to_keep=1).logits[0, -1]
        assert logits.dtype == torch_dtype(dtype)
        assert completion.logprobs == [torch.log_softmax(logits.float(), -1)[completion.token_ids[0]].item()]


def test_the_mismatch_with_a_full_forward_pass_is_that_of_the_dtype(tiny_model_folder):
    """Nothing but rounding separates the two paths, and fp16 rounds eight times finer than bf16."""
    requests = [Request((2 + seed % 16, 5), seed) for seed in range(64)]
    sampling = Sampling(max_tokens=60)
    k3 = {}
    for dtype in ("bf16", "fp16", "fp32"):
        completions = generate(engine_of(tiny_model_folder, dtype, slots=64, emulate="always"), requests, sampling, ())
        policy = AutoModelForCausalLM.from_pretrained(tiny_model_folder).eval()
        cast_model(policy, dtype, emulate="always")
        ids = torch.tensor([[*r.prompt_ids, *c.token_ids] for r, c in zip(requests, completions, strict=True)])
        with torch.no_grad():
            logprobs = torch.log_softmax(policy(ids[:, :-1]).logits[:, 1:].float(), -1)
        rollout = torch.tensor([completion.logprobs for completion in completions])
        difference = (logprobs.gather(2, ids[:, 2:, None]).squeeze(2) - rollout).double()
        k3[dtype] = (difference.exp() - 1 - difference).mean().item()
    assert 1e-5 < k3["bf16"] < 1e-2
    assert k3["bf16"] > 20 * k3["fp16"]
    assert k3["fp16"] > 20 * k3["fp32"]


# ---------------------------------------------------------------------------------- what a request does not notice
@pytest.fixture(
    scope="module",
    params=["bf16-native", "bf16-emulated", "fp16", "fp32", "bf16-head", "bf16-between", "fp16-moe", "fp32-moe"],
)
def company(request, tiny_model_folder, tiny_moe_folder):
    """An engine and what it makes of each request alone."""
    dtype, _, kind = request.param.partition("-")
    changes = {
        "native": {"emulate": "never"},
        "head": {"fp32_modules": ("lm_head", "norm")},
        "between": {"fp32_modules": ("between_matmuls",)},
    }.get(kind, {"emulate": "always"})
    engine = engine_of(tiny_moe_folder if kind == "moe" else tiny_model_folder, dtype, **changes)
    return engine, [generate(engine, [each])[0] for each in REQUESTS]


@settings(max_examples=8)
@given(order=st.permutations(range(len(REQUESTS))), count=st.integers(1, len(REQUESTS)), slots=st.integers(1, 20))
def test_neither_batch_nor_order_nor_slots_change_a_bit(company, order, count, slots):
    engine, alone = company
    engine._slots = slots
    found = generate(engine, [REQUESTS[index] for index in order[:count]])
    assert found == [alone[index] for index in order[:count]]


def test_longer_neighbours_change_no_bit(company):
    """Long sequences make the cache grow and attention look further; what is short stays as it was."""
    engine, alone = company
    engine._slots = 16
    long = [Request(tuple(random.Random(seed).choices(range(2, 20), k=150 * seed)), seed) for seed in (1, 2, 3)]
    assert generate(engine, [*long, *REQUESTS[:9]])[3:] == alone[:9]


def test_a_shorter_budget_cuts_and_changes_nothing_before(company):
    engine, alone = company
    for cut, whole in zip(generate(engine, REQUESTS, Sampling(max_tokens=9)), alone, strict=True):
        assert cut.token_ids == whole.token_ids[:9]
        assert cut.logprobs == whole.logprobs[:9]


def test_the_global_generators_are_neither_read_nor_moved(company):
    engine, alone = company
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert generate(engine, REQUESTS[:3]) == alone[:3]
    assert torch.equal(torch.get_rng_state(), state)


def test_other_seeds_give_other_completions(tiny_model_folder):
    completions = generate(engine_of(tiny_model_folder), [Request((2, 5), seed) for seed in range(20)], stop=())
    assert len({tuple(completion.token_ids) for completion in completions}) == 20


def test_an_fp32_router_is_not_rounded(tiny_moe_folder):
    """As the trainer's is not: the same function casts both."""
    engine = engine_of(tiny_moe_folder, "bf16", fp32_modules=("router",))
    stored = AutoModelForCausalLM.from_pretrained(tiny_moe_folder, dtype=torch.float32)
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"):
        held = engine._model.get_parameter(name)
        assert held.dtype == torch.float32
        assert torch.equal(held, stored.get_parameter(name))
        assert not torch.equal(held, held.bfloat16().float())
    assert engine.dtype == "bf16"
    assert generate(engine, REQUESTS[:2])


# ---------------------------------------------------------------------------------------------- stopping, progress
def test_any_stop_token_ends_a_completion_and_belongs_to_it(tiny_model_folder):
    engine = engine_of(tiny_model_folder)
    free = generate(engine, REQUESTS, stop=())
    assert all(len(completion.token_ids) == 24 and completion.finish_reason == "length" for completion in free)
    stops = {3, 11}
    for completion, whole in zip(generate(engine, REQUESTS, stop=stops), free, strict=True):
        end = next((position for position, token in enumerate(whole.token_ids) if token in stops), None)
        assert completion.token_ids == whole.token_ids[: 24 if end is None else end + 1]
        assert completion.finish_reason == ("length" if end is None else "stop")


def test_a_stop_token_at_the_limit_is_a_stop(tiny_model_folder):
    engine = engine_of(tiny_model_folder)
    (whole,) = generate(engine, REQUESTS[:1], Sampling(max_tokens=5), stop=())
    (found,) = generate(engine, REQUESTS[:1], Sampling(max_tokens=5), stop=whole.token_ids[4:])
    assert found.finish_reason == "stop"


def test_progress_counts_every_completion_once(tiny_model_folder):
    told: list[int] = []
    generate(engine_of(tiny_model_folder), REQUESTS, progress=told.append)
    assert sum(told) == len(REQUESTS)
    assert min(told) > 0
    assert len(told) > 1


def test_no_requests_no_completions(tiny_model_folder):
    assert generate(engine_of(tiny_model_folder), []) == []


def test_a_nucleus_keeps_to_its_tokens_and_renormalises(tiny_model_folder):
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_folder).eval()
    sampling = Sampling(max_tokens=6, temperature=1.3, top_p=0.5)
    for request, completion in zip(REQUESTS, generate(engine_of(tiny_model_folder), REQUESTS, sampling), strict=True):
        tokens = [*request.prompt_ids, *completion.token_ids]
        with torch.no_grad():
            probabilities = torch.softmax(plain(torch.tensor([tokens])).logits[0].double() / 1.3, -1)
        for position, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            ordered = probabilities[len(request.prompt_ids) - 1 + position].sort(descending=True)
            size = int((ordered.values.cumsum(0) < 0.5).sum()) + 1
            nucleus = ordered.indices[:size].tolist()
            assert token in nucleus
            share = ordered.values[nucleus.index(token)] / ordered.values[:size].sum()
            assert logprob == pytest.approx(share.log().item(), abs=1e-4)


# --------------------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_new_weights_serve_as_in_a_fresh_engine(dtype, tiny_model_folder, tmp_path):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    engine = engine_of(tiny_model_folder, dtype, emulate="always")
    before = generate(engine, REQUESTS)
    engine.load_weights(model.named_parameters())
    after = generate(engine, REQUESTS)
    assert after != before
    assert after == generate(engine_of(saved(model, tmp_path), dtype, emulate="always"), REQUESTS)
    engine.load_weights((name, tensor.to(torch_dtype(dtype))) for name, tensor in model.state_dict().items())
    assert generate(engine, REQUESTS) == after, "rounded before or in the engine, with the tied head named or not"


def test_weights_that_do_not_fit_are_refused_and_change_nothing(tiny_model_folder):
    engine = engine_of(tiny_model_folder)
    before = generate(engine, REQUESTS[:4])
    weights = {name: torch.zeros_like(tensor) for name, tensor in engine._model.named_parameters()}
    some = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"lack {some}"):
        engine.load_weights((name, tensor) for name, tensor in weights.items() if name != some)
    with pytest.raises(ValueError, match=r"no weights named model\.extra"):
        engine.load_weights([*weights.items(), ("model.extra", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"up_proj.* has shape \(64, 96\)"):
        engine.load_weights({**weights, some: weights[some].T}.items())
    assert generate(engine, REQUESTS[:4]) == before


def test_a_tied_head_of_other_values_is_refused(tiny_model_folder):
    engine = engine_of(tiny_model_folder)
    weights = dict(engine._model.named_parameters())
    with pytest.raises(ValueError, match=r"lm_head.weight .* differ"):
        engine.load_weights({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}.items())


def test_weights_that_overflow_the_dtype_are_named(tiny_model_folder):
    engine = engine_of(tiny_model_folder, "fp16")
    weights = {name: tensor.float().clone() for name, tensor in engine._model.named_parameters()}
    weights["model.norm.weight"][3] = 1e5
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight .*fp16"):
        engine.load_weights(weights.items())


def test_logits_that_are_not_finite_are_refused_with_the_request(tiny_model_folder):
    """The overflow probe: nothing is sampled from what overflowed, and bf16 has the range to go on."""
    for dtype in ("fp16", "bf16"):
        engine = engine_of(tiny_model_folder, dtype)
        weights = {name: tensor.float().clone() for name, tensor in engine._model.named_parameters()}
        weights["model.norm.weight"].fill_(6e4)
        weights["model.embed_tokens.weight"].mul_(10)
        engine.load_weights(weights.items())
        if dtype == "bf16":
            assert len(generate(engine, REQUESTS[:1])) == 1
        else:
            with pytest.raises(NonFiniteError, match=r"request 0 \(seed 0\).*token 1 .*not finite in fp16"):
                generate(engine, REQUESTS)


# --------------------------------------------------------------------------------------------------- sleep and wake
def held_bytes():
    """Of all tensors in this process, shared storage once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_asleep_it_holds_its_weights_and_nothing_else(dtype, tiny_model_folder):
    engine = engine_of(tiny_model_folder, dtype, emulate="always")
    weights = held_bytes()
    expected = generate(engine, REQUESTS)
    copies = held_bytes() - weights
    engine.sleep()
    engine.sleep()
    assert held_bytes() == weights
    assert (copies > 0) == (dtype == "bf16"), "16-bit weights that were upcast for their matmuls, and no KV cache"
    engine.wake()
    assert generate(engine, REQUESTS) == expected


def test_asleep_it_wakes_by_itself_for_weights_and_requests(tiny_model_folder):
    engine = engine_of(tiny_model_folder, "bf16", emulate="always")
    before = generate(engine, REQUESTS)
    engine.sleep()
    assert generate(engine, REQUESTS) == before
    engine.sleep()
    engine.load_weights([(name, 1.1 * weight) for name, weight in engine._model.named_parameters()])
    assert generate(engine, REQUESTS) != before


# ------------------------------------------------------------------------------------------- what it says of itself
@pytest.mark.parametrize(
    ("dtype", "changes", "emulated"),
    [
        ("bf16", {"emulate": "always"}, True),
        ("fp16", {"emulate": "never"}, False),
        ("fp32", {"emulate": "always"}, False),
    ],
)
def test_description_and_dtype(dtype, changes, emulated, tiny_model_folder):
    engine = engine_of(tiny_model_folder, dtype, fp32_modules=("lm_head",), **changes)
    assert engine.dtype == dtype
    description = dict(engine.description)
    assert description["dtype"] == dtype
    assert description["emulated"] is emulated
    assert description["fp32_modules"] == ["lm_head"]
    assert description["attention"] == "halfmatch"
    assert json.loads(json.dumps(description)) == description
    engine.close()


def test_layers_in_fp32_that_round_their_inputs_are_of_what_they_round_to(tiny_model_folder):
    engine = engine_of(tiny_model_folder, "bf16", fp32_modules=("between_matmuls",))
    assert engine.dtype == "bf16"
    assert {parameter.dtype for parameter in engine._model.parameters()} == {torch.float32}


def test_the_dtype_is_that_of_the_weights_and_not_of_the_configuration(tiny_model_folder):
    engine = engine_of(tiny_model_folder, "bf16", emulate="never")
    engine._model.to(torch.float16)
    assert engine.dtype == "fp16"


# ------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), 8, "request 1 has an empty prompt"),
        ((2, 20), 8, "vocabulary of 20"),
        ((2, -1), 8, "vocabulary of 20"),
        ((2, 3), 511, "more than the model's 512 positions"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(prompt, max_tokens, message, tiny_model_folder):
    requests = [Request((2,), 0), Request(prompt, 0)]
    with pytest.raises(UserError, match=message):
        generate(engine_of(tiny_model_folder), requests, Sampling(max_tokens=max_tokens))


def test_a_sequence_may_fill_the_models_positions(tiny_model_folder):
    (completion,) = generate(engine_of(tiny_model_folder), [Request((2, 3), 0)], Sampling(max_tokens=510), stop=())
    assert len(completion.token_ids) == 510


def test_a_sliding_window_serves_what_it_does_not_cut(tmp_path):
    torch.manual_seed(0)
    folder = saved(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=40)), tmp_path)
    engine = engine_of(folder)
    assert len(generate(engine, [Request((2, 3), 0)], Sampling(max_tokens=38))) == 1
    with pytest.raises(UserError, match="sliding window of 40"):
        generate(engine, [Request((2, 3), 0)], Sampling(max_tokens=39))


def test_layers_without_a_plain_cache_are_refused(tiny_model_folder, tmp_path):
    folder = Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))
    engine = engine_of(folder)
    engine._config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match="linear_attention"):
        check_layers(engine._config, folder)
