"""What the trainer minimises: every algorithm is a row of one table (halfmatch.rl.objective_rows), composed of a
surrogate, a correction of the rollout policy, a rejection, an advantage and a denominator (halfmatch.rl.parts). The
paper's equations (arXiv 2510.26788) stand here and nowhere else.

Notation: π(θ) the policy being trained; π(θ') the same at the weights the rollouts were sampled with; μ the rollout
engine's policy; A the advantage of a response y of |y| tokens. Log-probs are natural logarithms, [B, T] float32, of the
tokens that were sampled. The loss is

    Σ_i n_i Σ_t w_it ℓ_it    over responses i and their tokens t, where
    ℓ  = −A log π(θ), or −min(r A, clip(r, 1−ε_low, 1+ε_high) A) with r = π(θ)/π(θ')   [surrogate]
    w  = π/μ, truncated or masked beyond its bounds, never differentiated                 [correction]
         times 0 where a response or a token is too far from μ                            [rejection]
    n  = 1/(B·max_length), 1/tokens or 1/(B·|y_i|)                                       [denominator]

DPO has a loss of pairs instead: −log σ(β (s(chosen) − s(rejected))) with s = log π(θ) − log π(initial) of a response.

Ratios are sums of log-prob differences until the one exponential. What a correction masks or a rejection leaves out
keeps its place in the denominator: the estimators average ρ·1{ρ ≤ C} over all samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from halfmatch.rl.objective_rows import OBJECTIVES, named, override, settings_of
from halfmatch.rl.parts import (
    ClippedRatio,
    ClippedWeight,
    Denominator,
    DivergenceMask,
    Level,
    Objective,
    PolicyGradient,
    PreferencePair,
    SequenceRejection,
)

__all__ = [
    "OBJECTIVES",
    "Totals",
    "merge_statistics",
    "named",
    "override",
    "policy_loss",
    "reference_kl",
    "settings_of",
]


@dataclass(frozen=True)
class Totals:
    """What the denominators count, over a whole batch.

    A micro-batch that is given its batch's totals has a loss that is its share of the batch's: the shares add up.
    """

    sequences: int  # rows, whether or not they hold a response token
    tokens: int  # response tokens

    @classmethod
    def of(cls, mask: Tensor) -> Totals:
        return cls(sequences=len(mask), tokens=int(mask.sum()))


def policy_loss(
    objective: Objective,
    *,
    logp: Tensor,
    logp_old: Tensor | None,
    logp_rollout: Tensor,
    advantages: Tensor,
    mask: Tensor,
    max_length: int,
    logp_reference: Tensor | None = None,
    totals: Totals | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss, a scalar that carries gradient to `logp`, and statistics of its ratios.

    logp = log π(θ) with gradient, logp_old = log π(θ') (None where the objective does not need it), logp_rollout =
    log μ: [B, T] float32; advantages [B], or [B, T] where tokens have their own; mask [B, T] bool, true on response
    tokens; max_length: the generation limit in tokens; logp_reference: log-probs under the initial policy, like
    logp_old, where a KL to it is in the loss, and for DPO, whose rows 2i and 2i + 1 are a chosen and a rejected
    response; totals: of the whole batch, where this is a micro-batch of it.

    What stands behind the mask, NaN and infinities included, reaches neither loss nor gradient. The statistics describe
    ratios π(θ)/π(θ') and weights π/μ, each at its own level, over response tokens or over responses that have any:
    `ratio_…`, `clip_low_share`, `clip_high_share` (where a clip cuts the ratio from below or above; a clipped ratio has
    no gradient there), `weight_raw_…` before and `weight_…` after the bounds, `truncated_share`, `kept_share` (neither
    masked nor rejected; of tokens where either is of tokens), `preference_margin` (mean of β (s(chosen) − s(rejected)))
    and `preference_accuracy` (share of pairs where it is above 0); those that an objective or an empty batch lacks are
    left out.
    """
    logp = _response_only(logp, mask)
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages.masked_fill(~mask, 0.0)
    described: dict[str, Tensor] = {"tokens": mask.sum(), "sequences": mask.any(dim=1).sum()}
    totals = totals or Totals.of(mask)

    match objective.surrogate:
        case PreferencePair(beta):
            margins = beta * _preference(logp, logp_reference, mask)
            described |= _means(preference_margin=margins.detach(), preference_accuracy=margins > 0)
            return -logsigmoid(margins).sum() / max(totals.sequences // 2, 1), _numbers(described)
        case PolicyGradient():
            losses = -advantages * logp
        case ClippedRatio(level, clip_low, clip_high, dual_clip):
            log_ratio = _at_level(level, logp - _response_only(logp_old, mask), mask)
            # min(r A, clip(r) A) cuts r from above where A > 0 and from below where A < 0. Cutting the logarithm keeps
            # an overflow of the exponential out of the gradient of what is clipped.
            log_low, log_high, log_dual = math.log1p(-clip_low), math.log1p(clip_high), math.log(dual_clip)
            clipped = torch.where(
                advantages >= 0, log_ratio.clamp(max=log_high), log_ratio.clamp(min=log_low, max=log_dual)
            )
            losses = -advantages * clipped.exp()
            described |= _summary("ratio", _observed(log_ratio.detach().exp(), mask))
            limit = torch.where(advantages > 0, log_high, log_dual)
            described |= _means(
                clip_low_share=_observed((advantages < 0) & (log_ratio < log_low), mask),
                clip_high_share=_observed((advantages != 0) & (log_ratio > limit), mask),
            )
        case ClippedWeight(clip_low, clip_high):
            log_ratio = logp.detach() - _response_only(logp_old, mask)
            log_low, log_high = -math.inf if clip_low == 1 else math.log1p(-clip_low), math.log1p(clip_high)
            losses = -advantages * log_ratio.clamp(log_low, log_high).exp() * logp
            described |= _summary("ratio", _observed(log_ratio.exp(), mask))
            described |= _means(
                clip_low_share=_observed(log_ratio < log_low, mask),
                clip_high_share=_observed(log_ratio > log_high, mask),
            )

    weights = torch.ones_like(advantages[:, :1])  # [B, 1], or [B, T] below
    kept = torch.ones_like(weights, dtype=torch.bool)
    if objective.correction is not None:
        bound, bound_low = objective.correction.bound, objective.correction.bound_low
        numerator = logp.detach() if objective.correction.policy == "current" else _response_only(logp_old, mask)
        raw = _at_level(objective.correction.level, numerator - _response_only(logp_rollout, mask), mask).exp()
        beyond = (raw > bound) | (raw < bound_low)
        if objective.correction.beyond == "mask":
            weights, kept, truncated = raw.masked_fill(beyond, 0.0), ~beyond, torch.zeros_like(beyond)
        else:
            weights, kept, truncated = raw.clamp(bound_low, bound), torch.ones_like(beyond), beyond
        described |= _summary("weight_raw", _observed(raw, mask)) | _summary("weight", _observed(weights, mask))
        described |= _means(truncated_share=_observed(truncated, mask))
    if objective.rejection is not None:
        passed = _passed(objective.rejection, logp.detach(), logp_old, logp_rollout, advantages, mask)
        weights = weights.masked_fill(passed == 0, 0.0) * passed
        kept = kept & (passed != 0)
    if objective.correction is not None or objective.rejection is not None:
        losses = losses * weights.masked_fill(advantages == 0, 0.0)  # 0 · ∞ would be NaN
        described |= _means(kept_share=_observed(kept, mask))

    if objective.kl.is_in("loss"):
        logp_reference = _response_only(logp_reference, mask, "logp_reference")
        divergence = reference_kl(objective.kl.kl_estimator, logp, logp_reference)
        losses = losses + objective.kl.kl_coefficient * divergence

    denominator = _denominator(objective.denominator, mask, max_length, totals)
    loss = (losses.masked_fill(~mask, 0.0) / denominator).sum()
    return loss, _numbers(described)


def reference_kl(estimator: Literal["k1", "k2", "k3"], logp: Tensor, logp_reference: Tensor) -> Tensor:
    """Estimates of KL[π‖ref] from tokens that π sampled, nats, of their shape.

    With d = log ref − log π: k1 = −d, k2 = d²/2, k3 = e^d − 1 − d (Schulman 2020, http://joschu.net/blog/kl-approx.html).
    """
    difference = logp_reference - logp
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return difference.expm1() - difference


def _preference(logp: Tensor, logp_reference: Tensor | None, mask: Tensor) -> Tensor:
    """s(chosen) − s(rejected), with s = log π(θ) − log π(initial) of a whole response: [B/2], nats."""
    scores = (logp - _response_only(logp_reference, mask, "logp_reference")).sum(dim=1)
    return scores[0::2] - scores[1::2]


def _response_only(values: Tensor | None, mask: Tensor, name: str = "logp_old") -> Tensor:
    """Zero outside the mask, so that nothing there can reach a sum, an exponential or a gradient."""
    if values is None:
        policy = {"logp_old": "π(θ')", "logp_reference": "the initial policy"}[name]
        raise ValueError(f"this objective needs {name}, the log-probs under {policy}")
    if torch.finfo(values.dtype).bits < 32:
        raise TypeError(f"log-probs in {values.dtype}: their differences drown in rounding; compute them in float32")
    return values.masked_fill(~mask, 0.0)


def _at_level(level: Level, differences: Tensor, mask: Tensor) -> Tensor:
    """Log-ratios from per-token log-prob differences that are 0 outside the mask: [B, T] for tokens, else [B, 1]."""
    if level == "token":
        return differences
    total = differences.sum(dim=1, keepdim=True)
    return total if level == "sequence" else total / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _passed(
    rejection: SequenceRejection | DivergenceMask,
    logp: Tensor,
    logp_old: Tensor | None,
    logp_rollout: Tensor,
    advantages: Tensor,
    mask: Tensor,
) -> Tensor:
    """1 for what passes, 0 for what is left out, NaN where that cannot be told: responses [B, 1] or tokens [B, T]."""
    logp_rollout = _response_only(logp_rollout, mask)
    match rejection:
        case SequenceRejection(measure, keep_high, keep_low):
            difference = _response_only(logp_old, mask) - logp_rollout
            if measure == "geometric":
                value = _at_level("geometric", difference, mask).exp()
            else:
                value = _at_level("geometric", difference.expm1() - difference, mask)
            rejected = (value < keep_low) | (value > keep_high)
        case DivergenceMask(divergence, limit):
            away = torch.where(advantages > 0, logp > logp_rollout, logp < logp_rollout)
            value = _binary_divergence(divergence, logp_rollout, logp)
            rejected = away & (value > limit)
    return torch.ones_like(value).masked_fill(rejected, 0.0).masked_fill(value.isnan(), math.nan)


def _binary_divergence(divergence: Literal["tv", "kl"], logp: Tensor, logq: Tensor) -> Tensor:
    """Total variation of, or KL[p‖q] between, the distributions {p, 1 − p} and {q, 1 − q}."""
    if divergence == "tv":
        return (logp.exp() - logq.exp()).abs()
    tiny = torch.finfo(logp.dtype).tiny  # so that 0 log 0 is 0, and p log 0 large
    rest_p, rest_q = ((-values.expm1()).clamp(min=tiny) for values in (logp, logq))
    return logp.exp() * (logp - logq) + rest_p * (rest_p.log() - rest_q.log())


def _denominator(name: Denominator, mask: Tensor, max_length: int, totals: Totals) -> int | Tensor:
    """What every token's loss is divided by: a number, or one a response, [B, 1]."""
    if name == "max-length":
        return max_length * totals.sequences
    if name == "response-tokens":
        return max(totals.tokens, 1)
    return mask.sum(dim=1, keepdim=True).clamp(min=1) * totals.sequences


def _observed(values: Tensor, mask: Tensor) -> Tensor:
    """The entries of [B, T] on response tokens, or of [B, 1] for responses that have any: one dimension."""
    return values[mask] if values.shape == mask.shape else values[mask.any(dim=1), 0]


def _summary(name: str, values: Tensor) -> dict[str, Tensor]:
    if values.numel() == 0:
        return {}
    return {f"{name}_mean": values.double().mean(), f"{name}_min": values.min(), f"{name}_max": values.max()}


def _numbers(described: Mapping[str, Tensor]) -> dict[str, float]:
    """All statistics in one transfer from the device."""
    numbers = torch.stack([value.double() for value in described.values()]).tolist()
    return dict(zip(described, numbers, strict=True))


def _means(**observed: Tensor) -> dict[str, Tensor]:
    """Means by name, of conditions their shares; none of what is empty."""
    return {name: values.double().mean() for name, values in observed.items() if values.numel()}


def merge_statistics(objective: Objective, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The statistics of a batch from those of its micro-batches: means are weighted by what they are means over."""
    weight = objective.correction is not None and objective.correction.level == "token"
    by_token = {
        "ratio": not isinstance(objective.surrogate, ClippedRatio) or objective.surrogate.level == "token",
        "weight": weight,
        "kept": weight or isinstance(objective.rejection, DivergenceMask),
    }
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = [part for part in parts if name in part]
        values = torch.tensor([part[name] for part in having], dtype=torch.float64)
        if name in ("tokens", "sequences"):
            result = values.sum()
        elif name.endswith("_max"):
            result = values.max()
        elif name.endswith("_min"):
            result = values.min()
        else:
            part_of = "ratio" if name.startswith(("ratio", "clip")) else "kept" if name == "kept_share" else "weight"
            count = "tokens" if by_token[part_of] else "sequences"
            counts = torch.tensor([part[count] for part in having], dtype=torch.float64)
            result = (values * counts).sum() / counts.sum()
        merged[name] = float(result)
    return merged
