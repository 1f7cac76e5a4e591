"""What a measured mismatch means for the corrections of RL, at the length measured and at longer ones, in plain words.

The σ law: with a mismatch of k nats a token (k3), the log-weight of a response of T tokens has the variance 2kT, and
the share of samples that importance sampling over whole responses can use is exp(−2kT).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from halfmatch.report.numbers import percent, with_interval
from halfmatch.statistics import Estimate, difference

# Lengths, in tokens, that the effective sample size is predicted at.
HORIZONS = (1024, 8192, 32_768)
# Shares of samples that a correction can use, from which on it is called easy, costly and useless.
EASY, COSTLY, USELESS = 0.9, 0.5, 0.1
# A share of the samples that is said as no more than "below".
SMALLEST = 0.001
# Effective responses below which the share that is seen says little.
FEW = 10
# Problems below which the interval of σ is too narrow to tell a broken law: the bootstrap's, of a standard deviation.
LAW_NEEDS = 32
# |k3 − k1| = |E[π/μ] − 1| above which the two sides cannot be one distribution with rounding.
LARGEST_BIAS = 0.05


def ess_share_after(k3: Estimate, tokens: float) -> Estimate:
    """The share of samples left after so many tokens, exp(−2kT), with the interval that k3's gives."""
    value, low, high = (math.exp(-2 * k * tokens) for k in (k3.value, k3.high, k3.low))
    return Estimate(value, low, high)


def findings(metrics: Mapping[str, Estimate], *, problems: int, sequences: int) -> list[str]:
    """Sentences on one measurement, from the metrics and counts that `offline.analyse` gives."""
    return [
        *_warnings(metrics),
        _token_level(metrics),
        _sequence_level(metrics, sequences),
        _beyond(metrics),
        *(_law(metrics) if problems >= LAW_NEEDS else ()),
    ]


def _warnings(metrics: Mapping[str, Estimate]) -> list[str]:
    bias = difference(metrics["k3"], metrics["k1"])  # E[π/μ] − 1
    if abs(bias.value) <= LARGEST_BIAS:
        return []
    mean = Estimate(*(1 + bound for bound in bias))
    return [
        f"These are not two computations of one distribution: the mean of π/μ over tokens is {with_interval(mean)}, "
        "and it is 1 for equal weights and settings. Were the log-probs taken before the temperature, at another "
        "temperature, with a nucleus, or from other weights? What follows takes them as they are."
    ]


def _token_level(metrics: Mapping[str, Estimate]) -> str:
    # (E w)² / E w² of the weights w = exp(d) of tokens: E w is 1 + k3 − k1, E w² is 1 + chi2.
    chi2, mean_weight = metrics["chi2"], 1 + metrics["k3"].value - metrics["k1"].value
    kept = Estimate(*(mean_weight**2 / (1 + bound) for bound in (chi2.value, chi2.high, chi2.low)))
    left, off = kept.value, metrics["share_above_0.1"]
    effect = (
        "hardly change anything and cost nothing"
        if left > 0.99
        else "cost little"
        if left > EASY
        else "throw away a large part of what was sampled"
    )
    return (
        f"Token-level corrections (TIS) {effect}: {share(off)} of the tokens have a weight that is off by more "
        f"than 10 %, and the weights of single tokens leave {share(kept)} of the samples. They bound each token "
        "and do not correct the distribution of whole responses."
    )


def _sequence_level(metrics: Mapping[str, Estimate], sequences: int) -> str:
    seen, law, length = metrics["ess_share"], metrics["ess_share_predicted"], metrics["mean_length"]
    # Where hardly a response would be left, the few there are show too large a share: at least one of them counts.
    few = sequences * law.value < FEW
    left = min(seen.value, law.value) if few else seen.value
    judgement = (
        "can be used as they are"
        if left >= EASY
        else "can be used, at a price"
        if left >= COSTLY
        else "lose more than half of the samples"
        if left >= USELESS
        else "are useless: a few responses carry all the weight"
    )
    caution = (
        f" {sequences} responses are too few to see a share this small; the law is the better guide." if few else ""
    )
    return (
        f"Sequence-level corrections (TIS, MIS over whole responses) {judgement} at this length: of responses of "
        f"{with_interval(length)} tokens on average, {share(seen)} are effective (by the σ law {share(law)}).{caution}"
    )


def _beyond(metrics: Mapping[str, Estimate]) -> str:
    predicted = ", ".join(
        f"{share(ess_share_after(metrics['k3'], tokens))} at {tokens // 1024}K" for tokens in HORIZONS
    )
    return (
        f"Half of the samples are lost after {with_interval(metrics['usable_length'], 2)} tokens; the share left is "
        f"predicted to be {predicted}."
    )


def _law(metrics: Mapping[str, Estimate]) -> list[str]:
    """Where σ as seen is not what the law says, what its own variance would mean."""
    seen, law = metrics["sigma"], metrics["sigma_predicted"]
    if not (seen.low > law.value or seen.high < law.value):
        return []
    tokens = math.log(2) * metrics["mean_length"].value
    length = Estimate(*(tokens / sigma**2 for sigma in (seen.value, seen.high, seen.low)))
    return [
        f"The law is off here: σ is {with_interval(seen, 2)} where it says {with_interval(law, 2)}; differences along "
        f"a response {'add up' if seen.value > law.value else 'cancel'}. By the variance seen, half of the samples are "
        f"lost after {with_interval(length, 2)} tokens."
    ]


def share(estimate: Estimate) -> str:
    """A share of the samples as text, with its interval."""
    if max(estimate.value, estimate.high) < SMALLEST:
        return f"below {percent(SMALLEST, 1)}"
    if math.isnan(estimate.low):
        return percent(estimate.value, 1)
    return f"{percent(estimate.value, 1)} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
