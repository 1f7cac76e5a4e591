import json
import math
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from halfmatch.config import EngineSettings, Sampling, Training
from halfmatch.engines import Completion, NonFiniteError
from halfmatch.errors import UserError
from halfmatch.precision import Precision
from halfmatch.rl.batching import collate
from halfmatch.rl.checkpoints import Checkpoints
from halfmatch.rl.objectives import OBJECTIVES, named
from halfmatch.rl.rollouts import Problem
from halfmatch.rl.trainer import Plan, Trainer

EOS = 1
PROBLEMS = [Problem(f"p{index}", "7", (2 + index, 12, 3 + index)) for index in range(5)]
SETTINGS = Training(
    iterations=2,
    prompts_per_iteration=2,
    samples_per_prompt=4,
    gradient_steps=2,
    sampling=Sampling(max_tokens=9),
    learning_rate=1e-2,
    warmup_steps=2,
    adam_eps=1e-4,
    micro_batch_tokens=24,
    checkpoint_every=1,
    probe=False,
)


def settings(**changes):
    return Training.model_validate({**SETTINGS.model_dump(), **changes})


@dataclass
class Verdict:
    label: str


class DigitGrader:
    """Correct if the fourth last letter is an even digit; a rule without a meaning, but a fixed one."""

    def grade_many(self, items):
        return [
            Verdict("truncated" if truncated else "correct" if text[-4:-3] in "02468abc" else "wrong")
            for text, _, truncated in items
        ]


class CannedEngine:
    """Responses that follow from the request's seed alone; log-probs near those of a uniform distribution."""

    def __init__(self):
        self.dtype, self.description = "fp32", {}
        self.calls = []

    def load_weights(self, weights):
        self.calls.append(("load", {name: weight.clone() for name, weight in weights}))

    def generate(self, requests, sampling, *, stop_token_ids, progress=None):
        self.calls.append(("generate", list(requests)))
        return [self.complete(request, sampling.max_tokens) for request in requests]

    def complete(self, request, longest):
        generator = torch.Generator().manual_seed(request.seed)
        count = int(torch.randint(2, longest + 1, (1,), generator=generator))
        ids = torch.randint(2, 20, (count,), generator=generator).tolist()
        stopped = count < longest
        if stopped:
            ids[-1] = EOS
        logprobs = (-3 - torch.rand(count, generator=generator)).tolist()
        return Completion(ids, logprobs, "stop" if stopped else "length")

    def sleep(self):
        self.calls.append(("sleep", None))

    def wake(self):
        self.calls.append(("wake", None))

    def close(self):
        pass


def letters(ids):
    return "".join("<>0123456789x=abcdef"[token] for token in ids)


@pytest.fixture
def build(tiny_model_folder):
    """Trainers on the tiny model, by default in fp32 on canned rollouts."""
    from transformers import AutoModelForCausalLM

    def make(objective="pg-seq-is", precision=None, engine=None, training=SETTINGS, seed=0, **changes):
        precision = precision or Precision.named("fp32")
        if engine is None:
            engine = CannedEngine()
            engine.dtype = precision.rollout
        if engine == "transformers":
            from halfmatch.engines import create

            engine = create("transformers", tiny_model_folder, precision, EngineSettings(slots=8))
        return Trainer(
            AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval(),
            engine=engine,
            grader=DigitGrader(),
            decode=letters,
            stop_token_ids=[EOS],
            problems=PROBLEMS,
            settings=training,
            precision=precision,
            objective=named(objective, changes),
            seed=seed,
        )

    return make


def weights_of(trainer):
    return {name: weight.clone() for name, weight in trainer.policy.masters.named()}


def quiet(done, note):
    pass


# ------------------------------------------------------------------------------------- against a plain reference
def plain_loss(name, logp, logp_old, logp_rollout, advantage, longest):
    """Loss of one response from the definitions in the paper, with nothing shared with the package."""
    match name:
        case "pg":
            return -(advantage * logp.sum()) / longest
        case "pg-seq-is":
            weight = torch.exp(logp.detach().sum() - logp_rollout.sum())
            return -(weight * advantage * logp.sum()) / longest
        case "grpo":
            ratio = torch.exp(logp - logp_old)
            return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / longest
        case "gspo":
            ratio = torch.exp((logp - logp_old).mean())
            return -torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)


def plain_training(model, engine, name, training, steps_drawn):
    """The same iterations in float64: every response by itself, plain autograd over each step's whole batch."""
    model = model.double()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=training.adam_betas, eps=training.adam_eps, weight_decay=training.weight_decay
    )
    step, norms = 0, []
    for requests in steps_drawn:
        responses = [engine.complete(request, training.sampling.max_tokens) for request in requests]
        verdicts = DigitGrader().grade_many(
            [(letters(r.token_ids), "7", r.finish_reason == "length") for r in responses]
        )
        rewards = torch.tensor([float(v.label == "correct") for v in verdicts], dtype=torch.float64).view(-1, 4)
        advantages = rewards - rewards.mean(1, keepdim=True)
        if name == "gspo":
            advantages = advantages / (rewards.std(1, keepdim=True) + 1e-6)
        advantages = advantages.flatten()

        def log_prob(request, response):
            ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
            table = torch.log_softmax(model(input_ids=ids).logits[0].double(), dim=-1)
            rows = table[len(request.prompt_ids) - 1 : -1]
            return rows[torch.arange(len(response.token_ids)), torch.tensor(response.token_ids)]

        with torch.no_grad():
            old = [log_prob(*pair) for pair in zip(requests, responses, strict=True)]
        size = len(requests) // training.gradient_steps
        for first in range(training.gradient_steps):
            rows = range(first, len(requests), training.gradient_steps)
            loss = (
                sum(
                    plain_loss(
                        name,
                        log_prob(requests[row], responses[row]),
                        old[row],
                        torch.tensor(responses[row].logprobs, dtype=torch.float64),
                        advantages[row],
                        training.sampling.max_tokens,
                    )
                    for row in rows
                )
                / size
            )
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)))
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * min(1.0, step / training.warmup_steps)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


@pytest.mark.parametrize("name", ["pg", "pg-seq-is", "grpo", "gspo"])
def test_two_iterations_equal_plain_training_in_float64(build, tmp_path, name):
    training = settings(weight_decay=0.1, clip_norm=0.05)
    trainer = build(name, training=training)
    reference = deepcopy(trainer.policy.model)
    reference.set_attn_implementation("eager")
    start = weights_of(trainer)
    rows = trainer.run(Checkpoints(tmp_path, course={}, keep=1), quiet)

    drawn = [requests for kind, requests in trainer.engine.calls if kind == "generate"]
    expected, norms = plain_training(reference, CannedEngine(), name, training, drawn)
    assert [row["gradient_norm"] for row in rows] == pytest.approx(norms, rel=1e-3)
    for key, weight in weights_of(trainer).items():
        moved = (expected[key] - start[key]).abs().max()
        assert moved > 1e-3
        torch.testing.assert_close(weight.double(), expected[key], atol=2e-3 * float(moved), rtol=0, msg=key)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_does_not_depend_on_the_split_into_micro_batches(build, name):
    # The canned log-probs are so far from the model's that the defaults of these rows leave every response out.
    wide = {"grpo-geo-mask": {"keep_low": 0.5, "keep_high": 2}, "grpo-k3-mask": {"keep_high": 1}}.get(name, {})
    found = []
    for budget in (1, 30, 10_000):
        trainer = build(name, training=settings(micro_batch_tokens=budget, learning_rate=0.0), **wide)
        gradients = []
        trainer.policy.optimizer.step = lambda trainer=trainer, into=gradients: into.append(
            torch.cat([gradient.flatten() for gradient in trainer.policy.masters.gradients])
        )
        rows = list(trainer.iteration())
        found.append((gradients, [row["loss"] for row in rows], [row["entropy"] for row in rows]))
    assert all(gradient.abs().max() > 0 for gradient in found[0][0])
    for gradients, losses, entropies in found[1:]:
        for gradient, first in zip(gradients, found[0][0], strict=True):
            torch.testing.assert_close(gradient, first, atol=1e-4 * float(first.abs().max()), rtol=0)
        assert losses == pytest.approx(found[0][1], rel=1e-5, abs=1e-5)
        assert entropies == pytest.approx(found[0][2], rel=1e-5)


# ------------------------------------------------------------------------------------------------ ratios and passes
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_ratio_is_exactly_one_where_nothing_is_learned(build, precision):
    trainer = build("grpo", Precision.named(precision, emulate="always"), "transformers", settings(learning_rate=0.0))
    rows = list(trainer.iteration())
    assert len(rows) == 2
    for row in rows:
        assert row["ratio_min"] == row["ratio_max"] == row["ratio_mean"] == 1.0
        assert row["clip_low_share"] == row["clip_high_share"] == 0.0


def test_ratio_moves_after_the_first_step(build):
    first, second = build("grpo").iteration()
    assert first["ratio_min"] == first["ratio_max"] == 1.0
    assert second["ratio_min"] < 1.0 < second["ratio_max"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_old_policy_is_scored_only_where_it_is_needed(build, name):
    trainer = build(name, training=settings(micro_batch_tokens=10_000))
    passes = []
    trainer.policy.model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    list(trainer.iteration())
    needs = name not in ("dppo-tv", "dppo-kl", "rloo", "dpo") and not name.startswith("pg")
    # of the first step's rows the step itself has them
    assert passes == ([False] if needs else []) + [True] * 2


def test_a_penalty_in_the_reward_needs_the_old_policys_scores_of_all_rows(build):
    trainer = build("grpo", training=settings(micro_batch_tokens=10_000), kl_coefficient=0.1, kl_place="reward")
    passes = []
    trainer.policy.model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    list(trainer.iteration())
    assert passes == [False] * 2 + [True] * 2


def test_mismatch_is_logged_where_the_rollouts_weights_are_the_trainers(build):
    for name in ("grpo", "pg-seq-is"):
        first, second = build(name, engine="transformers").iteration()
        for column in ("k1", "k2", "k3", "mean_abs_prob_diff", "max_prob_diff", "min_prob_diff", "sigma", "ess_share"):
            assert first[column] is not None
            assert second[column] is None
        assert 0 <= first["k3"] < 1e-6  # the same fp32 weights on both sides
        assert first["ess_share"] == pytest.approx(1.0, abs=1e-3)


def test_equal_weights_give_a_mean_weight_of_one_at_another_temperature(build):
    training = settings(sampling=Sampling(max_tokens=9, temperature=0.6))
    first, _ = build("pg-token-is", engine="transformers", training=training).iteration()
    assert first["weight_raw_mean"] == pytest.approx(1.0, abs=1e-4)
    assert first["weight_raw_max"] == pytest.approx(1.0, abs=1e-4)


# -------------------------------------------------------------------------------------------- overflow and collapse
def test_forced_overflow_skips_the_step_and_changes_nothing(build):
    precision = Precision.named("fp16", emulate="always", loss_scaling={"initial_scale": 2.0**40, "max_scale": 2.0**40})
    trainer = build("pg", precision)
    trainer.policy.scaler.factor = 1024.0
    before_overflow, _ = trainer.iteration()
    assert not before_overflow["step_skipped"]
    trainer.rows.append(before_overflow)

    trainer.policy.scaler.factor = 2.0**40
    weights = weights_of(trainer)
    computed = deepcopy(trainer.policy.model.state_dict())
    moments = deepcopy(trainer.policy.optimizer.state_dict()["state"])
    row, *_ = trainer.iteration()
    assert math.isnan(row["gradient_norm"])
    assert row["step_skipped"] is True
    assert row["skip_share"] == 0.5
    assert row["loss_scale"] == 2.0**40
    assert row["first_non_finite"].startswith("gradient of")
    assert math.isfinite(row["loss"])
    assert trainer.policy.scaler.factor == 2.0**38  # two skipped steps
    assert trainer.policy.masters.gradients == []
    for name, weight in trainer.policy.masters.named():
        assert torch.equal(weight, weights[name])
    for name, weight in trainer.policy.model.state_dict().items():
        assert torch.equal(weight, computed[name])
    after = trainer.policy.optimizer.state_dict()["state"]
    for index, state in moments.items():
        for name, value in state.items():
            assert torch.equal(after[index][name], value)
            assert value.isfinite().all()


def test_training_goes_on_after_the_scale_has_backed_off(build, tmp_path):
    precision = Precision.named("fp16", emulate="always", loss_scaling={"initial_scale": 2.0**20})
    trainer = build("pg-seq-is", precision, training=settings(iterations=8))
    rows = trainer.run(Checkpoints(tmp_path, course={}, keep=1), quiet)
    skipped = [row["step_skipped"] for row in rows]
    assert skipped[0]
    assert not skipped[-1]
    for row, following in pairwise(rows):
        assert following["loss_scale"] == row["loss_scale"] * (0.5 if row["step_skipped"] else 1.0)


class BrokenEngine(CannedEngine):
    """From the third call on, log-probs so low that every importance weight overflows."""

    def complete(self, request, longest):
        whole = super().complete(request, longest)
        generations = sum(kind == "generate" for kind, _ in self.calls)
        if generations < 3:
            return whole
        return Completion(whole.token_ids, [-1e5] * len(whole.logprobs), whole.finish_reason)


@pytest.mark.parametrize("on_collapse", ["warn", "stop"])
def test_collapse_is_recorded_with_its_step_and_no_traceback(build, tmp_path, caplog, on_collapse):
    trainer = build("pg-seq-is", engine=BrokenEngine(), training=settings(iterations=5, on_collapse=on_collapse))
    rows = trainer.run(Checkpoints(tmp_path, course={}, keep=1), quiet)
    events = [row["event"] for row in rows]
    assert events[:4] == [None] * 4
    assert events[4].startswith("collapse of the loss: it is ")
    later = [event for event in events[5:] if event and not event.startswith("warning")]
    if on_collapse == "warn":
        assert len(rows) == 10
        kinds = [event.split(":")[0] for event in later]
        assert kinds == ["collapse of the gradient", "collapse of the match with the engine"]  # each once
    else:
        assert len(rows) == 5
    assert f"step 4: {events[4]}" in caplog.text
    assert "iteration-00000002" in caplog.text
    assert all(weight.isfinite().all() for _, weight in trainer.policy.masters.named())


class BlindEngine(CannedEngine):
    """From the given call on, the logits are NaN."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def generate(self, requests, sampling, **options):
        if sum(kind == "generate" for kind, _ in self.calls) + 1 == self.call:
            raise NonFiniteError("the logits are not finite")
        return super().generate(requests, sampling, **options)


def test_a_run_whose_engine_cannot_sample_any_more_ends_with_its_log(build, tmp_path):
    trainer = build(engine=BlindEngine(3), training=settings(iterations=5))
    rows = trainer.run(Checkpoints(tmp_path, course={}, keep=1), quiet)
    assert [row["event"] for row in rows] == [None] * 3 + ["stopped: the logits are not finite"]
    again = build(engine=BlindEngine(1), training=settings(iterations=5))
    assert repr(again.run(Checkpoints(tmp_path, course={}, keep=1), quiet)) == repr(rows)


def test_an_engine_that_cannot_sample_at_all_is_an_error(build, tmp_path):
    with pytest.raises(NonFiniteError):
        build(engine=BlindEngine(1)).run(Checkpoints(tmp_path, course={}, keep=1), quiet)


def test_a_run_that_ended_early_stays_ended(build, tmp_path):
    training = settings(iterations=5, on_collapse="stop")
    rows = build("pg-seq-is", engine=BrokenEngine(), training=training).run(
        Checkpoints(tmp_path, course={}, keep=1), quiet
    )
    again = build("pg-seq-is", engine=BrokenEngine(), training=training)
    assert len(rows) == 5
    assert [row["event"] for row in again.run(Checkpoints(tmp_path, course={}, keep=1), quiet)] == [
        row["event"] for row in rows
    ]
    assert not any(kind == "generate" for kind, _ in again.engine.calls)


def test_an_engine_that_computes_in_another_dtype_is_refused(build):
    engine = CannedEngine()
    engine.dtype = "bf16"
    with pytest.raises(UserError, match=r"engine computes in bf16.*fp32"):
        build(engine=engine)


def test_weights_that_do_not_move_stop_the_run(build, tmp_path):
    trainer = build(training=settings(iterations=20))
    trainer.grader.grade_many = lambda items: [Verdict("wrong") for _ in items]
    with pytest.raises(
        UserError, match=r"step 19: the weights have not changed.*0 of 20 steps.*20 had a gradient of 0.*"
    ):
        trainer.run(Checkpoints(tmp_path, course={}, keep=1), quiet)


# ------------------------------------------------------------------------------------------- KL to the initial policy
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_kl_to_the_initial_policy_is_exactly_zero_at_the_start_and_then_is_not(build, precision):
    def losses(**changes):
        return [
            row["loss"] for row in build("grpo", Precision.named(precision, emulate="always"), **changes).iteration()
        ]

    plain, penalized = losses(), losses(kl_coefficient=0.5, kl_estimator="k3")
    assert penalized[0] == plain[0]
    assert penalized[1] > plain[1]


def test_a_kl_in_the_loss_holds_the_policy_back(build, tmp_path):
    def moved(coefficient):
        trainer = build("grpo", training=settings(iterations=4), kl_coefficient=coefficient, kl_estimator="k2")
        trainer.run(Checkpoints(tmp_path / str(coefficient), course={}, keep=1), quiet)
        batch = collate([problem.prompt_ids for problem in PROBLEMS], [[3, 7, EOS]] * 5, {EOS})
        now = trainer._score_all(trainer.policy.model, batch, [Plan(torch.arange(5), [torch.arange(5)])])
        reference = trainer._score_all(trainer.reference, batch, [Plan(torch.arange(5), [torch.arange(5)])])
        return (now - reference).square().mean()

    assert 0 < moved(10.0) < moved(1e-6) / 2


def test_a_kl_in_the_reward_is_taken_off_response_by_response(build):
    trainer = build("pg", kl_coefficient=0.5, kl_estimator="k1", kl_place="reward", scale_by_std=False)
    with torch.no_grad():
        for parameter in trainer.policy.model.parameters():
            parameter.mul_(1.01)
    make_experience, made = trainer.experience, []
    trainer.experience = lambda *arguments: made.append((arguments[0], make_experience(*arguments))) or made[-1][1]
    list(trainer.iteration())
    ((rollouts, experience),) = made
    distance = (experience.logp_old - experience.logp_reference).sum(1)
    assert distance.abs().min() > 1e-4
    rewards = (rollouts.rewards - 0.5 * distance).view(-1, SETTINGS.samples_per_prompt)
    torch.testing.assert_close(experience.advantages, (rewards - rewards.mean(1, keepdim=True)).view(-1))


# ------------------------------------------------------------------------------------------------- sync and resume
def test_the_engine_gets_the_trainers_weights_before_every_generation(build, tmp_path):
    trainer = build()
    start = weights_of(trainer)
    trainer.run(Checkpoints(tmp_path, course={}, keep=1), quiet)
    kinds = [kind for kind, _ in trainer.engine.calls]
    iteration = ["generate", "sleep", "wake", "load"]
    assert kinds == ["wake", "load", *iteration, *iteration]
    loaded = [weights for kind, weights in trainer.engine.calls if kind == "load"]
    assert all(torch.equal(loaded[0][name], start[name]) for name in start)
    assert all(torch.equal(loaded[2][name], weight) for name, weight in trainer.policy.masters.named())
    assert not all(torch.equal(loaded[0][name], loaded[1][name]) for name in start)


def test_an_engine_that_keeps_its_old_weights_is_noticed(build, tmp_path, caplog):
    training = settings(iterations=6, learning_rate=3e-2)
    good = build("grpo", engine="transformers", training=training)
    assert not any(row["event"] for row in good.run(Checkpoints(tmp_path / "good", course={}, keep=1), quiet))
    stale = build("grpo", engine="transformers", training=training)
    stale.engine.load_weights = lambda weights: None
    events = [row["event"] for row in stale.run(Checkpoints(tmp_path / "stale", course={}, keep=1), quiet)]
    assert [event for event in events if event and "the engine is stale" in event]


class KilledError(Exception):
    pass


@pytest.mark.parametrize(
    ("objective", "precision", "changes"),
    [("grpo", "fp16", {}), ("pg-seq-is", "bf16", {}), ("grpo", "bf16", {"kl_coefficient": 0.1})],
)
def test_resumed_equals_uninterrupted_bit_for_bit(build, tmp_path, objective, precision, changes):
    training = settings(iterations=5, checkpoint_every=2)

    def make():
        return build(objective, Precision.named(precision, emulate="always"), "transformers", training, **changes)

    whole = make()
    whole.run(Checkpoints(tmp_path / "whole", course={}, keep=2), quiet)

    killed = make()
    gradient_step, steps = killed.gradient_step, []

    def dying_step(*args, **options):
        steps.append(1)
        if len(steps) == 8:  # in the middle of iteration 3, after the checkpoint of iteration 2
            raise KilledError
        return gradient_step(*args, **options)

    killed.gradient_step = dying_step
    with pytest.raises(KilledError):
        killed.run(Checkpoints(tmp_path / "parts", course={}, keep=2), quiet)
    assert len((tmp_path / "parts" / "log.csv").read_text().splitlines()) == 1 + 7

    torch.manual_seed(99)
    resumed = make()
    resumed.run(Checkpoints(tmp_path / "parts", course={}, keep=2), quiet)

    assert len(whole.rows) == 10
    assert repr(resumed.rows) == repr(whole.rows)
    assert (tmp_path / "parts" / "log.csv").read_bytes() == (tmp_path / "whole" / "log.csv").read_bytes()
    for name, weight in whole.policy.masters.named():
        assert torch.equal(weight, weights_of(resumed)[name]), name
    assert whole.policy.scaler is None or whole.policy.scaler.state_dict() == resumed.policy.scaler.state_dict()
    ours, theirs = whole.policy.optimizer.state_dict()["state"], resumed.policy.optimizer.state_dict()["state"]
    for index, state in ours.items():
        for name, value in state.items():
            assert torch.equal(value, theirs[index][name])


def test_on_resume_the_engine_serves_the_checkpoint(build, tmp_path):
    build(training=settings(iterations=1)).run(Checkpoints(tmp_path, course={}, keep=1), quiet)
    resumed = build(training=settings(iterations=2))
    fresh = weights_of(resumed)
    resumed.run(Checkpoints(tmp_path, course={}, keep=1), quiet)
    loaded = next(weights for kind, weights in resumed.engine.calls if kind == "load")
    stored = json.loads((tmp_path / "iteration-00000002" / "state.json").read_text())["state"]["rows"]
    assert len(stored) == 4
    assert not all(torch.equal(loaded[name], fresh[name]) for name in fresh)


def test_the_same_run_twice_gives_the_same_rows(build, tmp_path):
    first = build(engine="transformers").run(Checkpoints(tmp_path / "1", course={}, keep=1), quiet)
    second = build(engine="transformers").run(Checkpoints(tmp_path / "2", course={}, keep=1), quiet)
    other = build(engine="transformers", seed=1).run(Checkpoints(tmp_path / "3", course={}, keep=1), quiet)
    assert repr(first) == repr(second) != repr(other)


def test_learning_rate_warms_up_linearly(build):
    trainer = build(training=settings(warmup_steps=4))
    assert [trainer.learning_rate(step) for step in range(6)] == pytest.approx(
        [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01]
    )
    assert build(training=settings(warmup_steps=0)).learning_rate(0) == 0.01


def test_activations_computed_again_give_the_same_bits(build, tmp_path):
    def run(name, **changes):
        precision = Precision.named("fp16", emulate="always")
        trainer = build("grpo", precision, training=settings(**changes))
        calls = []
        trainer.policy.model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
        return trainer.run(Checkpoints(tmp_path / name, course={}, keep=1), quiet), weights_of(trainer), len(calls)

    kept, kept_weights, kept_calls = run("kept")
    again, again_weights, again_calls = run("again", activation_checkpointing=True)
    assert again_calls > kept_calls
    assert repr(again) == repr(kept)
    assert all(torch.equal(again_weights[name], weight) for name, weight in kept_weights.items())


# ------------------------------------------------------------------------------------------------------------- probe
def test_the_probe_is_logged_with_the_first_step_after_every_sync(build, tmp_path):
    trainer = build("grpo", engine="transformers", training=settings(probe=True, iterations=3))
    rows = trainer.run(Checkpoints(tmp_path, course={}, keep=1), quiet)
    assert [row["probe_k3"] is not None for row in rows] == [True, False] * 3
    assert all(0 <= row["probe_max_abs"] < 1e-3 for row in rows[::2])  # fp32 on both sides


def test_the_probe_sees_weights_that_did_not_arrive(build, tmp_path):
    trainer = build("grpo", engine="transformers", training=settings(probe=True, iterations=3, learning_rate=3e-2))
    load, loads = trainer.engine.load_weights, []
    trainer.engine.load_weights = lambda weights: loads.append(1) or (load(weights) if len(loads) == 1 else None)
    rows = trainer.run(Checkpoints(tmp_path, course={}, keep=1), quiet)
    fresh, *_, stale = [row["probe_mean_abs"] for row in rows[::2]]
    assert fresh < 1e-5
    assert stale > 1e-2


def test_the_probe_changes_nothing_else(build, tmp_path):
    runs = []
    for probe in (True, False):
        trainer = build("grpo", engine="transformers", training=settings(probe=probe))
        rows = trainer.run(Checkpoints(tmp_path / str(probe), course={}, keep=1), quiet)
        runs.append([{name: value for name, value in row.items() if not name.startswith("probe")} for row in rows])
    assert repr(runs[0]) == repr(runs[1])
