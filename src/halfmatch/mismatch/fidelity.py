"""Gradient fidelity: what the mismatch does to the gradient, at a fixed policy and fixed rollouts, without RL's noise.

For each objective, the gradient that the trainer would compute in some precision from what the engine sampled is
compared with the reference: the same tokens, fp32 forward and backward, and fp32's own log-probs in the place of log μ,
so that every ratio is 1. Of all objectives with the same advantages and denominator that is one and the same gradient,
the plain policy gradient's. The policy has not moved since the rollouts: π(θ') = π(θ).

The reference is what there would be without a mismatch, on the same samples; but the samples came from μ. What the true
gradient is on average, fp32 with sequence-level importance sampling of these samples says without bias, and however
noisily. Against it stand the bias and the variance of each objective's estimator (halfmatch.mismatch.bias_variance).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from halfmatch import artifacts
from halfmatch.errors import UserError
from halfmatch.mismatch.bias_variance import bias_and_variance
from halfmatch.mismatch.metrics import gradient_fidelity
from halfmatch.precision import LossScaling
from halfmatch.precision.scaling import LossScaler
from halfmatch.rl.advantages import group_advantages
from halfmatch.rl.batching import collate, micro_batches, pad
from halfmatch.rl.objectives import Totals, merge_statistics, policy_loss
from halfmatch.rl.parts import Correction, Objective, PolicyGradient
from halfmatch.rl.rollouts import REWARDS, fill_ungraded
from halfmatch.rl.scoring import token_logprobs
from halfmatch.seeds import request_seed

FloatArray = NDArray[np.float32]

# With fewer problems that are solved by some of their responses and not by others, verdicts say too little.
MIN_MIXED_PROBLEMS = 8
# Problems are put into blocks, and the gradients of each block are kept, the objective's and two that it is compared
# with: as many blocks as these bytes hold.
GRADIENT_BYTES = 2**30
GRADIENTS_A_BLOCK = 3
MIN_BLOCKS, MAX_BLOCKS = 4, 16


@dataclass(frozen=True)
class Group:
    """The responses to one problem."""

    problem_id: str
    prompt_ids: list[int]
    token_ids: list[list[int]]
    logp_rollout: list[list[float]]  # log μ of each token, nats
    rewards: torch.Tensor  # [responses] float32


def read_groups(rollouts: Path, seed: int) -> tuple[list[Group], Literal["graded", "random"]]:
    """The problems of a `completions` table that have at least two responses, with rewards that tell them apart.

    Rewards are the verdicts' where at least MIN_MIXED_PROBLEMS problems have right and wrong responses; the others have
    no gradient and are left out. Where a model is too weak or too strong for that, a random half of each problem's
    responses has reward 1, the same half for any precision: a gradient as fixed and as noisy, towards nothing in
    particular.
    """
    by_problem: dict[str, list[dict[str, Any]]] = {}
    for group in artifacts.row_groups(rollouts, "completions"):
        for row in group.to_pylist():
            if row["token_ids"]:
                by_problem.setdefault(row["problem_id"], []).append(row)
    rows_by_problem = {name: rows for name, rows in by_problem.items() if len(rows) >= 2}
    if not rows_by_problem:
        raise UserError(f"{rollouts}: no problem has two responses, and an advantage needs two; raise mismatch.samples")
    graded = {name: _graded_rewards([row["verdict"] for row in rows]) for name, rows in rows_by_problem.items()}
    mixed = [name for name, rewards in graded.items() if rewards.min() != rewards.max()]
    kind: Literal["graded", "random"] = "graded" if len(mixed) >= MIN_MIXED_PROBLEMS else "random"
    groups = []
    for name in mixed if kind == "graded" else rows_by_problem:
        rows = rows_by_problem[name]
        groups.append(
            Group(
                problem_id=name,
                prompt_ids=rows[0]["prompt_ids"],
                token_ids=[row["token_ids"] for row in rows],
                logp_rollout=[row["logprobs"] for row in rows],
                rewards=graded[name] if kind == "graded" else _random_rewards(name, len(rows), seed),
            )
        )
    return groups, kind


def _graded_rewards(verdicts: Sequence[str | None]) -> torch.Tensor:
    rewards = torch.tensor([float("nan") if verdict is None else REWARDS[verdict] for verdict in verdicts])
    return fill_ungraded(rewards, len(verdicts))


def _random_rewards(problem_id: str, responses: int, seed: int) -> torch.Tensor:
    """1 for half of the responses, rounded down, chosen by a hash of the seed, the problem and the sample."""
    order = sorted(range(responses), key=lambda sample: request_seed(seed, problem_id, sample, "fidelity"))
    rewards = torch.zeros(responses)
    rewards[order[: responses // 2]] = 1.0
    return rewards


def measure(
    model: torch.nn.Module,
    reference: torch.nn.Module,
    groups: Sequence[Group],
    objectives: Mapping[str, Objective],
    *,
    loss_scaling: LossScaling | None,
    max_length: int,
    temperature: float,
    micro_batch_tokens: int,
    confidence: float = 0.95,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Compare each objective's gradient through `model` with the reference gradient through the fp32 `reference`.

    Both hold the same weights, `model` cast to the precision in question; loss_scaling is that precision's. max_length:
    the generation limit. progress is told of every block whose gradient is done.

    Returns problems, responses, parameters, blocks, and for each objective: cosine and norm_ratio, each with value, low
    and high (jackknife over blocks of problems, see `gradient_fidelity`), variance, squared_bias and balance_responses
    (see `bias_and_variance`), the loss_scale that the gradients were finite at (1 without scaling), and statistics of
    the ratios as `policy_loss` has them. A gradient that is not finite at the lowest scale gives NaN.

    Memory: GRADIENTS_A_BLOCK float32 vectors of all parameters a block.
    """
    shapes, reference_shapes = ([(n, p.shape) for n, p in m.named_parameters()] for m in (model, reference))
    if shapes != reference_shapes:
        raise ValueError("the model and its reference differ in their parameters")
    parameters = sum(shape.numel() for _, shape in shapes)
    affordable = GRADIENT_BYTES // (GRADIENTS_A_BLOCK * 4 * parameters)
    block_count = min(len(groups), max(MIN_BLOCKS, min(affordable, MAX_BLOCKS)))
    blocks = [list(groups[start::block_count]) for start in range(block_count)]
    totals = Totals(
        sequences=sum(len(group.token_ids) for group in groups),
        tokens=sum(len(tokens) for group in groups for tokens in group.token_ids),
    )

    def gradients(of: torch.nn.Module, objective: Objective, scale: float) -> tuple[list[FloatArray], dict[str, float]]:
        vectors, statistics = [], []
        for block in blocks:
            vector, parts = _block_gradient(
                of,
                block,
                objective,
                scale=scale,
                totals=totals,
                max_length=max_length,
                temperature=temperature,
                micro_batch_tokens=micro_batch_tokens,
            )
            vectors.append(vector)
            statistics.extend(parts)
            if progress:
                progress(1)
        return vectors, merge_statistics(objective, statistics)

    def finite_gradients(objective: Objective) -> tuple[list[FloatArray], dict[str, float], float]:
        """At the largest loss scale at which they are finite, as training would find it."""
        scaler = LossScaler(loss_scaling) if loss_scaling else None
        while True:
            scale = scaler.factor if scaler else 1.0
            vectors, statistics = gradients(model, objective, scale)
            if scaler is None or scaler.at_minimum or all(np.isfinite(vector).all() for vector in vectors):
                return vectors, statistics, scale
            scaler.update(overflow=True)

    plain = {name: _reference_of(objective) for name, objective in objectives.items()}
    results = {}
    for reference_objective in dict.fromkeys(plain.values()):
        weighted = dataclasses.replace(reference_objective, correction=Correction("current", "sequence"))
        exact, unbiased = (gradients(reference, one, 1.0)[0] for one in (reference_objective, weighted))
        for name in (name for name in objectives if plain[name] == reference_objective):
            vectors, statistics, scale = finite_gradients(objectives[name])
            results[name] = {
                **gradient_fidelity(vectors, exact, confidence=confidence),
                **bias_and_variance(vectors, unbiased, exact, responses=totals.sequences, confidence=confidence),
                "loss_scale": scale,
                "statistics": statistics,
            }
    return {
        "problems": len(groups),
        "responses": totals.sequences,
        "parameters": parameters,
        "blocks": block_count,
        "objectives": {name: results[name] for name in objectives},
    }


def _reference_of(objective: Objective) -> Objective:
    """The policy gradient with an objective's advantages and denominator."""
    return Objective(
        PolicyGradient(),
        baseline=objective.baseline,
        scale_by_std=objective.scale_by_std,
        std_over=objective.std_over,
        denominator=objective.denominator,
        source="reference",
    )


def _block_gradient(
    model: torch.nn.Module,
    groups: Sequence[Group],
    objective: Objective,
    *,
    scale: float,
    totals: Totals,
    max_length: int,
    temperature: float,
    micro_batch_tokens: int,
) -> tuple[FloatArray, list[dict[str, float]]]:
    """The gradient of some problems' share of the loss, [parameters] in the order of the model's, and statistics."""
    device = next(model.parameters()).device
    prompts = [group.prompt_ids for group in groups for _ in group.token_ids]
    responses = [tokens for group in groups for tokens in group.token_ids]
    batch = collate(prompts, responses, stop_token_ids=())
    logp_rollout = pad([logprobs for group in groups for logprobs in group.logp_rollout], batch.response_mask)
    advantages = torch.cat(
        [
            group_advantages(
                group.rewards,
                len(group.rewards),
                baseline=objective.baseline,
                # The batch's is one number, and no comparison with a reference of the same advantages depends on it.
                scale_by_std=objective.scale_by_std and objective.std_over == "group",
            )
            for group in groups
        ]
    )
    weights = [parameter.requires_grad_() for parameter in model.parameters()]
    sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    statistics = []
    for rows in micro_batches(batch.lengths.tolist(), micro_batch_tokens):
        part = batch.select(rows).to(device)
        logp, _ = token_logprobs(model, part, temperature)
        loss, numbers = policy_loss(
            objective,
            logp=logp,
            logp_old=logp.detach(),
            logp_rollout=logp_rollout[rows, : logp.shape[1]].to(device),
            advantages=advantages[rows].to(device),
            mask=part.response_mask,
            max_length=max_length,
            totals=totals,
        )
        statistics.append(numbers)
        for total, gradient in zip(sums, torch.autograd.grad(loss * scale, weights, allow_unused=True), strict=True):
            if gradient is not None:
                total += gradient.float() / scale
    return torch.cat([total.flatten() for total in sums]).cpu().numpy(), statistics
