"""One training run: sample, grade, score, a few gradient steps, sync; again. See `Trainer.iteration` for the loop.

Master weights and the optimizer's state are float32, the model computes in the precision's compute dtype, the engine
samples in its rollout dtype. θ' are the weights that an iteration's rollouts were sampled with, θ the current ones.

On several ranks each samples and grades its share of the problems; then every rank holds all rollouts, and computes the
micro-batches of its own. Losses, gradients and log rows are those of one rank, but for the order of float32 sums.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from halfmatch.config import Training
from halfmatch.engines import Engine, NonFiniteError
from halfmatch.engines.probe import probe, probe_requests
from halfmatch.errors import UserError
from halfmatch.precision import Precision
from halfmatch.precision.monitors import audit_matmuls, probe_overflow
from halfmatch.rl import monitors
from halfmatch.rl.advantages import group_advantages
from halfmatch.rl.batching import Batch
from halfmatch.rl.checkpoints import Checkpoint, Checkpoints
from halfmatch.rl.critic import Critic
from halfmatch.rl.experience import Experience, Plan, compute_rows, mismatch_columns, plan_steps
from halfmatch.rl.learner import Learner, frozen_copy
from halfmatch.rl.objectives import Totals, merge_statistics, policy_loss, reference_kl
from halfmatch.rl.parts import Objective, PreferencePair
from halfmatch.rl.preferences import preference_pairs
from halfmatch.rl.ranks import ALONE, Ranks
from halfmatch.rl.rewards import shaped_rewards
from halfmatch.rl.rollouts import Problem, ProblemSampler, Rollouts, collect, grade, lay_out, sample_mixed
from halfmatch.rl.scoring import response_logprobs, token_logprobs
from halfmatch.rl.training_log import COLUMNS, LiveTable, complete

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from halfmatch.grading import Grader

logger = logging.getLogger(__name__)

# Prompts whose forward pass is looked at for overflow before anything is trained.
PROBED_PROMPTS = 4
PHASES = ("rollout", "grading", "scoring", "training", "sync")


class Trainer:
    """The state of a run and the parts that it works with."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        engine: Engine,
        grader: Grader,
        decode: Callable[[list[int]], str],
        stop_token_ids: Collection[int],
        problems: Sequence[Problem],
        settings: Training,
        precision: Precision,
        objective: Objective,
        seed: int,
        ranks: Ranks = ALONE,
        ranks_an_engine: int = 1,
    ):
        """`model`: float32, on its device; it is cast here, in place. `decode`: token ids to text, for the grader.

        `ranks_an_engine`: how many ranks, side by side, run one engine together, on the same requests.
        """
        if engine.dtype != precision.rollout:
            raise UserError(f"the engine computes in {engine.dtype}, and the precision asks for {precision.rollout}")
        self.engine, self.grader, self.decode = engine, grader, decode
        self.ranks, self.ranks_an_engine = ranks, ranks_an_engine
        self.settings, self.precision, self.objective, self.seed = settings, precision, objective, seed
        self.stop_token_ids = frozenset(stop_token_ids)
        self.sampler = ProblemSampler(problems, seed)

        # The initial policy, in the compute dtype: on the same shapes as the policy it has the same bits at the start.
        self.reference = frozen_copy(model, precision, ranks) if objective.needs_reference else None
        self.critic = (
            Critic(model, objective, settings=settings, precision=precision, ranks=ranks) if objective.critic else None
        )
        self.policy = Learner(model, settings, precision, ranks, lora=settings.lora, seed=seed)
        self.learners = {"policy": self.policy} | ({"critic": self.critic.learner} if self.critic else {})
        shape = model.config.get_text_config()
        fits = settings.probe and shape.max_position_embeddings
        self.probe_requests = probe_requests(shape.vocab_size, fits) if fits else None
        self.limits = monitors.Limits(
            max_skip_share=settings.max_skip_share,
            stop_at_collapse=settings.on_collapse == "stop",
            min_scale=precision.loss_scaling.min_scale if precision.loss_scaling else None,
        )
        self.iterations = 0
        self.rows: list[dict[str, Any]] = []
        self.timings: list[dict[str, float]] = []
        self.ended = False  # by a monitor, before the last iteration
        self.probed: dict[str, float] = {}  # how far the engine's new weights are from the policy's, by column
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, checkpoints: Checkpoints, progress: Callable[[int, str], None]) -> list[dict[str, Any]]:
        """Train to the end, from the latest checkpoint if there is one; returns the log.

        The log and the seconds of each phase also grow in `log.csv` and `seconds.csv` beside the checkpoints.
        `progress` is told how many more iterations are done and what they brought.
        """
        self.check()
        if found := checkpoints.find(self.settings.iterations):
            self.restore(found)
            progress(self.iterations, "from the checkpoint")
        self.sync()  # a new engine serves the model folder, not the checkpoint
        # The first rank writes for all of them.
        folder = checkpoints.folder if self.ranks.first else None
        with (
            closing(checkpoints),
            closing(LiveTable(folder, "log.csv", COLUMNS, self.rows)) as log,
            closing(LiveTable(folder, "seconds.csv", ("iteration", *PHASES), self.timings)) as seconds,
        ):
            while not self.ended and self.iterations < self.settings.iterations:
                self._advance(log, checkpoints)
                self.timings.append({"iteration": self.iterations, **{phase: self._seconds[phase] for phase in PHASES}})
                seconds.append(self.timings[-1])
                self._seconds.clear()
                self.iterations += 1
                if checkpoints.kept and checkpoints.kept.is_due(self.iterations):
                    weights = self.trained_weights()
                    if self.ranks.first:
                        checkpoints.kept.add(self.iterations, weights)
                finished = self.ended or self.iterations == self.settings.iterations
                if finished or self.iterations % self.settings.checkpoint_every == 0:
                    checkpoints.save(self.iterations, self.state(), self.tensors(), finished=finished)
                progress(1, f"reward {self.rows[-1]['reward']:.3f}")
        return self.rows

    def _advance(self, log: LiveTable, checkpoints: Checkpoints) -> None:
        """One iteration with its rows judged and logged; sets `ended` where the run cannot or should not go on."""

        def last_good() -> str:
            return f"the last checkpoint is {checkpoints.latest() or 'not written yet'}"

        try:
            for row in self.iteration():
                self.rows.append(row)
                event = monitors.check(self.rows, self.limits)
                if event:
                    row["event"] = event.message
                    self.ended = event.stop
                    logger.warning("step %d: %s; %s", row["step"], event.message, last_good())
                log.append(row)
                if self.ended:
                    return
        except NonFiniteError as error:  # the engine cannot sample from such weights
            if not self.rows:
                raise
            self.rows[-1]["event"] = f"stopped: {error}"
            self.ended = True
            logger.warning("step %d: %s; %s", self.rows[-1]["step"], error, last_good())
        except UserError as error:
            raise UserError(f"{error}; {last_good()}") from None

    def iteration(self) -> Iterator[dict[str, Any]]:
        """One round: rollouts, and a few gradient steps on them. Yields the log row of each step."""
        rollouts = self.sample()
        self.engine.sleep()
        plans = self.plan(rollouts)
        with self._timed("scoring"):
            experience = self.experience(rollouts, plans)

        mismatch: dict[str, float] = {}
        if self.settings.lora and self.settings.lora.push == "merged":
            mismatch = self._merge_columns(experience, plans[0])
        for number, plan in enumerate(plans):
            with self._timed("training"):
                columns, logp = self.gradient_step(experience, plan, is_first=number == 0)
            if number == 0:  # θ = θ' in the first step, and in no other
                scored = experience.complete(logp, plans)
                mismatch |= mismatch_columns(experience, *scored)
            yield complete(
                {
                    "iteration": self.iterations,
                    "step": len(self.rows),
                    **rollouts.columns(self.settings.samples_per_prompt),
                    **(mismatch | self.probed if number == 0 else {}),
                    **columns,
                }
            )
        with self._timed("sync"):
            self.sync()

    def sync(self) -> None:
        """Give the engine the policy's weights, and see on the probe that it has them."""
        self.engine.wake()
        self.engine.load_weights(self.policy.engine_weights())
        if self.probe_requests is not None:
            score = partial(response_logprobs, self.policy.model, micro_batch_tokens=self.settings.micro_batch_tokens)
            found = max(self.ranks.gather([probe(self.engine, score, self.probe_requests)]), key=attrgetter("k3"))
            self.probed = {"probe_k3": found.k3, "probe_mean_abs": found.mean_abs, "probe_max_abs": found.max_abs}

    def _merge_columns(self, experience: Experience, plan: Plan) -> dict[str, float]:
        """What merging the adapter into 16-bit weights changes, on the first micro-batch; see models.lora."""
        if self.ranks.size > 1 or not plan.micro_batches:
            return {}  # of shards there is nothing to measure it on
        from halfmatch.models.lora import merge_rounding

        batch, rows = experience.batch, plan.micro_batches[0]
        micro = batch.select(rows)
        with torch.no_grad():
            found = merge_rounding(
                self.policy.model,
                self.policy.masters.parameters,
                lambda: self._score(self.policy.model, batch, rows)[0],
                micro.response_mask,
            )
        return {"merge_k3": found.k3, "merge_lost": found.lost}

    def sample(self) -> Rollouts:
        """The rollouts of an iteration, by dynamic sampling where the objective asks for it."""
        settings = self.settings
        if not self.objective.dynamic_sampling:
            return self._sample(settings.prompts_per_iteration)
        return sample_mixed(
            self._sample, settings.prompts_per_iteration, settings.samples_per_prompt, settings.sampling_rounds
        )

    def _sample(self, count: int) -> Rollouts:
        """Rollouts of the next problems. Every rank samples and grades its share, and has all in the end."""
        samples = self.settings.samples_per_prompt
        with self._timed("rollout"):
            sample = partial(
                collect,
                self.ranks.share(self.sampler.draw(count), self.ranks_an_engine),
                samples,
                engine=self.engine,
                sampling=self.settings.sampling,
                stop_token_ids=self.stop_token_ids,
                seed=self.seed,
            )
            problems, completions = self.ranks.together(sample, NonFiniteError)
            if self.ranks.rank % self.ranks_an_engine:
                problems, completions = [], []  # the first of the ranks that sampled them brings them in
        with self._timed("grading"):
            verdicts = grade(problems, completions, grader=self.grader, decode=self.decode)
            return lay_out(
                self.ranks.gather(problems),
                self.ranks.gather(completions),
                self.ranks.gather(verdicts),
                samples,
                stop_token_ids=self.stop_token_ids,
            )

    def plan(self, rollouts: Rollouts) -> list[Plan]:
        """Split an iteration's rows into gradient steps, and each step's rows into micro-batches.

        All passes of an iteration follow the plan: with the same shapes the same weights give the same bits, so the
        ratio π(θ)/π(θ') of the first step is exactly 1.
        """
        settings, lengths = self.settings, rollouts.batch.lengths
        if isinstance(self.objective.surrogate, PreferencePair):
            units = preference_pairs(rollouts.verdicts, settings.samples_per_prompt)
        else:
            units = torch.arange(len(lengths))[:, None]
        steps, budget = settings.gradient_steps, settings.micro_batch_tokens
        return plan_steps(units, lengths, steps=steps, budget=budget, ranks=self.ranks)

    def experience(self, rollouts: Rollouts, plans: Sequence[Plan]) -> Experience:
        """Rewards become advantages; the passes of π(θ') and the initial policy run where the objective needs them."""
        device = next(self.policy.model.parameters()).device
        batch, objective = rollouts.batch.to(device), self.objective
        kl, logp_old = objective.kl, None
        if objective.needs_old_logp:  # the first step computes what it needs of them itself
            logp_old = self._score_all(self.policy.model, batch, plans if kl.is_in("reward") else plans[1:])
        logp_reference = self._score_all(self.reference, batch, plans) if self.reference is not None else None
        lengths, longest = batch.response_mask.sum(dim=1), self.settings.sampling.max_tokens
        rewards = shaped_rewards(rollouts.rewards.to(device), lengths, objective.overlong, longest)
        estimates, targets = None, None
        if kl.is_in("reward"):
            assert logp_old is not None
            assert logp_reference is not None
            estimates = reference_kl(kl.kl_estimator, logp_old, logp_reference)
        if self.critic is not None:
            penalties = None if estimates is None else kl.kl_coefficient * estimates
            advantages, targets = self.critic.estimate(batch, rewards, penalties, plans)
        else:
            if estimates is not None:
                rewards = rewards - kl.kl_coefficient * estimates.sum(dim=1)
            advantages = group_advantages(
                rewards,
                self.settings.samples_per_prompt,
                baseline=objective.baseline,
                scale_by_std=objective.scale_by_std,
                std_over=objective.std_over,
            )
        logp_rollout = rollouts.logp_rollout.to(device)
        return Experience(batch, advantages, logp_rollout, logp_old, logp_reference, targets)

    def gradient_step(
        self, experience: Experience, plan: Plan, *, is_first: bool
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """One optimizer step, left out where a gradient is not finite; returns its columns of the log and log π(θ) of
        its rows before the step, [B, R]. `is_first` of the iteration: θ = θ' before it."""
        step = len(self.rows)
        rate = self.learning_rate(step)
        (columns, logp), taken = self.policy.update(partial(self._accumulate, experience, plan, is_first), rate)
        columns |= taken | {
            "learning_rate": rate,
            "skip_share": (sum(row["step_skipped"] for row in self.rows) + taken["step_skipped"]) / (step + 1),
            "weight_change": self._weight_change(step),
        }
        if self.critic is not None and experience.targets is not None:
            rate = self.learning_rate(step, self.settings.critic_learning_rate)
            columns |= self.critic.gradient_step(experience.batch, experience.targets, plan, rate)
        return columns, logp

    def learning_rate(self, step: int, highest: float | None = None) -> float:
        """Linear warm-up to the constant rate, skipped steps counted: step 0 has 1/warmup_steps of it."""
        return (highest or self.settings.learning_rate) * min(1.0, (step + 1) / max(self.settings.warmup_steps, 1))

    def _score(self, model: torch.nn.Module, batch: Batch, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of a micro-batch: [rows, R] each."""
        temperature = self.settings.sampling.temperature
        logp, entropy = compute_rows(lambda micro: token_logprobs(model, micro, temperature), batch, rows)
        return logp, entropy

    @torch.no_grad()
    def _score_all(self, model: torch.nn.Module, batch: Batch, plans: Sequence[Plan]) -> torch.Tensor:
        """Log-probs of an iteration's responses under one policy, in the micro-batches of the plans: [B, R], 0 outside
        of the responses."""
        scores = torch.zeros(batch.response_mask.shape, device=batch.response_mask.device)
        for rows in (rows for plan in plans for rows in plan.micro_batches):
            logp, _ = self._score(model, batch, rows)
            scores[rows, : logp.shape[1]] = logp
        return self.ranks.sum(scores)

    def _accumulate(self, experience: Experience, plan: Plan, is_first: bool) -> tuple[dict[str, Any], torch.Tensor]:
        """Forward and backward over the micro-batches of a step. Each loss is its share of the step's, so the summed
        gradients are the step's whatever the split."""
        totals = Totals.of(experience.batch.response_mask[plan.rows])
        sums, parts = torch.zeros(2, dtype=torch.float64), []
        logp = torch.zeros_like(experience.logp_rollout)
        logp_old = experience.logp_old
        if is_first and logp_old is not None:
            logp_old = logp
        for number, rows in enumerate(plan.micro_batches):
            micro_logp, micro_entropy = self._score(self.policy.model, experience.batch, rows)
            width = micro_logp.shape[1]
            logp[rows, :width] = micro_logp.detach()
            micro_loss, statistics = policy_loss(
                self.objective,
                logp=micro_logp,
                max_length=self.settings.sampling.max_tokens,
                totals=totals,
                **experience.part(rows, width, logp_old),
            )
            self.policy.backward(micro_loss, last=number == len(plan.micro_batches) - 1)
            sums += torch.tensor([micro_loss.item(), micro_entropy.sum().item()], dtype=torch.float64)
            parts.append(statistics)
        columns = merge_statistics(self.objective, self.ranks.gather(parts))
        counted = {name: value for name, value in columns.items() if name not in ("tokens", "sequences")}
        loss, entropy = self.ranks.sum(sums).tolist()
        return {**counted, "loss": loss, "entropy": entropy / max(totals.tokens, 1)}, self.ranks.sum(logp)

    def _weight_change(self, step: int) -> float | None:
        """How far the weights have moved, in the first steps; then the initial ones are let go."""
        if step < monitors.FIRST_STEPS:
            return self.policy.change()
        self.policy.initial.clear()
        return None

    def check(self) -> None:
        """Refuse a model that computes in another dtype than asked for, or whose activations leave its range."""
        device = next(self.policy.model.parameters()).device
        prompts = [
            torch.tensor(problem.prompt_ids, device=device) for problem in self.sampler.problems[:PROBED_PROMPTS]
        ]
        for learner in self.learners.values():
            audit_matmuls(learner.model, self.precision, prompts[0][None])
            probe_overflow(learner.model, prompts, self.precision.compute)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint, by name."""
        return {
            f"{owner}.{name}": tensor
            for owner, learner in self.learners.items()
            for name, tensor in learner.tensors().items()
        }

    def state(self) -> dict[str, Any]:
        """Everything that the next iteration depends on, but for tensors and process-wide random numbers."""
        return {
            "learners": {name: learner.state() for name, learner in self.learners.items()},
            "position": self.sampler.position,
            "rows": self.rows,
            "timings": self.timings,
            "ended": self.ended,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """The inverse of `state`."""
        checkpoint.read_tensors(self.tensors())
        state = checkpoint.state
        for name, learner in self.learners.items():
            learner.restore(state["learners"][name])
        self.sampler.position = state["position"]
        self.rows, self.timings, self.ended = state["rows"], state["timings"], state["ended"]
        self.iterations = checkpoint.iterations

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """The model's float32 weights, whole, on the CPU; nothing but on the first rank."""
        return {name: weight.float().cpu() for name, weight in self.policy.weights() if self.ranks.first}

    def trained_adapter(self) -> dict[str, torch.Tensor]:
        """With LoRA, the adapter's float32 weights as `trained_weights` has the model's; empty without."""
        named = self.policy.masters.named() if self.settings.lora else ()
        return {name: weight.cpu() for name, weight in named if self.ranks.first}

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start
