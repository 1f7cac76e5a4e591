"""Whole iterations of the methods beside the policy objectives: a critic, pairs, dynamic sampling, long responses.

Each against the same iterations in float64, every response by itself and the equations written out.
"""

import math
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM

from halfmatch.precision import Precision
from halfmatch.rl.checkpoints import Checkpoints
from halfmatch.rl.ranks import ALONE
from halfmatch.rl.values import ValueModel

sys.path.insert(0, str(Path(__file__).parent))
from ranked import build as build_on
from test_trainer import CannedEngine, DigitGrader, letters, quiet, settings

FP32 = Precision.named("fp32")
ADAPTER = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture
def stored(tiny_model_folder):
    """The tiny model, as every run starts from it."""
    return AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()


@pytest.fixture
def build(tiny_model_folder):
    """Trainers on the tiny model, in fp32 on canned rollouts."""

    def make(objective, precision=FP32, training=None, **changes):
        return build_on(tiny_model_folder, ALONE, objective, precision, training=training or settings(), **changes)

    return make


def run(trainer, folder):
    return trainer.run(Checkpoints(folder, course={}, keep=1), quiet)


def generated(trainer):
    """The requests of every call of the engine."""
    return [requests for kind, requests in trainer.engine.calls if kind == "generate"]


class Merged(torch.nn.Module):
    """W + 2 B A in the place of a weight W."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = a, b

    def forward(self, weight):
        return weight + 2 * self.b @ self.a


class Plain:
    """A model in float64 with its AdamW, stepped as the settings say.

    adapter: the weights A and B to start from, by the names of the trainer's; they alone are trained then.
    """

    def __init__(self, model, training, rate, adapter=None):
        self.model = deepcopy(model).double()
        getattr(self.model, "backbone", self.model).set_attn_implementation("eager")
        self.trained = dict(self.model.named_parameters())
        if adapter:
            self.model.requires_grad_(False)
            self.trained = {name: torch.nn.Parameter(weight.double()) for name, weight in adapter.items()}
            for path in {name.partition(".lora_")[0] for name in adapter}:
                sides = [self.trained[f"{path}.lora_{side}.default.weight"] for side in "AB"]
                register_parametrization(self.model.get_submodule(path), "weight", Merged(*sides))
        self.training, self.rate, self.steps = training, rate, 0
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), betas=training.adam_betas, eps=training.adam_eps, weight_decay=0.0
        )

    def step(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), self.training.clip_norm)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, self.steps / self.training.warmup_steps)
        self.optimizer.step()

    def logp(self, prompt, response):
        logits = self.model(input_ids=torch.tensor([[*prompt, *response]])).logits[0].double()
        table = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
        return table[torch.arange(len(response)), torch.tensor(response)]

    def values(self, prompt, response):
        hidden = self.model.backbone(input_ids=torch.tensor([[*prompt, *response]])).last_hidden_state[0]
        return self.model.value_head(hidden[len(prompt) - 1 : -1])[:, 0]

    def assert_close(self, masters, start):
        assert masters.keys() == self.trained.keys()
        for name, parameter in self.trained.items():
            moved = (parameter.detach() - start[name]).abs().max()
            assert moved > 1e-3, name
            torch.testing.assert_close(
                masters[name].double(), parameter.detach(), atol=5e-3 * float(moved), rtol=0, msg=name
            )


def weights_of(learner):
    return {name: weight.clone() for name, weight in learner.masters.named()}


def sampled(requests, longest):
    """Prompts and responses of requests, and whether each is right (1), wrong (0)."""
    completions = [CannedEngine().complete(request, longest) for request in requests]
    verdicts = DigitGrader().grade_many([(letters(c.token_ids), "7", c.finish_reason == "length") for c in completions])
    pairs = [(request.prompt_ids, c.token_ids) for request, c in zip(requests, completions, strict=True)]
    return pairs, [float(verdict.label == "correct") for verdict in verdicts]


# ------------------------------------------------------------------------------------------------------------ PPO
def plain_gae(reward, values, discount, gae_lambda):
    advantages, advantage, following = [], 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = (reward if t == len(values) - 1 else 0.0) + discount * following - values[t]
        advantage = delta + discount * gae_lambda * advantage
        following = values[t]
        advantages.insert(0, advantage)
    return advantages


@pytest.mark.parametrize("lora", [None, ADAPTER], ids=["all weights", "an adapter"])
def test_ppo_equals_plain_training_in_float64(build, stored, tmp_path, lora):
    """With an adapter the critic is trained whole, from the same backbone."""
    training = settings(clip_norm=0.5, critic_learning_rate=5e-3, gradient_steps=2, lora=lora)
    trainer = build("ppo", training=training, discount=0.9, gae_lambda=0.8, value_clip=0.1)
    starts = weights_of(trainer.policy), weights_of(trainer.critic.learner)
    policy = Plain(stored, training, training.learning_rate, adapter=starts[0] if lora else None)
    critic = Plain(ValueModel(stored), training, 5e-3)
    rows = run(trainer, tmp_path)

    losses = []
    for requests in generated(trainer):
        pairs, rewards = sampled(requests, training.sampling.max_tokens)
        with torch.no_grad():
            old = [policy.logp(*pair) for pair in pairs]
            before = [critic.values(*pair) for pair in pairs]
        raw = [plain_gae(r, v.tolist(), 0.9, 0.8) for r, v in zip(rewards, before, strict=True)]
        returns = [torch.tensor(a, dtype=torch.float64) + v for a, v in zip(raw, before, strict=True)]
        flat = torch.tensor([a for row in raw for a in row], dtype=torch.float64)
        advantages = [(torch.tensor(a, dtype=torch.float64) - flat.mean()) / (flat.std() + 1e-6) for a in raw]
        for first in range(2):
            own = range(first, len(pairs), 2)
            tokens = sum(len(pairs[row][1]) for row in own)
            loss, value_loss = 0.0, 0.0
            for row in own:
                ratio, a = torch.exp(policy.logp(*pairs[row]) - old[row]), advantages[row]
                loss = loss - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / tokens
                now, v = critic.values(*pairs[row]), before[row]
                clipped = v + (now - v).clamp(-0.1, 0.1)
                error = torch.maximum((now - returns[row]) ** 2, (clipped - returns[row]) ** 2)
                value_loss = value_loss + error.sum() / (2 * tokens)
            policy.step(loss)
            critic.step(value_loss)
            losses.append((loss.item(), value_loss.item()))
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in losses], rel=2e-3, abs=1e-5)
    assert [row["value_loss"] for row in rows] == pytest.approx([loss for _, loss in losses], rel=2e-3)
    policy.assert_close(dict(trainer.policy.masters.named()), starts[0])
    critic.assert_close(dict(trainer.critic.learner.masters.named()), starts[1])


def test_the_kl_in_the_reward_of_ppo_is_of_each_token(build):
    trainer = build("ppo", kl_coefficient=0.5, kl_estimator="k1", kl_place="reward", scale_by_std=False)
    list(trainer.iteration())  # the policy has moved away from the initial one
    rollouts = trainer.sample()
    experience = trainer.experience(rollouts, trainer.plan(rollouts))
    difference = 0.5 * (experience.logp_old - experience.logp_reference)
    for row, count in enumerate(rollouts.batch.response_mask.sum(1).tolist()):
        values = experience.targets.values[row, :count].tolist()
        rewards = [-penalty for penalty in difference[row, :count].tolist()]
        rewards[-1] += rollouts.rewards[row].item()
        expected, advantage, following = [], 0.0, 0.0
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            advantage = reward + following - value + 0.95 * advantage
            following = value
            expected.insert(0, advantage)
        assert experience.advantages[row, :count].tolist() == pytest.approx(expected, abs=1e-5)
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_ppo_in_sixteen_bits_has_an_fp32_value_head_and_a_loss_scale_for_each(build, tmp_path, name):
    precision = Precision.named(name, emulate="always", fp32_modules=("value_head",))
    rows = run(build("ppo", precision), tmp_path)
    model = build("ppo", precision).critic.learner.model
    assert model.value_head.weight.dtype == torch.float32
    assert model.backbone.layers[0].mlp.up_proj.weight.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    for row in rows:
        assert row["critic_loss_scale"] == row["loss_scale"] == (65536.0 if name == "fp16" else None)
        assert math.isfinite(row["value_loss"])
        assert row["critic_gradient_norm"] > 0
        assert row["critic_step_skipped"] is False


def test_an_overflow_of_the_critic_leaves_the_policy_alone(build):
    precision = Precision.named("fp16", emulate="always", loss_scaling={"max_scale": 2.0**60})
    trainer = build("ppo", precision)
    trainer.critic.learner.scaler.factor = 2.0**60
    before = weights_of(trainer.policy), weights_of(trainer.critic.learner)
    row = next(trainer.iteration())
    assert row["critic_step_skipped"]
    assert row["critic_first_non_finite"].startswith("gradient of")
    assert not row["step_skipped"]
    assert trainer.critic.learner.loss_scale == 2.0**59
    assert trainer.policy.loss_scale == 65536.0
    after = weights_of(trainer.policy), weights_of(trainer.critic.learner)
    assert any(not torch.equal(after[0][key], before[0][key]) for key in after[0])
    assert all(torch.equal(after[1][key], before[1][key]) for key in after[1])


@pytest.mark.parametrize("name", ["fp16", "fp32"])
def test_resumed_with_a_critic_a_run_has_the_same_bits(build, tmp_path, name):
    precision = Precision.named(name, emulate="always", fp32_modules=("value_head",))
    training = settings(iterations=4, checkpoint_every=2)
    whole = build("ppo", precision, training)
    rows = run(whole, tmp_path / "whole")
    first = build("ppo", precision, training)
    first.settings = training.model_copy(update={"iterations": 2})
    run(first, tmp_path / "parts")
    second = build("ppo", precision, training)
    assert repr(run(second, tmp_path / "parts")) == repr(rows)
    for resumed, uninterrupted in ((second.policy, whole.policy), (second.critic.learner, whole.critic.learner)):
        assert resumed.state() == uninterrupted.state()
        for key, tensor in uninterrupted.tensors().items():
            assert torch.equal(resumed.tensors()[key], tensor), key


# ------------------------------------------------------------------------------------------------------------ DPO
def plain_pairs(rewards, samples):
    pairs = []
    for start in range(0, len(rewards), samples):
        group = range(start, start + samples)
        pairs += zip(
            [row for row in group if rewards[row] == 1], [row for row in group if rewards[row] == 0], strict=False
        )
    return pairs


@pytest.mark.parametrize("lora", [None, ADAPTER], ids=["all weights", "an adapter"])
def test_dpo_equals_plain_training_in_float64(build, stored, tmp_path, lora):
    training = settings(prompts_per_iteration=3, clip_norm=0.5, lora=lora)
    trainer = build("dpo", training=training, beta=0.5, dynamic_sampling=False)
    start = weights_of(trainer.policy)
    policy = Plain(stored, training, training.learning_rate, adapter=start if lora else None)
    reference = Plain(stored, training, training.learning_rate)
    rows = run(trainer, tmp_path)

    losses, margins, counts = [], [], []
    for requests in generated(trainer):
        responses, rewards = sampled(requests, training.sampling.max_tokens)
        pairs = plain_pairs(rewards, 4)
        counts.append(len(pairs))
        for first in range(2):
            own = pairs[first::2]
            of_pairs = []
            for chosen, rejected in own:
                scores = []
                for row in (chosen, rejected):
                    with torch.no_grad():
                        initial = reference.logp(*responses[row]).sum()
                    scores.append(policy.logp(*responses[row]).sum() - initial)
                of_pairs.append(0.5 * (scores[0] - scores[1]))
            loss = sum(torch.log1p(torch.exp(-margin)) for margin in of_pairs) / len(own)
            policy.step(loss)
            losses.append(loss.item())
            margins.append(sum(of_pairs).item() / len(own))
    assert min(counts) >= 2
    assert losses[0] == pytest.approx(math.log(2))
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-4)
    assert [row["preference_margin"] for row in rows] == pytest.approx(margins, rel=1e-3, abs=1e-5)
    assert rows[0]["preference_margin"] == 0  # the reference has the policy's bits at the start
    policy.assert_close(dict(trainer.policy.masters.named()), start)


def test_pairs_become_more_likely_to_be_told_apart(build, tmp_path):
    training = settings(iterations=1, prompts_per_iteration=4, gradient_steps=1, learning_rate=3e-3)
    trainer = build("dpo", Precision.named("fp16", emulate="always"), training, beta=0.5)
    rollouts = trainer.sample()
    plans = trainer.plan(rollouts)
    experience = trainer.experience(rollouts, plans)
    columns = [trainer.gradient_step(experience, plans[0], is_first=False)[0] for _ in range(12)]
    assert columns[-1]["preference_margin"] > 1
    assert columns[-1]["preference_accuracy"] == 1
    assert columns[-1]["loss"] < 0.5 * columns[0]["loss"]


def test_an_iteration_without_a_pair_changes_nothing_and_is_logged(build, tmp_path):
    trainer = build("dpo", training=settings(iterations=2, sampling_rounds=3))
    trainer.grader.grade_many = lambda items: [type("Verdict", (), {"label": "wrong"}) for _ in items]
    before = weights_of(trainer.policy)
    rows = run(trainer, tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert row["loss"] == row["gradient_norm"] == row["mixed_problems"] == row["reward"] == 0
        assert row["problems_drawn"] == 6
        assert row["k3"] is row["preference_margin"] is None
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(trainer.policy).items())


# ----------------------------------------------------------------------------------------------------------- DAPO
def test_dapo_draws_until_every_problem_is_mixed_and_counts_it(build, tmp_path):
    training = settings(iterations=4, prompts_per_iteration=3, samples_per_prompt=2)
    trainer = build("dapo", training=training)
    rows = run(trainer, tmp_path)
    calls = [len(requests) // 2 for requests in generated(trainer)]
    drawn = [row["problems_drawn"] for row in rows if row["step"] % 2 == 0]
    assert sum(drawn) == sum(calls) == trainer.sampler.position
    assert max(drawn) > 3
    assert all(row["mixed_problems"] == 3 for row in rows)
    _, rewards = sampled([request for requests in generated(trainer) for request in requests], 9)
    means, start = [], 0
    for count in drawn:
        means.append(sum(rewards[start : start + 2 * count]) / (2 * count))
        start += 2 * count
    assert [row["reward"] for row in rows if row["step"] % 2 == 0] == pytest.approx(means)


def test_without_dynamic_sampling_nothing_is_counted(build):
    row = next(build("dapo", dynamic_sampling=False).iteration())
    assert row["problems_drawn"] is row["mixed_problems"] is None


@pytest.mark.parametrize("name", ["dapo", "ppo"])
def test_long_responses_are_rewarded_less(build, name):
    """The longest length allowed is 9, and the buffer its last third: 1/3 off at 7 tokens, 2/3 at 8, all at 9."""
    training = settings(prompts_per_iteration=4)
    trainer = build(
        name, training=training, overlong_penalty=2.0, overlong_share=1 / 3, scale_by_std=False, dynamic_sampling=False
    )
    rollouts = trainer.sample()
    experience = trainer.experience(rollouts, trainer.plan(rollouts))
    lengths = rollouts.batch.response_mask.sum(1).tolist()
    penalties = [2 * max(0.0, (length - 6) / 3) for length in lengths]
    shaped = [reward - penalty for reward, penalty in zip(rollouts.rewards.tolist(), penalties, strict=True)]
    assert {7, 8, 9} <= set(lengths)
    if name == "dapo":
        for start in range(0, 16, 4):
            group = shaped[start : start + 4]
            expected = [reward - sum(group) / 4 for reward in group]
            assert experience.advantages[start : start + 4].tolist() == pytest.approx(expected, abs=1e-6)
    else:  # every value is 0, so the last token's advantage is the reward
        last = [experience.advantages[row, length - 1].item() for row, length in enumerate(lengths)]
        assert last == pytest.approx(shaped, abs=1e-6)
    assert trainer.sample().mean_reward >= 0  # the log's reward is that of the verdicts
