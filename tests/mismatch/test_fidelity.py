"""Gradient fidelity on a model small enough that its gradients can be had another way."""

import math
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from halfmatch import artifacts
from halfmatch.errors import UserError
from halfmatch.mismatch import fidelity
from halfmatch.mismatch.bias_variance import bias_and_variance
from halfmatch.mismatch.fidelity import Group, measure, read_groups
from halfmatch.precision import LossScaling
from halfmatch.rl.objectives import OBJECTIVES

VOCABULARY, TEMPERATURE, MAX_LENGTH = 7, 0.8, 10


class TwoTokens(torch.nn.Module):
    """A causal model of the last token alone: embedding, tanh, linear; called as transformers' models are."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.config = PretrainedConfig()
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, 6, generator=generator))
        self.head = torch.nn.Parameter(torch.randn(VOCABULARY, 6, generator=generator))

    def forward(self, input_ids, logits_to_keep, **_):
        hidden = torch.tanh(self.embedding[input_ids[:, logits_to_keep]])
        return SimpleNamespace(logits=hidden @ self.head.T)


def log_probs(model, prompt, response):
    """log π of a response, token by token and in the model's dtype."""
    tokens = [*prompt, *response]
    logits = torch.tanh(model.embedding[tokens[len(prompt) - 1 : -1]]) @ model.head.T
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)[torch.arange(len(response)), response]


def random_groups(model, problems=10, responses=4, mismatch=0.2, seed=0):
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(problems):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 4)).tolist()
        sampled = [rng.integers(0, VOCABULARY, rng.integers(1, 7)).tolist() for _ in range(responses)]
        exact = [log_probs(model, prompt, response).detach().double().numpy() for response in sampled]
        rollout = [(logp + mismatch * rng.normal(size=len(logp))).tolist() for logp in exact]
        rewards = torch.tensor([1.0, 0.0, *rng.integers(0, 2, responses - 2).tolist()])
        groups.append(Group(f"p{number}", prompt, sampled, rollout, rewards))
    return groups


def run(model, reference, groups, names=("pg",), **changes):
    settings = {
        "loss_scaling": None,
        "max_length": MAX_LENGTH,
        "temperature": TEMPERATURE,
        "micro_batch_tokens": 40,
        **changes,
    }
    return measure(model, reference, groups, {name: OBJECTIVES[name] for name in names}, **settings)


def exact_gradient(model, groups, weight):
    """−∇ Σ w A log π / (max_length · responses) in float64; weight(log π, log μ) → w of a response's tokens."""
    model = deepcopy(model).double()
    loss = 0.0
    for group in groups:
        advantages = group.rewards.double() - group.rewards.double().mean()
        for response, rollout, advantage in zip(group.token_ids, group.logp_rollout, advantages, strict=True):
            logp = log_probs(model, group.prompt_ids, response)
            loss -= (weight(logp.detach(), torch.tensor(rollout).double()) * advantage * logp).sum()
    loss = loss / (MAX_LENGTH * sum(len(group.token_ids) for group in groups))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).numpy()


def compare(gradient, truth):
    norms = np.linalg.norm(gradient), np.linalg.norm(truth)
    return gradient @ truth / (norms[0] * norms[1]), norms[0] / norms[1]


WEIGHTS = {
    "pg": lambda logp, rollout: torch.ones_like(logp),
    "pg-seq-is": lambda logp, rollout: (logp - rollout).sum().exp(),
    "pg-token-is": lambda logp, rollout: (logp - rollout).exp(),
    "grpo-token-tis": lambda logp, rollout: (logp - rollout).exp().clamp(max=2),
    "grpo-seq-mis": lambda logp, rollout: (logp - rollout).sum().exp() * ((logp - rollout).sum().exp() <= 10),
}


def test_without_mismatch_in_the_same_precision_every_gradient_is_the_reference():
    model = TwoTokens()
    groups = random_groups(model, mismatch=0.0)
    names = tuple(name for name in OBJECTIVES if name not in ("ppo", "dpo"))  # which need more than rollouts
    result = run(model, deepcopy(model), groups, names=names)
    for name in names:
        assert list(result["objectives"][name]["cosine"].values()) == pytest.approx([1, 1, 1], abs=1e-5), name
        assert list(result["objectives"][name]["norm_ratio"].values()) == pytest.approx([1, 1, 1], abs=1e-3), name
    assert result["objectives"]["pg-seq-is"]["statistics"]["weight_raw_mean"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", WEIGHTS)
def test_cosine_and_norms_are_those_of_gradients_had_another_way(name):
    model = TwoTokens()
    groups = random_groups(model, mismatch=0.4)
    result = run(model, deepcopy(model), groups, names=(name,))["objectives"][name]
    expected = compare(exact_gradient(model, groups, WEIGHTS[name]), exact_gradient(model, groups, WEIGHTS["pg"]))
    assert result["cosine"]["value"] == pytest.approx(expected[0], abs=1e-5)
    assert result["norm_ratio"]["value"] == pytest.approx(expected[1], rel=1e-4)
    if name != "pg":
        assert expected[0] < 0.999


def test_bias_and_variance_are_those_of_gradients_had_another_way():
    model = TwoTokens()
    groups = random_groups(model, problems=6, mismatch=0.4)
    found = run(model, deepcopy(model), groups, ("pg-token-is", "pg-seq-is"))
    assert found["blocks"] == 6
    responses = sum(len(group.token_ids) for group in groups)
    names = ("pg-token-is", "pg-seq-is", "pg")  # the estimator, the unbiased one, the reference
    by_block = [
        [exact_gradient(model, [group], WEIGHTS[name]) * len(group.token_ids) / responses for group in groups]
        for name in names
    ]
    expected = bias_and_variance(*by_block, responses=responses)
    for number in ("variance", "squared_bias", "balance_responses"):
        assert found["objectives"]["pg-token-is"][number] == pytest.approx(expected[number], rel=1e-3, nan_ok=True)
    assert found["objectives"]["pg-seq-is"]["squared_bias"]["value"] == pytest.approx(0, abs=1e-9)


def test_objectives_with_other_denominators_have_references_of_their_own():
    model = TwoTokens()
    groups = random_groups(model, mismatch=0.0)
    found = run(model, deepcopy(model), groups, ("gspo", "pg", "grpo"))
    assert list(found["objectives"]) == ["gspo", "pg", "grpo"]
    for result in found["objectives"].values():
        assert result["cosine"]["value"] == pytest.approx(1, abs=1e-5)
        assert result["squared_bias"]["value"] == pytest.approx(0, abs=1e-6)


def test_interval_is_the_jackknife_over_blocks_of_problems(monkeypatch):
    model = TwoTokens()
    groups = random_groups(model, problems=9, mismatch=0.4)
    monkeypatch.setattr(fidelity, "GRADIENT_BYTES", 0)
    monkeypatch.setattr(fidelity, "MIN_BLOCKS", 4)
    result = run(model, deepcopy(model), groups, names=("pg-seq-is",))
    assert (result["problems"], result["blocks"]) == (9, 4)
    left_out = []
    for block in range(4):
        kept = [group for number, group in enumerate(groups) if number % 4 != block]
        pair = (exact_gradient(model, kept, WEIGHTS[name]) for name in ("pg-seq-is", "pg"))
        left_out.append(math.atanh(compare(*pair)[0]))
    half_width = 3.182446 * math.sqrt(3 * np.var(left_out))  # t(0.975, 3)
    cosine = result["objectives"]["pg-seq-is"]["cosine"]
    assert cosine["low"] == pytest.approx(math.tanh(math.atanh(cosine["value"]) - half_width), abs=1e-4)
    assert cosine["high"] == pytest.approx(math.tanh(math.atanh(cosine["value"]) + half_width), abs=1e-4)


@pytest.mark.parametrize("budget", [1, 13, 10_000])
def test_micro_batches_do_not_change_the_result(budget):
    model = TwoTokens()
    groups = random_groups(model)
    results = [
        run(model, deepcopy(model), groups, ("pg-seq-is",), micro_batch_tokens=tokens)["objectives"]["pg-seq-is"]
        for tokens in (40, budget)
    ]
    assert results[0]["cosine"] == pytest.approx(results[1]["cosine"], abs=1e-6)
    assert results[0]["statistics"] == pytest.approx(results[1]["statistics"], rel=1e-5)


def test_bf16_keeps_less_of_the_gradient_than_fp16():
    reference = TwoTokens()
    groups = random_groups(reference, problems=20, mismatch=0.0)
    cosine = {}
    for dtype, scaling in ((torch.bfloat16, None), (torch.float16, LossScaling())):
        model = deepcopy(reference).to(dtype)
        cosine[dtype] = run(model, reference, groups, loss_scaling=scaling)["objectives"]["pg"]["cosine"]["value"]
    assert 0.99 < cosine[torch.bfloat16] < cosine[torch.float16] < 1
    assert 1 - cosine[torch.float16] < 0.1 * (1 - cosine[torch.bfloat16])


def test_loss_scale_backs_off_until_the_gradient_is_finite():
    reference = TwoTokens()
    groups = random_groups(reference, mismatch=0.0)
    model = deepcopy(reference).half()
    scaling = LossScaling(initial_scale=2.0**24, growth_interval=1)
    result = run(model, reference, groups, loss_scaling=scaling)["objectives"]["pg"]
    assert 1 < result["loss_scale"] < 2.0**24
    assert result["cosine"]["value"] > 0.999
    assert result["norm_ratio"]["value"] == pytest.approx(1, abs=0.01)


def test_a_gradient_that_is_never_finite_is_undefined_and_no_error():
    reference = TwoTokens()
    groups = random_groups(reference)
    groups[0].logp_rollout[0][0] = math.nan
    result = run(deepcopy(reference).half(), reference, groups, ("pg-seq-is",), loss_scaling=LossScaling())
    assert result["objectives"]["pg-seq-is"]["loss_scale"] == 1.0
    assert math.isnan(result["objectives"]["pg-seq-is"]["cosine"]["value"])


def test_another_model_as_reference_is_refused():
    model, other = TwoTokens(), TwoTokens()
    other.head = torch.nn.Parameter(torch.zeros(VOCABULARY, 5))
    with pytest.raises(ValueError, match="differ in their parameters"):
        run(model, other, random_groups(model))


# ----------------------------------------------------------------------------------------------------------- rewards
def completions(path, verdicts):
    rows = [
        {
            "problem_id": problem_id,
            "sample": sample,
            "prompt_ids": [1, 2],
            "token_ids": [3] if verdict != "empty" else [],
            "logprobs": [-1.0] if verdict != "empty" else [],
            "finish_reason": "stop",
            "verdict": None if verdict in (None, "empty") else verdict,
        }
        for problem_id, labels in verdicts.items()
        for sample, verdict in enumerate(labels)
    ]
    artifacts.write(path, "completions", rows, {})
    return path


def test_graded_rewards_where_enough_problems_are_mixed(tmp_path):
    verdicts = {f"p{number}": ["correct", "wrong", "truncated", "timeout"] for number in range(8)}
    path = completions(tmp_path / "c.parquet", {**verdicts, "solved": ["correct"] * 4, "unsolved": ["wrong"] * 4})
    groups, kind = read_groups(path, seed=0)
    assert kind == "graded"
    assert [group.problem_id for group in groups] == list(verdicts)
    # a time-out is no wrong answer: the mean of the others
    assert groups[0].rewards.tolist() == pytest.approx([1, 0, 0, 1 / 3])


def test_random_rewards_where_the_verdicts_say_nothing(tmp_path):
    verdicts = {f"p{number}": ["wrong"] * 5 for number in range(9)} | {"ungraded": [None, None]}
    path = completions(tmp_path / "c.parquet", verdicts)
    groups, kind = read_groups(path, seed=0)
    assert kind == "random"
    assert [group.rewards.sum().item() for group in groups] == [2] * 9 + [1]
    assert len({tuple(group.rewards.tolist()) for group in groups[:9]}) > 2
    again, other = read_groups(path, seed=0)[0], read_groups(path, seed=1)[0]
    assert all(torch.equal(a.rewards, b.rewards) for a, b in zip(groups, again, strict=True))
    assert not all(torch.equal(a.rewards, b.rewards) for a, b in zip(groups, other, strict=True))


def test_groups_are_whole_and_keep_tokens_with_their_log_probs(tmp_path):
    path = completions(tmp_path / "c.parquet", {"p": ["wrong", "empty", "correct"], "single": ["correct"]})
    groups, _ = read_groups(path, seed=0)
    assert [(group.problem_id, group.prompt_ids, group.token_ids) for group in groups] == [("p", [1, 2], [[3], [3]])]
    assert groups[0].logp_rollout == [[-1.0], [-1.0]]


def test_one_response_a_problem_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"raise mismatch\.samples"):
        read_groups(completions(tmp_path / "c.parquet", {"p": ["correct"], "q": ["wrong"]}), seed=0)
