"""The table of objectives: which algorithms there are, what each is composed of, and what of it can be set.

Nothing here imports torch, so that a configuration is checked against the table as it is read. What the parts compute
is in halfmatch.rl.objectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from halfmatch.errors import UserError, nearest
from halfmatch.rl.parts import (
    ClippedRatio,
    ClippedWeight,
    Correction,
    Critic,
    DivergenceMask,
    Objective,
    OverlongPenalty,
    PolicyGradient,
    PreferencePair,
    SequenceRejection,
)

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
    "dapo": Objective(
        ClippedRatio(clip_low=0.2, clip_high=0.28),
        scale_by_std=True,
        denominator="response-tokens",
        dynamic_sampling=True,
        overlong=OverlongPenalty(overlong_penalty=1.0),
        source="DAPO, arXiv 2503.14476: clip-higher, mean over the batch's tokens, dynamic sampling, a penalty on long "
        "responses over its share of the length (4,096 of 20,480 tokens); no KL term",
    ),
    "grpo-dual-clip": Objective(
        ClippedRatio(dual_clip=3.0),
        source=f"dual clip, arXiv 1912.09729, with its c = 3 (also verl's default); {_DR_GRPO}",
    ),
    "cispo": Objective(
        ClippedWeight(clip_low=1.0, clip_high=4.0),
        scale_by_std=True,
        denominator="response-tokens",
        source="CISPO, arXiv 2506.13585, without a bound below; r ≤ 5 as in TRL's documentation",
    ),
    "icepop": Objective(
        ClippedRatio(),
        Correction("old", "token", 5.0, "mask", bound_low=0.5),
        scale_by_std=True,
        denominator="response-mean",
        source="IcePop of Ring-1T, arXiv 2510.18855: weights outside [0.5, 5] become 0",
    ),
    "grpo-geo-mask": Objective(
        ClippedRatio(),
        rejection=SequenceRejection("geometric", keep_low=0.999, keep_high=1.001),
        source=f"geometric sequence masking with the range of verl's preset decoupled_geo_rs; {_DR_GRPO}",
    ),
    "grpo-k3-mask": Objective(
        ClippedRatio(),
        rejection=SequenceRejection("k3", keep_high=0.01),
        source=f"rejection by k3 with the limit of verl's preset decoupled_k3_rs; {_DR_GRPO}",
    ),
    "dppo-tv": Objective(
        PolicyGradient(),
        Correction("current", "token"),
        DivergenceMask("tv", 0.15),
        source=f"DPPO-Binary-TV, arXiv 2602.04879, limit as in its released script; {_DR_GRPO}",
    ),
    "dppo-kl": Objective(
        PolicyGradient(),
        Correction("current", "token"),
        DivergenceMask("kl", 0.05),
        source=f"DPPO-Binary-KL, arXiv 2602.04879, limit as in its released script; {_DR_GRPO}",
    ),
    "rloo": Objective(
        PolicyGradient(),
        baseline="leave-one-out",
        source="RLOO, arXiv 2402.14740, in its policy-gradient form; sums over a constant length",
    ),
    "reinforce-plus-plus": Objective(
        ClippedRatio(),
        scale_by_std=True,
        std_over="batch",
        denominator="response-tokens",
        source="REINFORCE++ with baseline, arXiv 2501.03262; no KL term",
    ),
    "ppo": Objective(
        ClippedRatio(),
        scale_by_std=True,
        std_over="batch",
        denominator="response-tokens",
        critic=Critic(),
        source="PPO, arXiv 1707.06347, with GAE, arXiv 1506.02438: λ and the clip as there; no discount, a clip of "
        "values and standardised advantages as usual for language models (arXiv 2403.17031)",
    ),
    "dpo": Objective(
        PreferencePair(),
        dynamic_sampling=True,
        source="DPO, arXiv 2305.18290, on pairs that were sampled and graded here; beta as in its experiments",
    ),
}


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

    What makes an objective the algorithm that its name says (surrogate, level, policies, truncate or mask, baseline) is
    another row and no setting.
    """
    if isinstance(objective.surrogate, PreferencePair):
        return {"beta": "surrogate", "dynamic_sampling": ""}
    settings = dict.fromkeys(("denominator", "scale_by_std", "dynamic_sampling"), "")
    settings |= dict.fromkeys(("overlong_penalty", "overlong_share"), "overlong")
    settings |= dict.fromkeys(("kl_coefficient", "kl_estimator", "kl_place"), "kl")
    if objective.critic is not None:
        settings |= dict.fromkeys(("discount", "gae_lambda", "value_clip"), "critic")
    match objective.surrogate:
        case ClippedRatio():
            settings |= dict.fromkeys(("clip_low", "clip_high", "dual_clip"), "surrogate")
        case ClippedWeight():
            settings |= dict.fromkeys(("clip_low", "clip_high"), "surrogate")
    if objective.correction is not None:
        settings |= dict.fromkeys(("bound", "bound_low"), "correction")
    match objective.rejection:
        case SequenceRejection(measure):
            names = ("keep_low", "keep_high") if measure == "geometric" else ("keep_high",)
            settings |= dict.fromkeys(names, "rejection")
        case DivergenceMask():
            settings |= {"limit": "rejection"}
    return settings


def override(objective: Objective, settings: Mapping[str, float | bool | str]) -> Objective:
    """An objective with other values of some of `settings_of` it; UserError for what is none."""
    owners = settings_of(objective)
    changes: dict[str, dict[str, Any]] = {}  # by the part that they are of: its values must fit together
    for name, value in settings.items():
        if name not in owners:
            raise UserError(f"no setting {name!r}; {nearest(name, owners)}")
        kind = type(value_of(objective, name))
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise UserError(f"{name} must be a {kind.__name__}, not {value!r}")
        changes.setdefault(owners[name], {})[name] = kind(value)
    try:
        parts = {part: dataclasses.replace(getattr(objective, part), **changes[part]) for part in changes if part}
        return dataclasses.replace(objective, **parts, **changes.get("", {}))
    except ValueError as error:
        raise UserError(str(error)) from None


def value_of(objective: Objective, setting: str) -> Any:
    """The value that one of `settings_of` an objective has."""
    part = settings_of(objective)[setting]
    return getattr(getattr(objective, part) if part else objective, setting)
