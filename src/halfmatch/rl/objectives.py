"""What the trainer minimises: every algorithm is a row of one table, composed of a surrogate, a correction of the
rollout policy, an advantage and a denominator. The paper's equations (arXiv 2510.26788) stand here and nowhere else.

Notation: π(θ) the policy being trained; π(θ') the same at the weights the rollouts were sampled with; μ the rollout
engine's policy; A the advantage of a response y of |y| tokens. Log-probs are natural logarithms, [B, T] float32, of the
tokens that were sampled. The loss is

    Σ_i n_i Σ_t w_it ℓ_it    over responses i and their tokens t, where
    ℓ  = −A log π(θ), or −min(r A, clip(r, 1−ε_low, 1+ε_high) A) with r = π(θ)/π(θ')   [surrogate]
    w  = π/μ, truncated or masked beyond a bound, never differentiated                    [correction]
    n  = 1/(B·max_length), 1/tokens or 1/(B·|y_i|)                                       [denominator]

Ratios are sums of log-prob differences until the one exponential. What a correction masks keeps its place in the
denominator: the estimators average ρ·1{ρ ≤ C} over all samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from halfmatch.config_checks import nearest
from halfmatch.errors import UserError

# What one ratio belongs to: a token; a response, by the product of its tokens' ratios; or a response, by their
# geometric mean, as GSPO does.
Level = Literal["token", "sequence", "geometric"]
Denominator = Literal["max-length", "response-tokens", "response-mean"]


@dataclass(frozen=True)
class PolicyGradient:
    """−A log π(θ): its gradient is the policy gradient, whatever policy the samples came from."""


@dataclass(frozen=True)
class ClippedRatio:
    """−min(r A, clip(r, 1−clip_low, 1+clip_high) A) with r = π(θ)/π(θ') at `level` (PPO; geometric: GSPO)."""

    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low < 1 and 0 <= self.clip_high < math.inf):
            raise ValueError(f"clip_low {self.clip_low} must be in [0, 1), clip_high {self.clip_high} at least 0")


@dataclass(frozen=True)
class Correction:
    """Importance weight π/μ at `level` for samples that came from μ; plain importance sampling has no bound.

    Weights above `bound` become the bound (truncate) or 0 (mask). A weight too large for float32 is infinite: a bound
    turns it into the bound or 0, and without one it makes the loss infinite or NaN, for the trainer to see. A response
    with A = 0 adds nothing, whatever its weight.
    """

    policy: Literal["current", "old"]  # π(θ), or π(θ'), over μ
    level: Level
    bound: float = math.inf
    beyond: Literal["truncate", "mask"] = "truncate"

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"bound {self.bound} must be above 0")


@dataclass(frozen=True)
class Objective:
    """One row of the table."""

    surrogate: PolicyGradient | ClippedRatio
    correction: Correction | None = None
    scale_by_std: bool = False  # of the advantages; see halfmatch.rl.advantages
    denominator: Denominator = "max-length"
    source: str = field(kw_only=True)  # where the estimator and its default numbers come from

    def __post_init__(self) -> None:
        if self.denominator not in get_args(Denominator):
            raise ValueError(f"denominator {self.denominator!r} must be one of {', '.join(get_args(Denominator))}")

    @property
    def needs_old_logp(self) -> bool:
        """Whether the pass that scores the rollouts under π(θ') has to run."""
        corrects_old = self.correction is not None and self.correction.policy == "old"
        return corrects_old or isinstance(self.surrogate, ClippedRatio)


_PAPER = "arXiv 2510.26788"
_DR_GRPO = "sums over a constant length and no division by the std: Dr. GRPO, arXiv 2503.20783"

OBJECTIVES: Mapping[str, Objective] = {
    "grpo": Objective(ClippedRatio(), source=f"GRPO, arXiv 2402.03300; {_DR_GRPO}; clip as in {_PAPER}'s scripts"),
    "grpo-token-tis": Objective(
        ClippedRatio(), Correction("old", "token", 2.0), source=f"{_PAPER}; C = 2 in its scripts (the text says 3)"
    ),
    "grpo-seq-mis": Objective(
        ClippedRatio(), Correction("old", "sequence", 10.0, "mask"), source=f"{_PAPER}; C = 10 in its scripts"
    ),
    "gspo": Objective(
        ClippedRatio("geometric", 3e-4, 4e-4),
        scale_by_std=True,
        denominator="response-mean",
        source=f"GSPO, arXiv 2507.18071, and {_PAPER}'s scripts; μ does not enter",
    ),
    "pg": Objective(PolicyGradient(), source=f"REINFORCE, Williams 1992; {_DR_GRPO}"),
    "pg-token-is": Objective(PolicyGradient(), Correction("current", "token"), source=f"{_PAPER}; biased"),
    "pg-token-tis": Objective(
        PolicyGradient(), Correction("current", "token", 2.0), source=f"{_PAPER}; biased; C as in grpo-token-tis"
    ),
    "pg-seq-is": Objective(PolicyGradient(), Correction("current", "sequence"), source=f"{_PAPER}; unbiased"),
    "pg-seq-tis": Objective(
        PolicyGradient(),
        Correction("current", "sequence", 3.0),
        source=f"{_PAPER}; C = 3; what its script named PG-Seq-MIS computes",
    ),
    "pg-seq-mis": Objective(
        PolicyGradient(), Correction("current", "sequence", 3.0, "mask"), source=f"{_PAPER}'s text; C = 3"
    ),
}


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
    totals: Totals | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss, a scalar that carries gradient to `logp`, and statistics of its ratios.

    logp = log π(θ) with gradient, logp_old = log π(θ') (None where the objective does not need it), logp_rollout =
    log μ: [B, T] float32; advantages [B]; mask [B, T] bool, true on response tokens; max_length: the generation limit
    in tokens; totals: of the whole batch, where this is a micro-batch of it.

    What stands behind the mask, NaN and infinities included, reaches neither loss nor gradient. The statistics describe
    ratios π(θ)/π(θ') and weights π/μ, each at its own level, over response tokens or over responses that have any:
    `ratio_…`, `clip_low_share`, `clip_high_share` (where the clip stops the gradient), `weight_raw_…` before and
    `weight_…` after the bound, `truncated_share`, `kept_share`; those that an objective or an empty batch lacks are
    left out.
    """
    logp = _response_only(logp, mask)
    advantages = advantages[:, None]  # [B, 1]
    described: dict[str, Tensor] = {"tokens": mask.sum(), "sequences": mask.any(dim=1).sum()}

    match objective.surrogate:
        case PolicyGradient():
            losses = -advantages * logp
        case ClippedRatio(level, clip_low, clip_high):
            log_ratio = _at_level(level, logp - _response_only(logp_old, mask), mask)
            # min(r A, clip(r) A) cuts r from above where A > 0 and from below where A < 0. Cutting the logarithm keeps
            # an overflow of the exponential out of the gradient of what is clipped.
            log_low, log_high = math.log1p(-clip_low), math.log1p(clip_high)
            clipped = torch.where(advantages >= 0, log_ratio.clamp(max=log_high), log_ratio.clamp(min=log_low))
            losses = -advantages * clipped.exp()
            described |= _summary("ratio", _observed(log_ratio.detach().exp(), mask))
            described |= _shares(
                clip_low_share=_observed((advantages < 0) & (log_ratio < log_low), mask),
                clip_high_share=_observed((advantages > 0) & (log_ratio > log_high), mask),
            )

    if objective.correction is not None:
        numerator = logp.detach() if objective.correction.policy == "current" else _response_only(logp_old, mask)
        raw = _at_level(objective.correction.level, numerator - _response_only(logp_rollout, mask), mask).exp()
        beyond = raw > objective.correction.bound
        replacement = 0.0 if objective.correction.beyond == "mask" else objective.correction.bound
        weights = raw.masked_fill(beyond, replacement)
        losses = losses * weights.masked_fill(advantages == 0, 0.0)  # 0 · ∞ would be NaN
        masked = beyond if objective.correction.beyond == "mask" else torch.zeros_like(beyond)
        described |= _summary("weight_raw", _observed(raw, mask)) | _summary("weight", _observed(weights, mask))
        described |= _shares(truncated_share=_observed(beyond & ~masked, mask), kept_share=_observed(~masked, mask))

    denominator = _denominator(objective.denominator, mask, max_length, totals or Totals.of(mask))
    loss = (losses.masked_fill(~mask, 0.0) / denominator).sum()
    numbers = torch.stack([value.double() for value in described.values()]).tolist()
    return loss, dict(zip(described, numbers, strict=True))


def _response_only(values: Tensor | None, mask: Tensor) -> Tensor:
    """Zero outside the mask, so that nothing there can reach a sum, an exponential or a gradient."""
    if values is None:
        raise ValueError("this objective needs logp_old, the log-probs under π(θ')")
    if torch.finfo(values.dtype).bits < 32:
        raise TypeError(f"log-probs in {values.dtype}: their differences drown in rounding; compute them in float32")
    return values.masked_fill(~mask, 0.0)


def _at_level(level: Level, differences: Tensor, mask: Tensor) -> Tensor:
    """Log-ratios from per-token log-prob differences that are 0 outside the mask: [B, T] for tokens, else [B, 1]."""
    if level == "token":
        return differences
    total = differences.sum(dim=1, keepdim=True)
    return total if level == "sequence" else total / mask.sum(dim=1, keepdim=True).clamp(min=1)


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


def _shares(**conditions: Tensor) -> dict[str, Tensor]:
    return {name: condition.double().mean() for name, condition in conditions.items() if condition.numel()}


def merge_statistics(objective: Objective, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The statistics of a batch from those of its micro-batches: means are weighted by what they are means over."""
    by_token = {
        "ratio": isinstance(objective.surrogate, ClippedRatio) and objective.surrogate.level == "token",
        "weight": objective.correction is not None and objective.correction.level == "token",
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
            of_ratio = name.startswith(("ratio", "clip"))
            count = "tokens" if by_token["ratio" if of_ratio else "weight"] else "sequences"
            counts = torch.tensor([part[count] for part in having], dtype=torch.float64)
            result = (values * counts).sum() / counts.sum()
        merged[name] = float(result)
    return merged


def named(name: str, settings: Mapping[str, float | bool | str] | None = None) -> Objective:
    """A row of the table, with changes to its settings; UserError where there is no such row or setting."""
    if name not in OBJECTIVES:
        raise UserError(f"there is no objective {name!r}; {nearest(name, OBJECTIVES)}")
    try:
        return override(OBJECTIVES[name], settings or {})
    except UserError as error:
        raise UserError(f"objective_settings.{name}: {error}") from None


def settings_of(objective: Objective) -> dict[str, str]:
    """What can be set of an objective, each with the part that holds it ("" for the objective itself).

    What makes an objective the algorithm that its name says (surrogate, level, policies, truncate or mask) is another
    row and no setting.
    """
    settings = {"denominator": "", "scale_by_std": ""}
    if isinstance(objective.surrogate, ClippedRatio):
        settings |= {"clip_low": "surrogate", "clip_high": "surrogate"}
    if objective.correction is not None:
        settings |= {"bound": "correction"}
    return settings


def override(objective: Objective, settings: Mapping[str, float | bool | str]) -> Objective:
    """An objective with other values of some of `settings_of` it; UserError for what is none."""
    owners = settings_of(objective)
    for name, value in settings.items():
        if name not in owners:
            raise UserError(f"no setting {name!r}; {nearest(name, owners)}")
        owner: Any = getattr(objective, owners[name]) if owners[name] else objective
        kind = type(getattr(owner, name))
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise UserError(f"{name} must be a {kind.__name__}, not {value!r}")
        try:
            changed = dataclasses.replace(owner, **{name: kind(value)})
        except ValueError as error:
            raise UserError(str(error)) from None
        part: dict[str, Any] = {owners[name]: changed}
        objective = dataclasses.replace(objective, **part) if owners[name] else changed
    return objective
