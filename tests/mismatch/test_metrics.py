"""Mismatch metrics by hand, against plain loops, and where they are undefined."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmatch.mismatch.metrics import gradient_fidelity, log_sum, log_sums, sequence_metrics, token_metrics

# π = (1/2, 1/4), (1/2); μ = (1/4, 1/2), (1/2): d = (L, −L), (0) with L = ln 2
L = math.log(2)
TRAIN = np.log([[1 / 2, 1 / 4], [1 / 2, 1]])
ROLLOUT = np.log([[1 / 4, 1 / 2], [1 / 2, 1]])
MASK = np.array([[True, True], [True, False]])


def test_token_metrics_by_hand():
    metrics = token_metrics(TRAIN, ROLLOUT, MASK)
    # e^d − 1 − d: 2 − 1 − L, 1/2 − 1 + L, 0; sum 1/2
    assert metrics == pytest.approx(
        {
            "tokens": 3,
            "non_finite_tokens": 0,
            "k1": 0,
            "k2": (L**2 + L**2) / 2 / 3,
            "k3": 1 / 6,
            "chi2": (4 + 1 / 4 + 1) / 3 - 1,
            "mean_prob_diff": 0,
            "mean_abs_prob_diff": 1 / 6,
            "max_prob_diff": 1 / 4,
            "min_prob_diff": -1 / 4,
            "share_above_0.01": 2 / 3,
            "share_above_0.1": 2 / 3,
            "share_above_1": 0,
            "usable_length": L / (2 / 6),
        },
        abs=1e-15,
    )


def test_sequence_metrics_by_hand():
    # Σd = 1, −2, −2 with T = 2, 1, 4; e^d − 1 − d summed below
    train = np.array([[0.4, 0.6, 0, 0], [-2, 9, 9, 9], [-0.5, -0.5, -0.5, -0.5]]) - 3
    rollout = np.full((3, 4), -3.0)
    mask = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]], dtype=bool)
    metrics = sequence_metrics(train, rollout, mask)
    k3 = [(math.exp(0.4) - 1.4) + (math.exp(0.6) - 1.6), math.exp(-2) + 1, 4 * (math.exp(-0.5) - 0.5)]
    k3_sum = sum(k3)
    weights = [math.e, math.exp(-2), math.exp(-2)]
    ess = sum(weights) ** 2 / sum(weight**2 for weight in weights)
    # least squares: T − 7/3 = −1/3, −4/3, 5/3; Σd + 1 = 2, −1, −1: (−2/3 + 4/3 − 5/3) / (1/9 + 16/9 + 25/9)
    assert metrics == pytest.approx(
        {
            "sequences": 3,
            "non_finite_sequences": 0,
            "mean_length": 7 / 3,
            "kl_sequence": 1,
            "sigma": math.sqrt((4 + 1 + 1) / 2),
            "sigma_predicted": math.sqrt(2 * (k3_sum / 7) * (7 / 3)),
            "sigma_tokens": math.sqrt((0.16 + 0.36 + 4 + 4 * 0.25) / 3),
            "sigma_slack": statistics.stdev(k3),
            "slope_per_1k": 1000 * (-1) / (42 / 9),
            "ess": ess,
            "ess_share": ess / 3,
            "ess_share_predicted": math.exp(-2 * (k3_sum / 7) * (7 / 3)),
            "perplexity_ratio": (math.exp(-1 / 2) + math.exp(2) + math.exp(1 / 2)) / 3,
        }
    )


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_sigma_is_within_the_slack_of_what_single_tokens_give(spread):
    """Responses that differ in how noisy they are, d normal with mean −v/2 and variance v, so E[e^d] = 1: the bound of
    docs/sigma_law.md holds for every spread, where the law does not."""
    rng = np.random.default_rng(0)
    responses, time = 4000, 100
    variance = 0.04 * np.exp(spread * rng.normal(size=(responses, 1)))
    d = rng.normal(-variance / 2, np.sqrt(variance), (responses, time))
    mask = np.ones(d.shape, dtype=bool)
    metrics = sequence_metrics(d - 3, np.full(d.shape, -3.0), mask)
    exact = math.sqrt(time * variance.mean() + (time / 2) ** 2 * variance.var())
    assert metrics["sigma"] == pytest.approx(exact, rel=0.05)
    noise = 3 * metrics["sigma"] / math.sqrt(2 * responses)
    assert abs(metrics["sigma"] - metrics["sigma_tokens"]) <= metrics["sigma_slack"] + noise


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), batch=st.integers(2, 6), time=st.integers(1, 8), scale=st.floats(1e-4, 3))
def test_against_plain_loops(seed, batch, time, scale):
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1, (batch, time))
    train = rollout + scale * rng.normal(size=(batch, time))
    mask = rng.random((batch, time)) < 0.8
    mask[:2, 0] = True
    ds = [[float(train[i, t] - rollout[i, t]) for t in range(time) if mask[i, t]] for i in range(batch)]
    ds = [d for d in ds if d]
    flat = [x for d in ds for x in d]
    token = token_metrics(train, rollout, mask)
    assert token["k1"] == pytest.approx(-sum(flat) / len(flat), abs=1e-12)
    assert token["k2"] == pytest.approx(sum(x**2 for x in flat) / len(flat) / 2)
    assert token["k3"] == pytest.approx(sum(math.exp(x) - 1 - x for x in flat) / len(flat), rel=1e-6)
    assert token["chi2"] == pytest.approx(sum(math.exp(2 * x) for x in flat) / len(flat) - 1, rel=1e-6, abs=1e-9)
    assert token["share_above_0.1"] == pytest.approx(sum(abs(x) > 0.1 for x in flat) / len(flat))
    sums, lengths = np.array([sum(d) for d in ds]), np.array([len(d) for d in ds])
    sequence = sequence_metrics(train, rollout, mask)
    assert sequence["kl_sequence"] == pytest.approx(-sums.mean(), abs=1e-12)
    assert sequence["sigma"] == pytest.approx(np.std(sums, ddof=1), rel=1e-6)
    weights = np.exp(sums)
    assert sequence["ess"] == pytest.approx(weights.sum() ** 2 / (weights**2).sum())
    assert 1 - 1e-12 <= sequence["ess"] <= len(ds) + 1e-9
    assert token["k3"] >= 0
    if len(set(lengths)) > 1:
        assert sequence["slope_per_1k"] == pytest.approx(1000 * np.polyfit(lengths, sums, 1)[0], rel=1e-6, abs=1e-6)
    else:
        assert math.isnan(sequence["slope_per_1k"])


def test_direction_a_trainer_that_lost_the_sampled_tokens_has_positive_divergence():
    train, rollout = np.full((4, 5), math.log(0.4)), np.full((4, 5), math.log(0.5))
    mask = np.ones((4, 5), dtype=bool)
    token, sequence = token_metrics(train, rollout, mask), sequence_metrics(train, rollout, mask)
    assert token["k1"] == pytest.approx(math.log(0.5 / 0.4))
    assert sequence["kl_sequence"] == pytest.approx(5 * math.log(0.5 / 0.4))
    assert token["mean_prob_diff"] == pytest.approx(-0.1)
    assert token["max_prob_diff"] == pytest.approx(-0.1)
    assert sequence["perplexity_ratio"] == pytest.approx(0.5 / 0.4)


def test_k1_and_k3_agree_on_samples_of_known_divergence():
    """Tokens drawn from μ: E[k1] = E[k3] = KL[μ‖π], computed exactly."""
    rng = np.random.default_rng(0)
    mu, pi = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    tokens = rng.choice(3, size=(500, 400), p=mu)
    metrics = token_metrics(np.log(pi)[tokens], np.log(mu)[tokens], np.ones(tokens.shape, bool))
    exact = float((mu * np.log(mu / pi)).sum())
    assert metrics["k3"] == pytest.approx(exact, rel=0.01)
    assert metrics["k1"] == pytest.approx(exact, rel=0.05)


def test_the_sigma_law_holds_for_independent_noise():
    """Gaussian d of variance s² and mean −s²/2 has E[e^d] = 1, KL s²/2 a token, so σ = s √T and ESS/N = exp(−s² T)."""
    rng = np.random.default_rng(1)
    responses, time, s = 20_000, 64, 0.05
    d = rng.normal(-(s**2) / 2, s, (responses, time))
    metrics = sequence_metrics(d - 2, np.full_like(d, -2), np.ones(d.shape, bool))
    assert metrics["sigma"] == pytest.approx(s * math.sqrt(time), rel=0.02)
    assert metrics["sigma_predicted"] == pytest.approx(s * math.sqrt(time), rel=0.02)
    assert metrics["ess_share"] == pytest.approx(math.exp(-(s**2) * time), abs=0.01)
    assert metrics["ess_share_predicted"] == pytest.approx(math.exp(-(s**2) * time), abs=0.01)
    assert metrics["kl_sequence"] == pytest.approx(s**2 / 2 * time, abs=0.01)


def test_equal_policies_have_no_mismatch():
    rollout = -np.random.default_rng(2).exponential(1, (3, 4))
    mask = np.ones((3, 4), bool)
    token, sequence = token_metrics(rollout, rollout, mask), sequence_metrics(rollout, rollout, mask)
    assert [token[name] for name in ("k1", "k2", "k3", "chi2", "mean_abs_prob_diff")] == [0] * 5
    assert (sequence["sigma"], sequence["kl_sequence"]) == (0, 0)
    assert sequence["ess"] == pytest.approx(3, rel=1e-12)
    assert token["usable_length"] == math.inf


def test_weights_are_not_clamped_and_do_not_overflow():
    train = np.array([[-1.0], [-1.0], [-1.0]])
    rollout = np.array([[-1001.0], [-1.0], [-1.0]])
    metrics = sequence_metrics(train, rollout, np.ones((3, 1), bool))
    assert metrics["ess"] == pytest.approx(1)
    assert metrics["kl_sequence"] == pytest.approx(-1000 / 3)


@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf])
def test_what_stands_behind_the_mask_changes_nothing(filler):
    train, rollout = np.where(MASK, TRAIN, filler), np.where(MASK, ROLLOUT, filler)
    assert token_metrics(train, rollout, MASK) == token_metrics(TRAIN, ROLLOUT, MASK)
    assert sequence_metrics(train, rollout, MASK) == pytest.approx(sequence_metrics(TRAIN, ROLLOUT, MASK), nan_ok=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_tokens_are_counted_and_left_out(bad):
    train = np.concatenate([TRAIN, [[bad, -1.0]]])
    rollout = np.concatenate([ROLLOUT, [[-1.0, -1.0]]])
    mask = np.concatenate([MASK, [[True, True]]])
    token, sequence = token_metrics(train, rollout, mask), sequence_metrics(train, rollout, mask)
    assert (token["tokens"], token["non_finite_tokens"]) == (4, 1)
    assert token["k3"] == pytest.approx(0.5 / 4)
    assert token["max_prob_diff"] == pytest.approx(1 / 4)
    assert (sequence["sequences"], sequence["non_finite_sequences"]) == (2, 1)
    assert sequence["sigma"] == pytest.approx(0, abs=1e-12)


def test_nothing_to_measure_is_undefined_and_no_error():
    mask = np.zeros((2, 2), bool)
    token, sequence = token_metrics(TRAIN, ROLLOUT, mask), sequence_metrics(TRAIN, ROLLOUT, mask)
    assert (token["tokens"], sequence["sequences"]) == (0, 0)
    assert all(math.isnan(token[name]) for name in ("k1", "k3", "max_prob_diff"))
    assert all(math.isnan(sequence[name]) for name in ("kl_sequence", "sigma", "ess_share"))
    assert sequence_metrics(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros((0, 2), bool))["sequences"] == 0


def test_one_response_has_a_divergence_and_no_sigma():
    metrics = sequence_metrics(TRAIN[:1], ROLLOUT[:1], MASK[:1])
    assert metrics["kl_sequence"] == pytest.approx(0, abs=1e-15)
    assert math.isnan(metrics["sigma"])
    assert metrics["ess"] == pytest.approx(1)


def test_tensors_and_arrays_give_the_same_numbers():
    rng = np.random.default_rng(3)
    train, rollout = (-rng.exponential(1, (3, 4)).astype(np.float32) for _ in range(2))
    mask = rng.random((3, 4)) < 0.7
    tensors = (torch.tensor(train, requires_grad=True), torch.tensor(rollout), torch.tensor(mask))
    assert token_metrics(*tensors) == token_metrics(train, rollout, mask)
    assert sequence_metrics(*tensors) == sequence_metrics(train, rollout, mask)


def test_log_sum_counts_and_survives_any_range():
    logs = np.array([[-2000.0, 0.0, 3000.0]])
    assert log_sum(logs)[0] == pytest.approx(3000)
    assert log_sum(logs, np.array([[2.0, 0.0, 0.0]]))[0] == pytest.approx(-2000 + math.log(2))
    assert log_sum(logs, np.zeros((1, 3)))[0] == -math.inf


@given(
    st.lists(st.lists(st.floats(-3000, 3000) | st.just(-math.inf), min_size=3, max_size=3), min_size=1, max_size=6),
    st.data(),
)
def test_log_sums_are_log_sum_of_every_column_and_resample(logs, data):
    counts = data.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=len(logs), max_size=len(logs)), min_size=1, max_size=4)
    )
    logs, counts = np.array(logs), np.array(counts, dtype=np.float64)
    expected = [[log_sum(column, row) for column in logs.T] for row in counts]
    assert log_sums(logs, counts) == pytest.approx(np.array(expected), rel=1e-12, abs=1e-12)


# --------------------------------------------------------------------------------------------------------- gradients
def test_gradient_fidelity_by_hand():
    # sums (3, 4) and (3, 0): cosine 9 / (5 · 3), norms 5 / 3
    result = gradient_fidelity([[1.0, 3.0], [2.0, 1.0]], [[1.0, 0.0], [2.0, 0.0]])
    assert result["cosine"]["value"] == pytest.approx(0.6)
    assert result["norm_ratio"]["value"] == pytest.approx(5 / 3)
    # without the first: (2, 1) against (2, 0), 2/√5 and √5/2; without the second: (1, 3) against (1, 0), 1/√10 and √10
    # t(0.975, 1) · sqrt((n − 1) · mean square deviation), n = 2, on artanh(cosine) and log(ratio)
    cosine_error = 12.706205 * (math.atanh(2 / math.sqrt(5)) - math.atanh(1 / math.sqrt(10))) / 2
    ratio_error = 12.706205 * (math.log(math.sqrt(10)) - math.log(math.sqrt(5) / 2)) / 2
    for name, inverse, middle, error in (
        ("cosine", math.tanh, math.atanh(0.6), cosine_error),
        ("norm_ratio", math.exp, math.log(5 / 3), ratio_error),
    ):
        assert result[name]["low"] == pytest.approx(inverse(middle - error))
        assert result[name]["high"] == pytest.approx(inverse(middle + error))
    assert result["blocks"] == 2


def test_gradient_fidelity_of_the_gradient_itself_and_of_its_double():
    gradients = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32)
    same = gradient_fidelity(gradients, gradients)
    assert list(same["cosine"].values()) == pytest.approx([1, 1, 1])
    double = gradient_fidelity(list(2 * gradients), list(gradients))
    assert list(double["norm_ratio"].values()) == pytest.approx([2, 2, 2])
    assert gradient_fidelity(-gradients, gradients)["cosine"]["value"] == pytest.approx(-1)


def test_gradient_fidelity_interval_covers_the_truth():
    """g = r + noise of known size: the cosine of the expected gradients is known, and 95 % intervals should hold it."""
    rng = np.random.default_rng(1)
    truth, off = np.zeros(50), np.zeros(50)
    truth[0], off[1] = 1.0, 0.75  # cosine 1 / sqrt(1 + 0.75²) = 0.8
    covered = 0
    for _ in range(200):
        reference = truth + 0.05 * rng.normal(size=(16, 50))
        gradients = reference + off + 0.05 * rng.normal(size=(16, 50))
        cosine = gradient_fidelity(gradients, reference)["cosine"]
        covered += cosine["low"] <= 0.8 <= cosine["high"]
    assert 180 <= covered <= 200


def test_gradient_fidelity_of_one_block_has_no_interval_and_of_zero_no_cosine():
    one = gradient_fidelity([[1.0, 1.0]], [[1.0, 0.0]])
    assert one["cosine"]["value"] == pytest.approx(1 / math.sqrt(2))
    assert math.isnan(one["cosine"]["low"])
    zero = gradient_fidelity([[0.0, 0.0]] * 3, [[1.0, 0.0]] * 3)
    assert math.isnan(zero["cosine"]["value"])
    assert zero["norm_ratio"]["value"] == 0
