"""What the numbers of a measurement are said to mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.measure.findings import HORIZONS, ess_share_after, findings, share
from halfmatch.statistics import Estimate


def exact(value: float) -> Estimate:
    return Estimate(value, value, value)


def metrics(k: float, length: float, **changes: Estimate) -> dict[str, Estimate]:
    """Those of a mismatch that follows the law."""
    return {
        "k1": exact(k),
        "k3": exact(k),
        "chi2": exact(2 * k),
        "share_above_0.1": exact(0.02),
        "mean_length": exact(length),
        "ess_share": exact(math.exp(-2 * k * length)),
        "ess_share_predicted": exact(math.exp(-2 * k * length)),
        "usable_length": exact(math.log(2) / (2 * k)),
        "sigma": exact(math.sqrt(2 * k * length)),
        "sigma_predicted": exact(math.sqrt(2 * k * length)),
        **changes,
    }


def sentences(seen: dict[str, Estimate], sequences: int) -> list[str]:
    return findings(seen, problems=sequences, sequences=sequences)


@given(st.floats(1e-9, 1e-1), st.floats(1.0, 3.0), st.integers(1, 10**6))
def test_the_share_left_falls_with_k_and_length(k: float, factor: float, tokens: int) -> None:
    found = ess_share_after(Estimate(k, k / factor, k * factor), tokens)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert ess_share_after(exact(k), tokens + 1).value <= found.value


def test_half_of_the_samples_are_left_at_the_usable_length() -> None:
    k = 1e-3  # the paper's bf16: about 350 tokens
    assert ess_share_after(exact(k), math.log(2) / (2 * k)).value == pytest.approx(0.5)
    assert math.log(2) / (2 * k) == pytest.approx(346.6, abs=0.1)
    assert ess_share_after(exact(1.5e-5), HORIZONS[1]).value == pytest.approx(0.782, abs=0.001)


@pytest.mark.parametrize(
    ("k", "judgement"),
    [
        (1e-5, "can be used as they are"),
        (1e-3, "can be used, at a price"),
        (4e-3, "lose more than half"),
        (4e-2, "are useless"),
    ],
)
def test_sequence_level_corrections_are_judged_by_what_is_left_of_the_samples(k: float, judgement: str) -> None:
    sentence = next(line for line in sentences(metrics(k, 200), 10_000) if line.startswith("Sequence-level"))
    assert judgement in sentence
    assert "too few" not in sentence or k == 4e-2


def test_few_responses_show_too_large_a_share_and_the_law_decides() -> None:
    seen = metrics(4e-3, 400, ess_share=Estimate(0.6, 0.3, 0.9))
    sentence = next(line for line in sentences(seen, 16) if line.startswith("Sequence-level"))
    assert "are useless" in sentence
    assert "16 responses are too few" in sentence


@pytest.mark.parametrize(
    ("chi2", "effect"), [(1e-4, "cost nothing"), (0.05, "cost little"), (1.0, "throw away a large part")]
)
def test_token_level_corrections_are_judged_by_the_weights_of_tokens(chi2: float, effect: str) -> None:
    sentence = next(line for line in sentences(metrics(1e-4, 200, chi2=exact(chi2)), 100) if "Token-level" in line)
    assert effect in sentence
    assert f"leave {100 / (1 + chi2):.1f} % [" in sentence


def test_weights_of_tokens_never_leave_more_than_all_samples() -> None:
    """(E w)² ≤ E w², also where the mean weight of a sample is below 1."""
    weights = np.exp([-0.2, 0.1, -0.1, 0.0])
    d = np.log(weights)
    seen = metrics(
        1e-4,
        200,
        k1=exact(-d.mean()),
        k3=exact((weights - 1 - d).mean()),
        chi2=exact((weights**2).mean() - 1),
    )
    left = weights.mean() ** 2 / (weights**2).mean()
    sentence = next(line for line in sentences(seen, 4) if "Token-level" in line)
    assert f"leave {100 * left:.1f} % [{100 * left:.1f}, {100 * left:.1f}] of the samples" in sentence


def test_predictions_carry_the_interval_of_k() -> None:
    seen = metrics(1e-4, 200, k3=Estimate(1e-4, 5e-5, 2e-4), usable_length=Estimate(3466.0, 1733.0, 6931.0))
    sentence = next(line for line in sentences(seen, 100) if line.startswith("Half"))
    assert "3,500 [1,700, 6,900]" in sentence
    # exp(-2 k 8192) at k = 1e-4, 2e-4, 5e-5
    assert "19.4 % [3.8, 44.1] at 8K" in sentence


def test_a_law_that_does_not_hold_is_said_so() -> None:
    assert not any("law is off" in line for line in sentences(metrics(1e-3, 200), 100))
    correlated = metrics(1e-3, 200, sigma=Estimate(1.2, 1.0, 1.4))
    sentence = next(line for line in sentences(correlated, 100) if "law is off" in line)
    assert "add up" in sentence
    # ln 2 · 200 / σ² tokens, of σ 1.2, 1.4 and 1.0
    assert "after 96 [71, 140] tokens" in sentence
    assert not any("law is off" in line for line in sentences(correlated, 16)), "too few to tell"


def test_a_share_of_nearly_nothing_has_no_digits() -> None:
    assert share(Estimate(1e-6, 1e-7, 1e-5)) == "below 0.1 %"
    assert share(Estimate(0.0004, 0.0001, 0.02)) == "0.0 % [0.0, 2.0]"


def test_log_probs_of_another_distribution_are_suspected() -> None:
    assert not any("two computations" in line for line in sentences(metrics(1e-3, 200), 100))
    raw = metrics(1e-1, 200, k1=Estimate(-0.5, -0.53, -0.47))
    sentence = next(line for line in sentences(raw, 100) if "not two computations of one distribution" in line)
    assert "over tokens is 1.60 [1.57, 1.63]" in sentence
