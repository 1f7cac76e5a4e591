"""The critic's steps against plain float64 training, its loss scale, and its state."""

import math
from copy import deepcopy

import pytest
import torch

from halfmatch.config import Training
from halfmatch.precision import Precision
from halfmatch.rl import parts
from halfmatch.rl.batching import collate
from halfmatch.rl.critic import Critic
from halfmatch.rl.experience import plan_steps
from halfmatch.rl.parts import Objective
from halfmatch.rl.ranks import ALONE
from halfmatch.rl.values import ValueModel

EOS = 1
PROMPTS = [[2, 10, 3], [4], [5, 6, 7, 8, 9], [4, 4]]
RESPONSES = [[13, 14, 15, 11, EOS], [12, 13, 14, 15, 16, 17, 18], [11, EOS], [3, 9, EOS]]
REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0])
SETTINGS = Training(
    objectives=("ppo",), adam_eps=1e-4, clip_norm=0.5, weight_decay=0.1,
)  # fmt: skip
PART = parts.Critic(discount=0.9, gae_lambda=0.8, value_clip=0.05)


@pytest.fixture
def model(tiny_model_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()


@pytest.fixture
def build(model):
    def make(precision="fp32", part=PART, **changes):
        objective = Objective(parts.ClippedRatio(), critic=part, source="here")
        return Critic(
            model, objective, settings=SETTINGS, precision=Precision.named(precision, emulate="always", **changes)
        )

    return make


def batch_and_plan(budget=10_000):
    batch = collate(PROMPTS, RESPONSES, {EOS})
    return batch, *plan_steps(torch.arange(4)[:, None], batch.lengths, steps=1, budget=budget, ranks=ALONE)


def train(critic, steps, budget=10_000):
    """Steps on one batch, whose targets are estimated anew for every second one."""
    batch, plan = batch_and_plan(budget)
    columns = []
    for step in range(steps):
        if step % 2 == 0:
            _, targets = critic.estimate(batch, REWARDS, None, [plan])
        columns.append(critic.gradient_step(batch, targets, plan, 5e-3 * min(1.0, (step + 1) / 2)))
    return columns


def weights_of(critic):
    return {name: weight.clone() for name, weight in critic.learner.masters.named()}


def plain_training(model, steps):
    """The same in float64: each response by itself, the equations written out, plain autograd and AdamW."""
    values = ValueModel(model).double()
    values.backbone.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(
        values.parameters(), betas=SETTINGS.adam_betas, eps=SETTINGS.adam_eps, weight_decay=SETTINGS.weight_decay
    )

    def value(prompt, response):
        hidden = values.backbone(input_ids=torch.tensor([prompt + response])).last_hidden_state[0]
        return values.value_head(hidden[len(prompt) - 1 : -1])[:, 0]

    tokens = sum(map(len, RESPONSES))
    losses = []
    for step in range(steps):
        if step % 2 == 0:
            old, returns = [], []
            for prompt, response, reward in zip(PROMPTS, RESPONSES, REWARDS.tolist(), strict=True):
                v = value(prompt, response).tolist()
                advantage, following, target = 0.0, 0.0, [0.0] * len(v)
                for t in reversed(range(len(v))):
                    delta = (reward if t == len(v) - 1 else 0.0) + 0.9 * following - v[t]
                    advantage = delta + 0.9 * 0.8 * advantage
                    following, target[t] = v[t], advantage + v[t]
                old.append(torch.tensor(v, dtype=torch.float64))
                returns.append(torch.tensor(target, dtype=torch.float64))
        loss = 0.0
        for prompt, response, before, target in zip(PROMPTS, RESPONSES, old, returns, strict=True):
            now = value(prompt, response)
            clipped = before + (now - before).clamp(-0.05, 0.05)
            loss = loss + torch.maximum((now - target) ** 2, (clipped - target) ** 2).sum() / (2 * tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(values.parameters(), SETTINGS.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 2)
        optimizer.step()
        losses.append(loss.item())
    return {name: weight.detach() for name, weight in values.named_parameters()}, losses


def test_steps_equal_plain_training_in_float64(build, model):
    reference = deepcopy(model)
    critic = build()
    start = weights_of(critic)
    columns = train(critic, 4)
    expected, losses = plain_training(reference, 4)
    assert [row["value_loss"] for row in columns] == pytest.approx(losses, rel=1e-3)
    assert any(row["value_clip_share"] > 0 for row in columns)
    for name, weight in weights_of(critic).items():
        moved = (expected[name] - start[name]).abs().max()
        assert moved > 1e-3
        torch.testing.assert_close(weight.double(), expected[name], atol=5e-3 * float(moved), rtol=0, msg=name)


def test_steps_do_not_depend_on_the_split_into_micro_batches(build):
    whole, split = build(), build()
    first, second = train(whole, 3), train(split, 3, budget=9)
    for row, other in zip(first, second, strict=True):
        assert row["value_loss"] == pytest.approx(other["value_loss"], rel=1e-4)
        assert row["critic_gradient_norm"] == pytest.approx(other["critic_gradient_norm"], rel=1e-3)
        assert row["value_clip_share"] == other["value_clip_share"]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_it_learns_which_states_are_worth_more(build, precision):
    critic = build(precision, part=parts.Critic(), fp32_modules=("value_head",))
    rows = train(critic, 40)
    assert rows[0]["explained_variance"] == 0  # every value is 0
    assert rows[-1]["explained_variance"] > 0.8
    assert rows[-1]["value_loss"] < 0.2 * rows[0]["value_loss"]
    assert not any(row["critic_step_skipped"] for row in rows)


def test_the_first_advantages_are_the_rewards_to_come(build):
    batch, plan = batch_and_plan()
    penalties = torch.where(batch.response_mask, 0.5, math.nan)
    advantages, targets = build().estimate(batch, REWARDS, penalties, [plan])
    assert not targets.values.any()
    assert torch.equal(advantages, targets.returns)
    # the response of 2 tokens, reward 1, γ λ = 0.72: A_1 = 1 − ½, A_0 = −½ + 0.72 A_1
    assert advantages[2].tolist() == pytest.approx([-0.5 + 0.72 * 0.5, 0.5, 0, 0, 0, 0, 0])


def test_an_overflow_skips_the_critics_step_and_backs_its_own_scale_off(build):
    critic = build("fp16", loss_scaling={"initial_scale": 2.0**40, "max_scale": 2.0**40})
    before = weights_of(critic)
    (row,) = train(critic, 1)
    assert row["critic_step_skipped"] is True
    assert math.isnan(row["critic_gradient_norm"])
    assert row["critic_loss_scale"] == 2.0**40
    assert row["critic_first_non_finite"].startswith("gradient of")
    assert critic.learner.scaler.factor == 2.0**39
    assert critic.learner.masters.gradients == []
    assert not critic.learner.optimizer.state_dict()["state"]
    for name, weight in critic.learner.masters.named():
        assert torch.equal(weight, before[name])
    rows = train(critic, 40)
    assert not rows[-1]["critic_step_skipped"]
    assert rows[-1]["value_loss"] < rows[0]["value_loss"]
