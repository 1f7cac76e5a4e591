"""The table of objectives in words, for `halfmatch objectives`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from halfmatch.rl.objective_rows import OBJECTIVES, settings_of, value_of
from halfmatch.rl.parts import (
    ClippedRatio,
    ClippedWeight,
    DivergenceMask,
    Objective,
    PolicyGradient,
    PreferencePair,
    SequenceRejection,
)

WIDTH = 120
_KEY = """\
π(θ): the policy being trained. π(θ'): the same at the weights that the rollouts were sampled with. μ: the rollout
engine's policy. A: the advantage of a response. Settings are changed by training.objective_settings, as in
{grpo-token-tis: {bound: 3}}. dynamic_sampling: draw problems until enough have right and wrong responses.
overlong_penalty: taken off the reward of a response of full length, rising over the last overlong_share of it.
kl_coefficient: of a KL to the initial policy, in the loss or in the reward (kl_place)."""
_LEVELS = {"token": "of the token", "sequence": "of the response", "geometric": "as geometric mean over the response"}
_DENOMINATORS = {
    "max-length": "sums over tokens / (responses × longest response allowed)",
    "response-tokens": "mean over all response tokens",
    "response-mean": "mean over the tokens of each response, then over responses",
}


def table() -> str:
    """Every row of the table: name, loss, correction, rejection, denominator, advantage, settings and source."""
    blocks = [_KEY]
    for name, objective in OBJECTIVES.items():
        lines = [name]
        for label, text in describe(objective).items():
            lead = f"  {label:<13}"
            lines.append(textwrap.fill(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead)))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def describe(objective: Objective) -> Mapping[str, str]:
    """What an objective is, in words, by part; a part that it lacks is left out."""
    parts = {"loss": _loss(objective.surrogate)}
    if objective.correction is not None:
        correction = objective.correction
        ratio = "π(θ)/μ" if correction.policy == "current" else "π(θ')/μ"
        beyond = {"truncate": "truncated at", "mask": "0 beyond"}[correction.beyond]
        parts["correction"] = f"times {ratio} {_LEVELS[correction.level]}, {beyond} its bounds"
    match objective.rejection:
        case SequenceRejection("geometric"):
            parts["rejection"] = "responses whose geometric mean of π(θ')/μ is outside [keep_low, keep_high]"
        case SequenceRejection():
            parts["rejection"] = "responses whose mean k3 estimate of KL[μ‖π(θ')] is above keep_high"
        case DivergenceMask(divergence):
            distance = {"tv": "|π(θ) − μ|", "kl": "binary KL[μ‖π(θ)]"}[divergence]
            parts["rejection"] = f"tokens whose {distance} is above limit and whose step would raise it"
    if isinstance(objective.surrogate, PreferencePair):
        parts["denominator"] = "mean over pairs of a right and a wrong response to a problem, no response in two"
    else:
        parts["denominator"] = f"{objective.denominator}: {_DENOMINATORS[objective.denominator]}"
        parts["advantage"] = _advantage(objective)
    parts["settings"] = ", ".join(f"{name} {_shown(value_of(objective, name))}" for name in _ordered(objective))
    parts["source"] = objective.source
    return parts


def _loss(surrogate: PolicyGradient | ClippedRatio | ClippedWeight | PreferencePair) -> str:
    match surrogate:
        case PolicyGradient():
            return "−A log π(θ)"
        case ClippedRatio(level):
            ratio = f"r = π(θ)/π(θ') {_LEVELS[level]}"
            return f"−min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), r at most dual_clip where A < 0; {ratio}"
        case ClippedWeight():
            return "−clip(r, 1 − clip_low, 1 + clip_high) A log π(θ), the clipped r = π(θ)/π(θ') a constant"
        case PreferencePair():
            return "−log σ(beta (s(chosen) − s(rejected))), s = log π(θ) − log π(initial) of the response"


def _advantage(objective: Objective) -> str:
    if objective.critic is not None:
        text = "of each token: GAE of the reward, at the last token, and of a value model's values"
        return f"{text}; less its mean, over its standard deviation" if objective.scale_by_std else text
    others = objective.baseline == "leave-one-out"
    text = f"reward − mean of the {'other rewards of the' if others else 'rewards of its'} problem"
    return f"{text}, over the standard deviation of the {objective.std_over}" if objective.scale_by_std else text


def _ordered(objective: Objective) -> list[str]:
    """The names of the settings; what only some objectives have comes first."""
    settings = settings_of(objective)
    return sorted(settings, key=lambda name: settings[name] in ("", "overlong", "kl"))


def _shown(value: float | bool | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
