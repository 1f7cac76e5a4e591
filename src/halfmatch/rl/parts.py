"""What an objective is composed of: a surrogate, a correction of μ, a rejection of what is too far from it, an
advantage and a denominator. What they compute is in halfmatch.rl.objectives, whose notation is used here, and in
halfmatch.rl.advantages. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

# What a response's reward is compared with, and whose standard deviation the difference can be divided by.
Baseline = Literal["group-mean", "leave-one-out"]
StdOver = Literal["group", "batch"]
# What one ratio belongs to: a token; a response, by the product of its tokens' ratios; or a response, by their
# geometric mean, as GSPO does.
Level = Literal["token", "sequence", "geometric"]
Denominator = Literal["max-length", "response-tokens", "response-mean"]


@dataclass(frozen=True)
class PolicyGradient:
    """−A log π(θ): its gradient is the policy gradient, whatever policy the samples came from."""


@dataclass(frozen=True)
class ClippedRatio:
    """−min(r A, clip(r, 1−clip_low, 1+clip_high) A) with r = π(θ)/π(θ') at `level` (PPO; geometric: GSPO).

    Where A < 0 this has no bound above; `dual_clip` is one: r is cut there too.
    """

    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low < 1 and 0 <= self.clip_high < math.inf):
            raise ValueError(f"clip_low {self.clip_low} must be in [0, 1), clip_high {self.clip_high} at least 0")
        if not self.dual_clip > 1:
            raise ValueError(f"dual_clip {self.dual_clip} must be above 1")


@dataclass(frozen=True)
class ClippedWeight:
    """−clip(r, 1−clip_low, 1+clip_high) A log π(θ) with r = π(θ)/π(θ') of the token, the clipped ratio not
    differentiated (CISPO): no token loses its gradient. With clip_low 1 there is no bound below."""

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low <= 1 and 0 <= self.clip_high < math.inf):
            raise ValueError(f"clip_low {self.clip_low} must be in [0, 1], clip_high {self.clip_high} at least 0")


@dataclass(frozen=True)
class PreferencePair:
    """−log σ(beta (s(chosen) − s(rejected))) with s = log π(θ) − log π(initial) of a whole response (DPO): a right and
    a wrong response to the same problem in the place of advantages, and a mean over pairs."""

    beta: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta {self.beta} must be above 0")


@dataclass(frozen=True)
class Correction:
    """Importance weight π/μ at `level` for samples that came from μ; plain importance sampling has no bound.

    Weights above `bound`, or below `bound_low`, become that bound (truncate) or 0 (mask). A weight too large for
    float32 is infinite: a bound turns it into the bound or 0, and without one it makes the loss infinite or NaN, for
    the trainer to see. A response with A = 0 adds nothing, whatever its weight.
    """

    policy: Literal["current", "old"]  # π(θ), or π(θ'), over μ
    level: Level
    bound: float = math.inf
    beyond: Literal["truncate", "mask"] = "truncate"
    bound_low: float = 0.0

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"bound {self.bound} must be above 0")
        if not 0 <= self.bound_low <= self.bound:
            raise ValueError(f"bound_low {self.bound_low} must be in [0, bound {self.bound}]")


@dataclass(frozen=True)
class SequenceRejection:
    """Leave out the responses whose mismatch of π(θ') and μ lies outside [keep_low, keep_high].

    geometric: the geometric mean of the tokens' ratios π(θ')/μ. k3: the mean of e^d − 1 − d over the tokens, with d =
    log π(θ') − log μ, an estimate of KL[μ‖π(θ')] a token.
    """

    measure: Literal["geometric", "k3"]
    keep_high: float
    keep_low: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.keep_low < self.keep_high:
            raise ValueError(f"keep_low {self.keep_low} must be in [0, keep_high {self.keep_high})")


@dataclass(frozen=True)
class DivergenceMask:
    """Leave out the tokens that would push π(θ) further from μ where it is further than `limit` already (DPPO).

    The divergence is of two distributions over {the sampled token, any other}: total variation |π(θ) − μ|, or
    KL[μ‖π(θ)] in nats. A token pushes away where A > 0 and π(θ) > μ, or A < 0 and π(θ) < μ.
    """

    divergence: Literal["tv", "kl"]
    limit: float

    def __post_init__(self) -> None:
        if not self.limit >= 0:
            raise ValueError(f"limit {self.limit} must be at least 0")


@dataclass(frozen=True)
class ReferenceKl:
    """A penalty on the distance from the policy that training started from, kl_coefficient times an estimate of the KL
    of a token (see halfmatch.rl.objectives.reference_kl).

    loss: added to the loss of each token, of π(θ) and differentiated, not weighted. k2 has the gradient of KL[π(θ)‖ref]
    there, on samples of π(θ); k1 has none on average. reward: its sum over a response, of π(θ'), is taken off the
    reward; there k1 is unbiased.
    """

    kl_coefficient: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_place: Literal["loss", "reward"] = "loss"

    def __post_init__(self) -> None:
        if not 0 <= self.kl_coefficient < math.inf:
            raise ValueError(f"kl_coefficient {self.kl_coefficient} must be at least 0")
        if self.kl_estimator not in ("k1", "k2", "k3") or self.kl_place not in ("loss", "reward"):
            raise ValueError(
                f"kl_estimator {self.kl_estimator!r}, kl_place {self.kl_place!r}: k1 to k3; loss or reward"
            )

    def is_in(self, place: Literal["loss", "reward"]) -> bool:
        return self.kl_coefficient > 0 and self.kl_place == place


@dataclass(frozen=True)
class OverlongPenalty:
    """Take up to `overlong_penalty` off the reward of a response in the last `overlong_share` of the length allowed
    (DAPO, see halfmatch.rl.rewards.overlong_penalties)."""

    overlong_penalty: float = 0.0
    overlong_share: float = 0.2

    def __post_init__(self) -> None:
        if not (0 <= self.overlong_penalty < math.inf and 0 < self.overlong_share <= 1):
            raise ValueError(
                f"overlong_penalty {self.overlong_penalty} must be at least 0, overlong_share {self.overlong_share} in "
                "(0, 1]"
            )


@dataclass(frozen=True)
class Critic:
    """Advantages of tokens by generalized advantage estimation from a value model that is trained along.

    See halfmatch.rl.advantages.generalized_advantages and halfmatch.rl.values. A KL in the reward is one of each token.
    """

    discount: float = 1.0
    gae_lambda: float = 0.95
    value_clip: float = 0.2  # how far a value may move in one iteration, as the loss sees it; inf for any

    def __post_init__(self) -> None:
        if not (0 <= self.discount <= 1 and 0 <= self.gae_lambda <= 1):
            raise ValueError(f"discount {self.discount} and gae_lambda {self.gae_lambda} must be in [0, 1]")
        if not self.value_clip > 0:
            raise ValueError(f"value_clip {self.value_clip} must be above 0")


@dataclass(frozen=True)
class Objective:
    """One row of the table."""

    surrogate: PolicyGradient | ClippedRatio | ClippedWeight | PreferencePair
    correction: Correction | None = None
    rejection: SequenceRejection | DivergenceMask | None = None
    baseline: Baseline = "group-mean"  # of the advantages, as the next two; see halfmatch.rl.advantages
    scale_by_std: bool = False
    std_over: StdOver = "group"
    denominator: Denominator = "max-length"
    critic: Critic | None = None  # in the place of the baseline; scale_by_std then standardises over all tokens
    # Draw other problems until as many as are wanted have right and wrong responses: the others have no gradient.
    dynamic_sampling: bool = False
    overlong: OverlongPenalty = field(default=OverlongPenalty(), kw_only=True)
    kl: ReferenceKl = field(default=ReferenceKl(), kw_only=True)
    source: str = field(kw_only=True)  # where the estimator and its default numbers come from

    def __post_init__(self) -> None:
        if self.denominator not in get_args(Denominator):
            raise ValueError(f"denominator {self.denominator!r} must be one of {', '.join(get_args(Denominator))}")

    @property
    def needs_old_logp(self) -> bool:
        """Whether the pass that scores the rollouts under π(θ') has to run."""
        corrects_old = self.correction is not None and self.correction.policy == "old"
        other = isinstance(self.rejection, SequenceRejection) or self.kl.is_in("reward")
        return corrects_old or other or isinstance(self.surrogate, ClippedRatio | ClippedWeight)

    @property
    def needs_reference(self) -> bool:
        """Whether the policy that training starts from has to be kept, and to score the rollouts."""
        return self.kl.kl_coefficient > 0 or isinstance(self.surrogate, PreferencePair)
