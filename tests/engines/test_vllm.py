"""The vLLM engine, for real, on this machine's CPU. Engines start one at a time: one a dtype for most tests."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from halfmatch.config import EngineSettings, Sampling
from halfmatch.engines import Completion, NonFiniteError, Request
from halfmatch.engines.vllm import VllmEngine
from halfmatch.errors import UserError
from halfmatch.precision import Precision, torch_dtype
from halfmatch.rl.scoring import response_logprobs

pytestmark = pytest.mark.vllm

SETTINGS = EngineSettings(name="vllm", slots=8)
NEVER_STOP = Sampling(max_tokens=24)
# The prefix cache of a CPU keeps blocks of 128 tokens: only prompts longer than that are ever cached.
SHORT = [Request((2, 3, 4 + index), 100 + index) for index in range(6)]
SHARED = tuple(2 + index * 7 % 18 for index in range(200))
LONG = [Request((*SHARED, 2 + index), 200 + index) for index in range(3)]


def changed_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder after a step that no rounding hides, in fp32: what a trainer's masters hold."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: weight * (1 + 0.2 * torch.randn(weight.shape, generator=generator))
        for name, weight in weights_of(folder).items()
    }


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Tied weights once, under the embedding's name."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def numbers(completions: list[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(completion.token_ids, completion.logprobs) for completion in completions]


@dataclass
class Started:
    """An engine on the tiny model, what starting it did to the process, and what a fresh engine makes of the changed
    weights."""

    engine: VllmEngine
    folder: Path
    dtype: str
    process_before: tuple[object, ...]
    process_after: tuple[object, ...]
    fresh_on_changed: dict[str, list[tuple[list[int], list[float]]]]


def process_state() -> tuple[object, ...]:
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        torch.set_num_threads,
    )


@pytest.fixture(scope="module", params=["bf16", "fp16", "fp32"])
def started(
    request: pytest.FixtureRequest, tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    precision = Precision.named(request.param)
    changed = tmp_path_factory.mktemp("changed")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    model.load_state_dict(changed_weights(tiny_model_folder), strict=False)
    model.save_pretrained(changed)
    fresh = VllmEngine(changed, precision, SETTINGS)
    expected = {
        "short": numbers(fresh.generate(SHORT, NEVER_STOP, stop_token_ids=[])),
        "long": numbers(fresh.generate(LONG, NEVER_STOP, stop_token_ids=[])),
    }
    fresh.close()
    before = process_state()
    engine = VllmEngine(tiny_model_folder, precision, SETTINGS)
    yield Started(engine, tiny_model_folder, request.param, before, process_state(), expected)
    engine.close()


def test_reports_the_dtype_it_holds(started: Started) -> None:
    asked = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[started.dtype]
    held = started.engine._llm.apply_model(lambda model: {str(p.dtype) for p in model.parameters()})
    assert held == [{f"torch.{asked}"}]
    assert started.engine.dtype == started.engine.description["dtype"] == started.dtype
    assert started.engine.description["attention"] == "CPU_ATTN"
    assert started.engine.description["cascade_attention"] is False


def test_starting_leaves_generators_and_threads_alone(started: Started) -> None:
    assert started.process_before == started.process_after


def test_sampling_leaves_the_generators_alone(started: Started) -> None:
    before = process_state()
    started.engine.generate(SHORT, NEVER_STOP, stop_token_ids=[])
    assert process_state() == before


@pytest.mark.parametrize("requests", [SHORT, LONG], ids=["short", "long"])
def test_a_seed_gives_the_same_completion_alone_and_in_any_batch(started: Started, requests: list[Request]) -> None:
    engine = started.engine
    together = numbers(engine.generate(requests, NEVER_STOP, stop_token_ids=[]))
    backwards = numbers(engine.generate(requests[::-1], NEVER_STOP, stop_token_ids=[]))[::-1]
    alone = [numbers(engine.generate([request], NEVER_STOP, stop_token_ids=[]))[0] for request in requests]
    assert together == backwards == alone
    assert len({tuple(token_ids) for token_ids, _ in together}) == len(requests)


def test_another_seed_gives_another_completion(started: Started) -> None:
    one, other = started.engine.generate([Request((2, 3, 4), 1), Request((2, 3, 4), 2)], NEVER_STOP, stop_token_ids=[])
    assert one.token_ids != other.token_ids


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_equal_weights_give_a_mean_ratio_of_one_at_any_temperature(started: Started, temperature: float) -> None:
    """Log-probs taken before the temperature give a mean ratio far from 1 wherever the temperature is not 1."""
    requests = [Request((2, 3, 4 + index % 10), 300 + index) for index in range(64)]
    completions = started.engine.generate(requests, Sampling(temperature=temperature, max_tokens=32), stop_token_ids=[])
    model = AutoModelForCausalLM.from_pretrained(started.folder, dtype=torch_dtype(started.dtype)).eval()
    logp_train = response_logprobs(
        model,
        [request.prompt_ids for request in requests],
        [completion.token_ids for completion in completions],
        temperature=temperature,
        micro_batch_tokens=4096,
    )
    difference = np.concatenate(logp_train).astype(np.float64) - np.concatenate([c.logprobs for c in completions])
    # Logits of a few nats, off by some roundings of 2^-9 (bf16), 2^-12 (fp16), 2^-24 (fp32) each.
    noise = {"bf16": 0.1, "fp16": 0.1 / 8, "fp32": 0.1 / 2**15}[started.dtype] / temperature
    assert np.sqrt(np.mean(difference**2)) < noise
    assert abs(np.exp(difference).mean() - 1) < 4 * np.exp(difference).std() / np.sqrt(len(difference)) + 1e-6


def test_nucleus_logprobs_are_renormalised(started: Started) -> None:
    """log μ of a kept token is log softmax minus the log of the kept mass."""
    sampling = Sampling(top_p=0.5, max_tokens=1)
    requests = [Request((2, 3, 4), seed) for seed in range(32)]
    completions = started.engine.generate(requests, sampling, stop_token_ids=[])
    everything = started.engine.generate(requests * 8, Sampling(max_tokens=1), stop_token_ids=[])
    full = {c.token_ids[0]: c.logprobs[0] for c in everything}
    probabilities = sorted((np.exp(logprob) for logprob in full.values()), reverse=True)
    kept = np.cumsum(probabilities)[np.searchsorted(np.cumsum(probabilities), 0.5)]
    for completion in completions:
        assert completion.logprobs[0] == pytest.approx(full[completion.token_ids[0]] - np.log(kept), abs=1e-4)


def test_the_stop_token_is_part_of_the_record(started: Started) -> None:
    requests = [Request((2, 3, 4 + index % 10), 400 + index) for index in range(32)]
    free = started.engine.generate(requests, NEVER_STOP, stop_token_ids=[])
    stopped = started.engine.generate(requests, NEVER_STOP, stop_token_ids=[5, 6])
    assert {completion.finish_reason for completion in free} == {"length"}
    assert all(len(completion.token_ids) == 24 for completion in free)
    assert {completion.finish_reason for completion in stopped} == {"length", "stop"}
    for whole, cut in zip(free, stopped, strict=True):
        length = len(cut.token_ids)
        assert (cut.token_ids, cut.logprobs) == (whole.token_ids[:length], whole.logprobs[:length])
        assert not set(cut.token_ids[:-1]) & {5, 6}
        assert (cut.finish_reason == "stop") == (cut.token_ids[-1] in (5, 6))


def test_new_weights_give_what_a_fresh_engine_gives(started: Started) -> None:
    engine = started.engine
    before = numbers(engine.generate(SHORT, NEVER_STOP, stop_token_ids=[]))
    engine.load_weights(changed_weights(started.folder).items())
    try:
        assert (
            numbers(engine.generate(SHORT, NEVER_STOP, stop_token_ids=[]))
            == started.fresh_on_changed["short"]
            != before
        )
    finally:
        engine.load_weights(weights_of(started.folder).items())
    assert numbers(engine.generate(SHORT, NEVER_STOP, stop_token_ids=[])) == before


def test_sleeping_is_nothing_on_a_cpu_and_it_says_so(started: Started) -> None:
    before = numbers(started.engine.generate(SHORT, NEVER_STOP, stop_token_ids=[]))
    assert started.engine.description["sleep_mode"] is False
    started.engine.sleep()
    started.engine.wake()
    assert numbers(started.engine.generate(SHORT, NEVER_STOP, stop_token_ids=[])) == before


def test_no_cached_prefix_outlives_its_weights(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started.engine
    try:
        with monkeypatch.context() as patch:
            patch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
            engine.generate(LONG, NEVER_STOP, stop_token_ids=[])
            engine.load_weights(changed_weights(started.folder).items())
            stale = numbers(engine.generate(LONG, NEVER_STOP, stop_token_ids=[]))
        engine.load_weights(changed_weights(started.folder).items())
        assert (
            numbers(engine.generate(LONG, NEVER_STOP, stop_token_ids=[])) == started.fresh_on_changed["long"] != stale
        )
    finally:
        engine.load_weights(weights_of(started.folder).items())


def test_a_missing_weight_is_an_error(started: Started) -> None:
    weights = weights_of(started.folder)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        started.engine.load_weights(weights.items())
    started.engine.load_weights(weights_of(started.folder).items())


def test_an_interrupted_call_leaves_nothing_behind(started: Started) -> None:
    expected = numbers(started.engine.generate(SHORT[:2], NEVER_STOP, stop_token_ids=[]))

    def interrupt(finished: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        started.engine.generate(SHORT * 4, NEVER_STOP, stop_token_ids=[5, 6], progress=interrupt)
    assert numbers(started.engine.generate(SHORT[:2], NEVER_STOP, stop_token_ids=[])) == expected


def test_progress_counts_every_completion(started: Started) -> None:
    counts: list[int] = []
    started.engine.generate(SHORT * 3, NEVER_STOP, stop_token_ids=[5, 6], progress=counts.append)
    assert sum(counts) == len(SHORT * 3)
    assert len(counts) > 1


def test_what_does_not_fit_the_context_is_refused(started: Started) -> None:
    with pytest.raises(UserError, match="the 512 positions"):
        started.engine.generate(LONG, Sampling(max_tokens=312), stop_token_ids=[])


def test_a_temperature_that_vllm_would_raise_is_refused(started: Started) -> None:
    with pytest.raises(UserError, match=r"temperature 0\.001"):
        started.engine.generate(SHORT, Sampling(temperature=0.001), stop_token_ids=[])


@pytest.mark.parametrize("prompt", [(), (2, 20), (-1, 2)])
def test_a_prompt_that_no_model_could_read_is_refused(started: Started, prompt: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="request 1"):
        started.engine.generate([SHORT[0], Request(prompt, 0)], NEVER_STOP, stop_token_ids=[])


def test_weights_that_overflow_are_named(started: Started) -> None:
    weights = weights_of(started.folder)
    largest = {"bf16": 3.4e38, "fp16": 65504, "fp32": 3.4e38}[started.dtype]
    too_large = {**weights, "model.norm.weight": torch.full((64,), largest) * 1.01}
    with pytest.raises(NonFiniteError, match=rf"model\.norm\.weight is not finite in {started.dtype}"):
        started.engine.load_weights(too_large.items())
    started.engine.load_weights(weights.items())


def test_logits_that_overflow_are_an_error(started: Started) -> None:
    weights = weights_of(started.folder)
    nan = {**weights, "model.norm.weight": torch.full((64,), torch.nan)}
    with pytest.raises(NonFiniteError):
        started.engine.load_weights(nan.items())
    with pytest.raises(NonFiniteError, match="logits"):
        started.engine.generate(SHORT, NEVER_STOP, stop_token_ids=[])
    started.engine.load_weights(weights.items())


def test_an_fp32_head_is_not_rounded_and_follows_the_weights(tiny_model_folder: Path) -> None:
    engine = VllmEngine(tiny_model_folder, Precision.named("bf16", fp32_modules=("lm_head",)), SETTINGS)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def logits() -> torch.Tensor:
        return engine._llm.apply_model(lambda model: model.compute_logits(hidden))[0]

    def expected(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.float(), weights["model.embed_tokens.weight"])  # tied

    assert engine.description["fp32_modules"] == ["lm_head"]
    assert engine.dtype == "bf16"
    assert torch.equal(logits(), expected(weights_of(tiny_model_folder)))
    engine.load_weights(changed_weights(tiny_model_folder).items())
    assert torch.equal(logits(), expected(changed_weights(tiny_model_folder)))
    assert len(engine.generate(SHORT, NEVER_STOP, stop_token_ids=[])) == len(SHORT)
    engine.close()


def test_prompts_that_fill_more_than_a_step_wait_for_the_next(tiny_model_folder: Path) -> None:
    """vLLM computes 4,096 tokens of prompts in a step here. One that it cut in two would be a request whose generator
    has to be moved back."""
    engine = VllmEngine(tiny_model_folder, Precision.named("fp32"), SETTINGS.model_copy(update={"slots": 16}))
    requests = [
        Request(tuple(2 + (place * (3 + index)) % 18 for place in range(400)), 500 + index) for index in range(16)
    ]
    together = numbers(engine.generate(requests, Sampling(max_tokens=4), stop_token_ids=[]))
    last = numbers(engine.generate(requests[-1:], Sampling(max_tokens=4), stop_token_ids=[]))
    engine.close()
    assert together[-1:] == last


def test_memory_does_not_grow_with_weight_updates(tmp_path: Path) -> None:
    """20 updates of a model of 40 MB: one copy a update left behind would be 800 MB."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=16384, hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path)
    engine = VllmEngine(tmp_path, Precision.named("fp32"), SETTINGS)
    process = psutil.Process()

    def updates(count: int) -> int:
        for _ in range(count):
            engine.load_weights({name: weight * 1.01 for name, weight in model.state_dict().items()}.items())
            engine.generate(SHORT, Sampling(max_tokens=4), stop_token_ids=[])
        gc.collect()
        return process.memory_info().rss

    grown = updates(20) - updates(3)
    engine.close()
    assert grown < 200e6


def test_a_split_model_gives_what_a_whole_one_gives(tiny_model_folder: Path) -> None:
    """Tensor parallelism runs workers of their own, which read new weights from a file."""
    changed = changed_weights(tiny_model_folder)
    found = []
    for tensor_parallel in (1, 2):
        settings = SETTINGS.model_copy(update={"tensor_parallel": tensor_parallel, "gpu_memory": 0.1})
        engine = VllmEngine(tiny_model_folder, Precision.named("fp32"), settings)
        assert engine.description["tensor_parallel"] == tensor_parallel
        before = engine.generate(SHORT, NEVER_STOP, stop_token_ids=[])
        engine.load_weights(changed.items())
        found.append(before + engine.generate(SHORT, NEVER_STOP, stop_token_ids=[]))
        engine.close()
    whole, split = found
    assert [completion.token_ids for completion in whole] == [completion.token_ids for completion in split]
    np.testing.assert_allclose(
        [completion.logprobs for completion in whole], [completion.logprobs for completion in split], atol=1e-4
    )
    assert whole[: len(SHORT)] != whole[len(SHORT) :]


def test_a_device_that_this_vllm_does_not_run_on_is_refused(tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.device is cuda, and the installed vLLM"):
        VllmEngine(tiny_model_folder, Precision.named("bf16"), SETTINGS.model_copy(update={"device": "cuda"}))
