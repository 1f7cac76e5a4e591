"""Every objective by hand, against an independent float64 implementation, and by what must hold for it."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmatch.errors import UserError
from halfmatch.rl.objectives import (
    OBJECTIVES,
    Totals,
    merge_statistics,
    named,
    override,
    policy_loss,
    reference_kl,
)
from halfmatch.rl.parts import ClippedRatio, ClippedWeight, DivergenceMask, Objective, PolicyGradient, SequenceRejection

NAMES = tuple(name for name in OBJECTIVES if name != "dpo")  # which has a loss of pairs: see test_preferences.py
CORRECTED = tuple(name for name, objective in OBJECTIVES.items() if objective.correction)
# The rows with a ratio π(θ)/π(θ'), those whose clip stops the gradient, and those whose token losses have weights.
RATIO = (
    *("grpo", "grpo-token-tis", "grpo-seq-mis", "gspo", "dapo", "grpo-dual-clip", "cispo", "icepop"),
    *("grpo-geo-mask", "grpo-k3-mask", "reinforce-plus-plus", "ppo"),
)
CLIPPED = tuple(name for name in RATIO if name != "cispo")
REJECTING = ("grpo-geo-mask", "grpo-k3-mask", "dppo-tv", "dppo-kl")
INFINITY = math.inf


@dataclass
class Data:
    """Arguments of `policy_loss` as float64 arrays."""

    logp: np.ndarray
    logp_old: np.ndarray
    logp_rollout: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    max_length: int

    def tensors(self, dtype=torch.float32):
        floats = ("logp", "logp_old", "logp_rollout", "advantages")
        return {
            **{name: torch.tensor(getattr(self, name), dtype=dtype) for name in floats},
            "mask": torch.tensor(self.mask),
            "max_length": self.max_length,
        }


def random_data(seed, batch=5, time=7, mismatch=0.5, drift=0.3):
    """Ragged masks (not only prefixes: multi-turn masks have holes), one row empty."""
    rng = np.random.default_rng(seed)
    mask = rng.random((batch, time)) < 0.7
    mask[0] = False
    logp = -rng.exponential(1.0, (batch, time))
    logp_old = np.minimum(logp + drift * rng.normal(size=(batch, time)), -1e-3)  # of probabilities below 1
    logp_rollout = np.minimum(logp_old + mismatch * rng.normal(size=(batch, time)), -1e-3)
    return Data(logp, logp_old, logp_rollout, rng.normal(size=batch), mask, max_length=11)


def reference_loss(name, data, weight_logp=None):
    """The estimators of the paper, spelled out one by one with plain loops over scalars.

    `weight_logp` is log π(θ) where it is constant, in the weights of policy gradients: for finite differences.
    """
    weight_logp = data.logp if weight_logp is None else weight_logp
    batch = len(data.advantages)
    total = 0.0
    for i in range(batch):
        tokens = [t for t in range(data.mask.shape[1]) if data.mask[i, t]]
        if not tokens:
            continue
        advantage = data.advantages[i]
        new, constant = ([float(array[i, t]) for t in tokens] for array in (data.logp, weight_logp))
        old, rollout = ([float(array[i, t]) for t in tokens] for array in (data.logp_old, data.logp_rollout))
        seq_current = math.exp(sum(constant) - sum(rollout))
        seq_old = math.exp(sum(old) - sum(rollout))

        def clipped(ratio, low, high, advantage=advantage):
            return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)

        if name == "gspo":
            ratio = math.exp((sum(new) - sum(old)) / len(tokens))
            total -= clipped(ratio, 3e-4, 4e-4) / batch
            continue
        denominator = {
            **dict.fromkeys(("dapo", "cispo", "reinforce-plus-plus", "ppo"), data.mask.sum()),
            "icepop": len(tokens) * batch,
        }.get(name, data.max_length * batch)
        old_ratios = [math.exp(a - b) for a, b in zip(old, rollout, strict=True)]
        geometric = math.prod(old_ratios) ** (1 / len(tokens))
        k3 = sum(ratio - 1 - math.log(ratio) for ratio in old_ratios) / len(tokens)
        for t in range(len(tokens)):
            token_current, token_old = math.exp(constant[t] - rollout[t]), math.exp(old[t] - rollout[t])
            grpo = clipped(math.exp(new[t] - old[t]), 0.2, 0.2)
            ratio, p, q = math.exp(new[t] - old[t]), math.exp(rollout[t]), math.exp(constant[t])
            away = (advantage > 0 and q > p) or (advantage < 0 and q < p)
            binary_kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            term = {
                "grpo": grpo,
                "grpo-token-tis": min(token_old, 2.0) * grpo,
                "grpo-seq-mis": (seq_old if seq_old <= 10.0 else 0.0) * grpo,
                "pg": advantage * new[t],
                "pg-token-is": token_current * advantage * new[t],
                "pg-token-tis": min(token_current, 2.0) * advantage * new[t],
                "pg-seq-is": seq_current * advantage * new[t],
                "pg-seq-tis": min(seq_current, 3.0) * advantage * new[t],
                "pg-seq-mis": (seq_current if seq_current <= 3.0 else 0.0) * advantage * new[t],
                "dapo": clipped(ratio, 0.2, 0.28),
                "grpo-dual-clip": max(grpo, 3.0 * advantage) if advantage < 0 else grpo,
                "cispo": min(math.exp(constant[t] - old[t]), 5.0) * advantage * new[t],
                "icepop": (token_old if 0.5 <= token_old <= 5.0 else 0.0) * grpo,
                "grpo-geo-mask": grpo if 0.999 <= geometric <= 1.001 else 0.0,
                "grpo-k3-mask": grpo if k3 <= 0.01 else 0.0,
                "dppo-tv": 0.0 if away and abs(p - q) > 0.15 else token_current * advantage * new[t],
                "dppo-kl": 0.0 if away and binary_kl > 0.05 else token_current * advantage * new[t],
                "rloo": advantage * new[t],
                "reinforce-plus-plus": grpo,
                "ppo": grpo,
            }[name]
            total -= term / denominator
    return total


# ------------------------------------------------------------------------------------------------------------ by hand
# Two responses of 2 and 1 tokens, A = 1 and −1, max_length 4, so every token's term is divided by 4 · 2 = 8.
# π(θ) = (1/2, 1/2), (1/2); π(θ') = (1/4, 1/2), (1); μ = (1/8, 1/4), (1/2). ln 2 = L.
#   r = (2, 1), (1/2)            clipped: min(2, 1.2) = 1.2, 1 | A = −1: max(1/2, 0.8) = 0.8 → terms 1.2, 1, −0.8
#   π(θ')/μ = (2, 2), (2)        sequences 4 and 2; geometric means 2 and 2, k3 = 2 − 1 − ln 2 = 0.31 each
#   π(θ)/μ = (4, 2), (1)         sequences 8 and 1; π(θ) − μ = (3/8, 1/4), (0); binary KL[μ‖π(θ)] of the second token:
#                                1/4 ln 1/2 + 3/4 ln 3/2 = 0.13
#   log π(θ) = −L everywhere
L = math.log(2)
HAND = Data(
    logp=np.log([[1 / 2, 1 / 2, 1], [1 / 2, 1, 1]]),
    logp_old=np.log([[1 / 4, 1 / 2, 1], [1, 1, 1]]),
    logp_rollout=np.log([[1 / 8, 1 / 4, 1], [1 / 2, 1, 1]]),
    advantages=np.array([1.0, -1.0]),
    mask=np.array([[True, True, False], [True, False, False]]),
    max_length=4,
)
HAND_LOSSES = {
    "grpo": -(1.2 + 1 - 0.8) / 8,
    "grpo-token-tis": -(2 * 1.2 + 2 * 1 - 2 * 0.8) / 8,  # the bound 2 is reached, not passed
    "grpo-seq-mis": -(4 * 1.2 + 4 * 1 - 2 * 0.8) / 8,
    # geometric means √2 and 1/2 of r: clipped to 1.0004, and 0.9997 for A = −1; mean over tokens, then over responses
    "gspo": -(1.0004 - 0.9997) / 2,
    "pg": -(-L - L + L) / 8,
    "pg-token-is": -(-4 * L - 2 * L + 1 * L) / 8,
    "pg-token-tis": -(-2 * L - 2 * L + 1 * L) / 8,
    "pg-seq-is": -(-8 * L - 8 * L + 1 * L) / 8,
    "pg-seq-tis": -(-3 * L - 3 * L + 1 * L) / 8,
    "pg-seq-mis": -(0 + 0 + 1 * L) / 8,
    "dapo": -(1.28 + 1 - 0.8) / 3,
    "grpo-dual-clip": -(1.2 + 1 - 0.8) / 8,  # no ratio above 3 where A < 0
    "cispo": -(-2 * L - 1 * L + 0.5 * L) / 3,
    "icepop": -((2 * 1.2 + 2 * 1) / 2 - 2 * 0.8) / 2,
    "grpo-geo-mask": 0,
    "grpo-k3-mask": 0,
    "dppo-tv": -(0 + 0 + 1 * L) / 8,  # both tokens of the first response are beyond the limit, and A > 0 pushes on
    "dppo-kl": -(0 + 0 + 1 * L) / 8,
    "rloo": -(-L - L + L) / 8,
    "reinforce-plus-plus": -(1.2 + 1 - 0.8) / 3,
    "ppo": -(1.2 + 1 - 0.8) / 3,
}


@pytest.mark.parametrize("name", NAMES)
def test_loss_by_hand(name):
    loss, _ = policy_loss(OBJECTIVES[name], **HAND.tensors())
    assert loss.item() == pytest.approx(HAND_LOSSES[name], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("denominator", "expected"),
    [
        ("max-length", -(-L - L + L) / 8),
        ("response-tokens", -(-L - L + L) / 3),
        ("response-mean", -((-L - L) / 2 + L) / 2),
    ],
)
def test_denominators_by_hand(denominator, expected):
    loss, _ = policy_loss(named("pg", {"denominator": denominator}), **HAND.tensors())
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_statistics_by_hand():
    _, token = policy_loss(OBJECTIVES["grpo-token-tis"], **HAND.tensors())
    assert (token["tokens"], token["sequences"]) == (3, 2)
    assert (token["ratio_mean"], token["ratio_min"], token["ratio_max"]) == pytest.approx((3.5 / 3, 0.5, 2))
    assert (token["clip_low_share"], token["clip_high_share"]) == pytest.approx((1 / 3, 1 / 3))

    _, truncated = policy_loss(OBJECTIVES["pg-token-tis"], **HAND.tensors())
    assert (truncated["weight_raw_mean"], truncated["weight_raw_max"]) == pytest.approx((7 / 3, 4))
    assert (truncated["weight_mean"], truncated["weight_min"], truncated["weight_max"]) == pytest.approx((5 / 3, 1, 2))
    assert (truncated["truncated_share"], truncated["kept_share"]) == pytest.approx((1 / 3, 1))
    assert not any(key.startswith(("ratio", "clip")) for key in truncated)

    _, masked = policy_loss(OBJECTIVES["pg-seq-mis"], **HAND.tensors())
    assert (masked["weight_raw_mean"], masked["weight_mean"]) == pytest.approx((4.5, 0.5))
    assert (masked["truncated_share"], masked["kept_share"]) == pytest.approx((0, 1 / 2))


@pytest.mark.parametrize("seed", range(4))
def test_clip_shares_count_the_tokens_whose_gradient_the_clip_stops(seed):
    data = random_data(seed, batch=9, drift=0.6)
    tensors = data.tensors()
    tensors["logp"].requires_grad_()
    loss, statistics = policy_loss(OBJECTIVES["grpo"], **tensors)
    loss.backward()
    stopped = (tensors["logp"].grad == 0).numpy() & data.mask
    below = data.logp < data.logp_old
    assert statistics["clip_low_share"] == pytest.approx((stopped & below).sum() / data.mask.sum())
    assert statistics["clip_high_share"] == pytest.approx((stopped & ~below).sum() / data.mask.sum())
    assert 0 < statistics["clip_low_share"] < 0.5
    assert 0 < statistics["clip_high_share"] < 0.5


# ------------------------------------------------------------------------------------- against an independent version
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), mismatch=st.floats(0, 2), drift=st.floats(0, 1), time=st.integers(1, 9))
def test_loss_against_float64_loops(name, seed, mismatch, drift, time):
    data = random_data(seed, time=time, mismatch=mismatch, drift=drift)
    loss, _ = policy_loss(OBJECTIVES[name], **data.tensors())
    exact, _ = policy_loss(OBJECTIVES[name], **data.tensors(torch.float64))
    assert loss.dtype == torch.float32
    # float32 may fall on the other side of a mask's bound, which random numbers do not reach
    assert exact.item() == pytest.approx(reference_loss(name, data), rel=1e-12, abs=1e-14)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-4, abs=1e-5)


def softmax_policy(seed, data):
    """A tiny model: parameters, and log-probs of data's tokens as a function of them."""
    rng = np.random.default_rng(seed)
    batch, time = data.mask.shape
    features = torch.tensor(rng.normal(size=(batch, time, 3)))
    tokens = torch.tensor(rng.integers(0, 4, size=(batch, time, 1)))

    def logp(parameters):
        return torch.log_softmax(features @ parameters, dim=-1).gather(-1, tokens).squeeze(-1)

    return torch.tensor(rng.normal(size=(3, 4)), requires_grad=True), logp


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_against_finite_differences(name, seed):
    data = random_data(seed)
    parameters, logp = softmax_policy(seed, data)
    constant = logp(parameters).detach().numpy()
    rng = np.random.default_rng(seed)
    data.logp_old = np.minimum(constant + 0.2 * rng.normal(size=data.mask.shape), -0.01)
    mismatch = 1e-3 if name in ("grpo-geo-mask", "grpo-k3-mask") else 0.5
    data.logp_rollout = np.minimum(data.logp_old + mismatch * rng.normal(size=data.mask.shape), -1e-3)
    tensors = data.tensors(torch.float64)
    policy_loss(OBJECTIVES[name], **{**tensors, "logp": logp(parameters)})[0].backward()

    def value(changed):
        data.logp = logp(changed).detach().numpy()
        return reference_loss(name, data, weight_logp=constant)

    step = 1e-6
    numeric = torch.zeros_like(parameters)
    for index in np.ndindex(*parameters.shape):
        shift = torch.zeros_like(parameters)
        shift[index] = step
        numeric[index] = (value(parameters.detach() + shift) - value(parameters.detach() - shift)) / (2 * step)
    assert parameters.grad.abs().max() > 1e-4
    torch.testing.assert_close(parameters.grad, numeric, rtol=1e-6, atol=1e-8)


def naive_loss(name, data):
    """The formulas as they are usually written in torch: exponentials first, clamp, min; safe for tame numbers only."""
    low, high = (3e-4, 4e-4) if name == "gspo" else (0.2, 0.2)
    mask, advantages = data["mask"].float(), data["advantages"][:, None]
    difference = (data["logp"] - data["logp_old"]) * mask
    if name == "gspo":
        difference = difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = difference.exp()
    per_token = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if name == "gspo":
        return ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    numerator = data["logp_old"] if name.startswith("grpo") else data["logp"].detach()
    if name.startswith("pg"):
        per_token = -advantages * data["logp"]
    weight = ((numerator - data["logp_rollout"]) * mask).sum(1, keepdim=True).exp()
    if "token" in name:
        weight = ((numerator - data["logp_rollout"]) * mask).exp()
    bound = OBJECTIVES[name].correction.bound if OBJECTIVES[name].correction else None
    if name.endswith("-tis"):
        weight = weight.clamp(max=bound)
    if name.endswith("-mis"):
        weight = weight * (weight <= bound)
    if name in ("grpo", "pg"):
        weight = torch.ones(1)
    return (per_token * weight * mask).sum(1).div(data["max_length"]).mean()


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("grpo-token", "grpo-seq", "pg", "gspo"))])
@pytest.mark.parametrize("seed", range(5))
def test_gradient_against_autograd_of_the_usual_formula(name, seed):
    ours, naive = random_data(seed).tensors(torch.float64), random_data(seed).tensors(torch.float64)
    for data, loss in ((ours, lambda d: policy_loss(OBJECTIVES[name], **d)[0]), (naive, lambda d: naive_loss(name, d))):
        data["logp"].requires_grad_()
        loss(data).backward()
    torch.testing.assert_close(ours["logp"].grad, naive["logp"].grad, rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------------------------------- signs, direction
@pytest.mark.parametrize(("name", "unbiased"), [("pg-seq-is", True), ("pg-token-is", False), ("pg", False)])
def test_importance_sampling_is_unbiased_where_it_should_be(name, unbiased):
    """E_μ[gradient of the loss] is −∇ E_π[reward], by all 27 sequences of 3 tokens with their probability under μ.

    A ratio upside down, from the wrong policy or with the wrong sign does not pass.
    """
    rng = np.random.default_rng(0)
    sequences = torch.tensor([[a, b, c] for a in range(3) for b in range(3) for c in range(3)])
    rewards = torch.tensor(rng.normal(size=27))
    parameters = torch.tensor(rng.normal(size=(3, 3)), requires_grad=True)  # logits of each position
    rollout_logits = parameters.detach() + torch.tensor(0.7 * rng.normal(size=(3, 3)))

    def logp(logits):
        return torch.log_softmax(logits, dim=-1)[torch.arange(3), sequences]

    probability_rollout = logp(rollout_logits).sum(1).exp()
    loss, _ = policy_loss(
        OBJECTIVES[name],
        logp=logp(parameters),
        logp_old=None,
        logp_rollout=logp(rollout_logits),
        advantages=rewards * probability_rollout,
        mask=torch.ones(27, 3, dtype=torch.bool),
        max_length=1,
    )
    (gradient,) = torch.autograd.grad(27 * loss, parameters)
    expected_reward = (logp(parameters).sum(1).exp() * rewards).sum()
    (exact,) = torch.autograd.grad(-expected_reward, parameters)
    assert torch.allclose(gradient, exact, rtol=1e-9, atol=1e-12) == unbiased


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_descent_raises_what_was_good_and_lowers_what_was_bad(name, advantage):
    logp = torch.full((1, 4), -1.0, requires_grad=True)
    same = logp.detach()
    policy_loss(  # one response of max_length tokens: all denominators are the same
        OBJECTIVES[name],
        logp=logp,
        logp_old=same,
        logp_rollout=same,
        advantages=torch.tensor([advantage]),
        mask=torch.ones(1, 4, dtype=torch.bool),
        max_length=4,
    )[0].backward()
    torch.testing.assert_close(logp.grad, torch.full((1, 4), -advantage / 4))


@pytest.mark.parametrize("name", CORRECTED)
def test_a_token_that_the_rollout_policy_oversampled_weighs_less(name):
    def weight(rollout):
        data = HAND.tensors()
        trained = torch.log(torch.tensor([[0.5]]))
        data |= {"logp": trained, "logp_old": trained, "logp_rollout": torch.log(torch.tensor([[rollout]]))}
        data |= {"mask": torch.ones(1, 1, dtype=torch.bool), "advantages": torch.ones(1)}
        return policy_loss(OBJECTIVES[name], **data)[1]["weight_mean"]

    assert weight(0.8) == pytest.approx(0.5 / 0.8)
    assert weight(0.4) == pytest.approx(0.5 / 0.4)


def test_ratio_is_of_the_current_policy_over_the_old_one():
    data = random_data(0)
    data.logp_old = data.logp - math.log(1.1)
    for name in RATIO:
        assert policy_loss(OBJECTIVES[name], **data.tensors())[1]["ratio_mean"] == pytest.approx(1.1)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_ratio_is_exactly_one(name):
    data = random_data(3)
    data.logp_old = data.logp_rollout = data.logp
    _, statistics = policy_loss(OBJECTIVES[name], **data.tensors())
    ratios = {key: value for key, value in statistics.items() if key.startswith(("ratio", "weight"))}
    assert bool(ratios) == (name not in ("pg", "rloo"))
    assert set(ratios.values()) <= {1.0}
    assert statistics.get("clip_low_share", 0) == statistics.get("clip_high_share", 0) == 0
    assert statistics.get("kept_share", 1) == 1


@pytest.mark.parametrize("name", [name for name in NAMES if OBJECTIVES[name].denominator == "max-length"])
def test_without_mismatch_and_drift_all_gradients_are_the_policy_gradient(name):
    def gradient(which):
        data = random_data(4)
        data.logp_old = data.logp_rollout = data.logp
        tensors = data.tensors()
        tensors["logp"].requires_grad_()
        policy_loss(OBJECTIVES[which], **tensors)[0].backward()
        return tensors["logp"].grad

    torch.testing.assert_close(gradient(name), gradient("pg"))


# ------------------------------------------------------------------------------------------------- masks and overflow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [math.nan, INFINITY, -INFINITY, 1e30])
def test_what_stands_behind_the_mask_changes_nothing(name, garbage):
    results = []
    for filler in (0.0, garbage):
        tensors = random_data(5).tensors()
        for key in ("logp", "logp_old", "logp_rollout"):
            tensors[key][~tensors["mask"]] = filler
        tensors["logp"].requires_grad_()
        loss, statistics = policy_loss(OBJECTIVES[name], **tensors)
        loss.backward()
        results.append((loss.item(), statistics, tensors["logp"].grad))
    (clean_loss, clean_statistics, clean_gradient), (loss, statistics, gradient) = results
    assert loss == clean_loss
    assert statistics == clean_statistics
    assert torch.equal(gradient, clean_gradient)
    assert torch.equal(gradient[~random_data(5).tensors()["mask"]], torch.zeros(int((~random_data(5).mask).sum())))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("denominator", ["max-length", "response-tokens", "response-mean"])
def test_an_all_masked_batch_has_loss_zero_and_gradient_zero(name, denominator):
    tensors = random_data(6).tensors()
    tensors["mask"][:] = False
    tensors["logp"].fill_(math.nan).requires_grad_()
    loss, statistics = policy_loss(override(OBJECTIVES[name], {"denominator": denominator}), **tensors)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(tensors["logp"].grad, torch.zeros_like(tensors["logp"]))
    assert statistics == {"tokens": 0, "sequences": 0}


def overflowing(advantage, difference=200.0):
    """One response whose log π exceeds log μ by `difference`, and a tame one."""
    logp = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], requires_grad=True)
    rollout = torch.tensor([[-1.0 - difference / 2, -1.0 - difference / 2], [-1.0, -1.0]])
    return {
        "logp": logp,
        "logp_old": logp.detach().clone(),
        "logp_rollout": rollout,
        "advantages": torch.tensor([advantage, 1.0]),
        "mask": torch.ones(2, 2, dtype=torch.bool),
        "max_length": 2,
    }


@pytest.mark.parametrize(
    ("name", "weight"),
    [("pg-seq-tis", 3.0), ("pg-token-tis", 2.0), ("grpo-token-tis", 2.0), ("pg-seq-mis", 0.0), ("grpo-seq-mis", 0.0)],
)
def test_a_weight_beyond_float32_becomes_the_bound_or_nothing(name, weight):
    data = overflowing(1.0)
    loss, statistics = policy_loss(OBJECTIVES[name], **data)
    loss.backward()
    assert statistics["weight_raw_max"] == INFINITY
    assert (statistics["weight_max"], statistics["weight_min"]) == (max(weight, 1.0), min(weight, 1.0))
    torch.testing.assert_close(data["logp"].grad, -torch.tensor([[weight], [1.0]]).expand(2, 2) / 4)


def test_without_a_bound_an_infinite_weight_shows_in_loss_and_statistics():
    loss, statistics = policy_loss(OBJECTIVES["pg-seq-is"], **overflowing(1.0))
    assert not torch.isfinite(loss)
    assert statistics["weight_max"] == statistics["weight_mean"] == INFINITY


def test_an_infinite_weight_does_not_matter_where_the_advantage_is_zero():
    data = overflowing(0.0)
    loss, _ = policy_loss(OBJECTIVES["pg-seq-is"], **data)
    loss.backward()
    torch.testing.assert_close(data["logp"].grad, torch.tensor([[0.0, 0.0], [-0.25, -0.25]]))


@pytest.mark.parametrize("name", CLIPPED)
def test_a_clipped_ratio_beyond_float32_has_gradient_zero(name):
    """The usual min(r A, clip(r) A) gives NaN here: 0 times the infinite derivative of the exponential."""
    data = overflowing(1.0, difference=0.0)
    data["logp_old"] = torch.tensor([[-201.0, -201.0], [-1.0, -1.0]])
    data["logp_rollout"] = data["logp_old"]
    loss, statistics = policy_loss(OBJECTIVES[name], **data)
    loss.backward()
    assert torch.isfinite(loss)
    assert statistics["ratio_max"] == INFINITY
    assert torch.equal(data["logp"].grad[0], torch.zeros(2))
    assert (data["logp"].grad[1] < 0).all()


@pytest.mark.parametrize("name", dict.fromkeys((*CORRECTED, *REJECTING)))
def test_a_nan_among_response_tokens_is_never_hidden(name):
    for key in ("logp", "logp_old", "logp_rollout"):
        tensors = random_data(7).tensors()
        tensors["mask"][:] = True
        tensors[key][2, 1] = math.nan
        unused = key == "logp_old" and not OBJECTIVES[name].needs_old_logp
        assert bool(torch.isnan(policy_loss(OBJECTIVES[name], **tensors)[0])) != unused


# ------------------------------------------------------------------------------------------------------ micro-batches
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("denominator", ["max-length", "response-tokens", "response-mean"])
@pytest.mark.parametrize("sizes", [(3, 3, 1), (1, 6), (7,)])
def test_micro_batches_add_up_to_the_batch(name, denominator, sizes):
    objective = override(OBJECTIVES[name], {"denominator": denominator})
    whole = random_data(8, batch=7).tensors()
    whole["logp"].requires_grad_()
    loss, statistics = policy_loss(objective, **whole)
    loss.backward()

    parts = random_data(8, batch=7).tensors()
    parts["logp"].requires_grad_()
    sum_of_losses, part_statistics, start = 0.0, [], 0
    for size in sizes:
        rows = slice(start, start + size)
        part = {key: value[rows] if torch.is_tensor(value) else value for key, value in parts.items()}
        part_loss, part_stats = policy_loss(objective, **part, totals=Totals.of(parts["mask"]))
        part_loss.backward()
        sum_of_losses += part_loss.item()
        part_statistics.append(part_stats)
        start += size
    assert sum_of_losses == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(parts["logp"].grad, whole["logp"].grad, rtol=1e-6, atol=1e-9)
    assert merge_statistics(objective, part_statistics) == pytest.approx(statistics, rel=1e-6)


# ------------------------------------------------------------------------------------- what single parts do, by hand
def one_response(logp, old, rollout, advantage):
    """Probabilities of the tokens of one response, and its advantage; max_length is their number."""
    tensors = {
        name: torch.log(torch.tensor([values], dtype=torch.float64))
        for name, values in (("logp", logp), ("logp_old", old), ("logp_rollout", rollout))
    }
    tensors["logp"].requires_grad_()
    mask = torch.ones(1, len(logp), dtype=torch.bool)
    return {**tensors, "advantages": torch.tensor([float(advantage)]), "mask": mask, "max_length": len(logp)}


def gradient_and_statistics(objective, data):
    loss, statistics = policy_loss(objective, **data)
    loss.backward()
    return data["logp"].grad[0].tolist(), statistics


def test_dual_clip_stops_a_bad_token_whose_ratio_has_grown():
    data = one_response(logp=[0.8, 0.5, 0.1], old=[0.2, 0.2, 0.2], rollout=[0.2] * 3, advantage=-1)  # r 4, 5/2, 1/2
    gradient, statistics = gradient_and_statistics(OBJECTIVES["grpo-dual-clip"], data)
    assert gradient == pytest.approx([0, 2.5 / 3, 0])
    assert (statistics["clip_high_share"], statistics["clip_low_share"]) == pytest.approx((1 / 3, 1 / 3))
    unbounded = one_response(logp=[0.8, 0.5, 0.1], old=[0.2, 0.2, 0.2], rollout=[0.2] * 3, advantage=-1)
    assert gradient_and_statistics(OBJECTIVES["grpo"], unbounded)[0] == pytest.approx([4 / 3, 2.5 / 3, 0])


@pytest.mark.parametrize("advantage", [1, -1])
def test_cispo_bounds_the_weight_and_leaves_every_token_its_gradient(advantage):
    data = one_response(logp=[0.9, 0.2, 0.01], old=[0.1, 0.1, 0.1], rollout=[0.1] * 3, advantage=advantage)
    gradient, statistics = gradient_and_statistics(OBJECTIVES["cispo"], data)  # r 9, 2, 1/10
    assert gradient == pytest.approx([-5 * advantage / 3, -2 * advantage / 3, -0.1 * advantage / 3])
    assert (statistics["clip_low_share"], statistics["clip_high_share"]) == pytest.approx((0, 1 / 3))
    data = one_response(logp=[0.9, 0.2, 0.01], old=[0.1, 0.1, 0.1], rollout=[0.1] * 3, advantage=advantage)
    gradient, statistics = gradient_and_statistics(override(OBJECTIVES["cispo"], {"clip_low": 0.2}), data)
    assert gradient[2] == pytest.approx(-0.8 * advantage / 3)
    assert statistics["clip_low_share"] == pytest.approx(1 / 3)


def test_icepop_leaves_out_the_tokens_outside_of_both_bounds():
    data = one_response(logp=[0.3] * 4, old=[0.3] * 4, rollout=[0.05, 0.06, 0.59, 0.61], advantage=1)
    gradient, statistics = gradient_and_statistics(OBJECTIVES["icepop"], data)  # π(θ')/μ 6, 5, 0.508, 0.49
    assert gradient == pytest.approx([0, -5 / 4, -0.3 / 0.59 / 4, 0])
    assert (statistics["kept_share"], statistics["truncated_share"]) == (0.5, 0)


def test_a_lower_bound_truncates_where_the_correction_truncates():
    data = one_response(logp=[0.3] * 2, old=[0.3] * 2, rollout=[0.9, 0.1], advantage=1)
    gradient, statistics = gradient_and_statistics(override(OBJECTIVES["pg-token-tis"], {"bound_low": 0.5}), data)
    assert gradient == pytest.approx([-0.5 / 2, -2 / 2])
    assert (statistics["kept_share"], statistics["truncated_share"]) == (1, 1)


@pytest.mark.parametrize(
    ("name", "rollout", "kept"),
    [
        ("grpo-geo-mask", [0.5 / 1.1, 0.5 * 1.1], True),  # the ratios 1.1 and 1/1.1 cancel
        ("grpo-geo-mask", [0.5 / 1.003, 0.5], False),  # geometric mean 1.0015
        ("grpo-geo-mask", [0.5 * 1.003, 0.5], False),
        ("grpo-geo-mask", [0.5 / 1.001, 0.5], True),
        ("grpo-k3-mask", [0.5 / 1.1, 0.5 * 1.1], True),  # k3 0.0047 and 0.0044
        ("grpo-k3-mask", [0.5 / 1.25, 0.5], False),  # 1.25 − 1 − ln 1.25 = 0.027, half of it 0.0134
        ("grpo-k3-mask", [0.5 / 1.18, 0.5], True),  # 0.0145, half of it 0.0072
    ],
)
def test_a_response_too_far_from_the_rollout_policy_is_left_out_whole(name, rollout, kept):
    data = one_response(logp=[0.5] * 2, old=[0.5] * 2, rollout=rollout, advantage=1)
    gradient, statistics = gradient_and_statistics(OBJECTIVES[name], data)
    assert gradient == pytest.approx([-0.5 if kept else 0] * 2)  # and no weight where it is kept
    assert statistics["kept_share"] == kept
    assert "weight_mean" not in statistics


@pytest.mark.parametrize(
    ("name", "policy", "rollout", "advantage", "kept"),
    [
        ("dppo-tv", 0.66, 0.5, 1, False),
        ("dppo-tv", 0.66, 0.5, -1, True),  # the step leads back
        ("dppo-tv", 0.34, 0.5, -1, False),
        ("dppo-tv", 0.34, 0.5, 1, True),
        ("dppo-tv", 0.64, 0.5, 1, True),
        ("dppo-tv", 0.1, 0.001, 1, True),  # a ratio of 100 that moves little mass
        ("dppo-kl", 0.9, 0.5, 1, False),  # 1/2 ln 5/9 + 1/2 ln 5 = 0.51
        ("dppo-kl", 0.9, 0.5, -1, True),
        ("dppo-kl", 0.6, 0.5, 1, True),  # 1/2 ln 5/6 + 1/2 ln 5/4 = 0.02
        ("dppo-kl", 1.0, 0.5, 1, False),
        ("dppo-kl", 1.0, 1.0, 1, True),
    ],
)
def test_dppo_leaves_out_the_tokens_that_lead_away_from_the_rollout_policy(name, policy, rollout, advantage, kept):
    data = one_response(logp=[policy], old=[policy], rollout=[rollout], advantage=advantage)
    gradient, statistics = gradient_and_statistics(OBJECTIVES[name], data)
    assert gradient == pytest.approx([-advantage * policy / rollout if kept else 0])
    assert statistics["kept_share"] == kept


def test_an_infinite_weight_that_is_rejected_does_not_show():
    data = one_response(logp=[1.0], old=[1.0], rollout=[0.5], advantage=1)
    data = {**data, "logp_rollout": torch.tensor([[-800.0]], dtype=torch.float64)}
    loss, statistics = policy_loss(OBJECTIVES["dppo-tv"], **data)
    assert statistics["weight_max"] == INFINITY
    assert loss.item() == 0


def test_the_parts_of_a_row_are_those_that_its_name_says():
    assert {name for name in NAMES if isinstance(OBJECTIVES[name].surrogate, ClippedRatio)} == set(CLIPPED)
    assert isinstance(OBJECTIVES["cispo"].surrogate, ClippedWeight)
    assert {name for name in NAMES if isinstance(OBJECTIVES[name].rejection, DivergenceMask)} == {"dppo-tv", "dppo-kl"}
    assert OBJECTIVES["rloo"].baseline == "leave-one-out"
    assert (OBJECTIVES["reinforce-plus-plus"].scale_by_std, OBJECTIVES["reinforce-plus-plus"].std_over) == (
        True,
        "batch",
    )
    assert named("dapo", {"dual_clip": 10}).surrogate == ClippedRatio("token", 0.2, 0.28, 10.0)


# ------------------------------------------------------------------------------------------- KL to the initial policy
@pytest.mark.parametrize(("estimator", "expected"), [("k1", L), ("k2", L**2 / 2), ("k3", 0.5 - 1 + L)])
def test_estimators_of_the_kl_by_hand(estimator, expected):
    # π = 1/2 and the initial policy 1/4: d = −ln 2
    one = torch.tensor([math.log(1 / 2)])
    assert reference_kl(estimator, one, one - L).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_kl_as_their_mean(estimator):
    policy, reference = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    exact = (policy.exp() * (policy - reference)).sum()
    mean = (policy.exp() * reference_kl(estimator, policy, reference)).sum()
    assert mean.item() == pytest.approx(exact.item(), rel=1e-5)


@pytest.mark.parametrize(("estimator", "is_the_gradient"), [("k1", False), ("k2", True), ("k3", False)])
def test_only_k2_in_the_loss_has_the_gradient_of_the_kl(estimator, is_the_gradient):
    """By all three tokens with their probability, which is constant as it is for samples."""
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    estimate = (policy.detach().exp() * reference_kl(estimator, policy, reference)).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    assert torch.allclose(gradient, exact) == is_the_gradient
    assert torch.allclose(gradient, torch.zeros(3, dtype=torch.float64)) == (estimator == "k1")


@pytest.mark.parametrize("name", ["grpo", "gspo", "icepop", "dppo-tv", "grpo-geo-mask"])
def test_the_kl_is_added_to_every_token_unweighted_over_the_same_denominator(name):
    tensors = random_data(10).tensors(torch.float64)
    mask, shift = tensors["mask"], 0.1 * torch.arange(7, dtype=torch.float64).expand(5, 7)
    reference = (tensors["logp"] + shift).masked_fill(~mask, math.nan)
    settings = {"kl_coefficient": 0.25, "kl_estimator": "k2", "denominator": "response-tokens"}
    loss, _ = policy_loss(override(OBJECTIVES[name], settings), **tensors, logp_reference=reference)
    plain, _ = policy_loss(override(OBJECTIVES[name], {"denominator": "response-tokens"}), **tensors)
    expected = 0.25 * shift[mask].square().mean() / 2
    assert (loss - plain).item() == pytest.approx(expected.item(), rel=1e-9)
    with pytest.raises(ValueError, match="needs logp_reference"):
        policy_loss(override(OBJECTIVES[name], settings), **tensors)


def test_a_kl_in_the_reward_leaves_the_loss_alone_and_needs_the_old_policy():
    objective = override(OBJECTIVES["pg"], {"kl_coefficient": 0.25, "kl_place": "reward"})
    assert objective.needs_old_logp
    assert not override(OBJECTIVES["pg"], {"kl_place": "reward"}).needs_old_logp
    tensors = random_data(10).tensors()
    assert policy_loss(objective, **tensors)[0] == policy_loss(OBJECTIVES["pg"], **tensors)[0]


# ------------------------------------------------------------------------------------------- advantages of tokens
@pytest.mark.parametrize("name", NAMES)
def test_tokens_with_one_advantage_are_a_response_with_it(name):
    tensors = random_data(11).tensors()
    of_tokens = tensors["advantages"][:, None].expand(tensors["mask"].shape).masked_fill(~tensors["mask"], math.nan)
    results = []
    for advantages in (tensors["advantages"], of_tokens):
        logp = tensors["logp"].clone().requires_grad_()
        loss, statistics = policy_loss(OBJECTIVES[name], **{**tensors, "advantages": advantages, "logp": logp})
        loss.backward()
        results.append((loss.item(), logp.grad, statistics))
    (loss, gradient, statistics), (token_loss, token_gradient, token_statistics) = results
    assert token_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(token_gradient, gradient)
    assert token_statistics.keys() == statistics.keys()
    if name != "gspo":  # whose clips are counted by response, or by token where tokens differ
        assert token_statistics == pytest.approx(statistics)


def test_advantages_of_tokens_by_hand():
    """As HAND, with A = 1 and −2 in the first response: r = 2 is cut at 1.2, and r = 1 is not; 3 tokens."""
    advantages = torch.tensor([[1.0, -2.0, math.nan], [-1.0, math.nan, math.nan]])
    tensors = HAND.tensors()
    logp = tensors["logp"].requires_grad_()
    loss, statistics = policy_loss(OBJECTIVES["ppo"], **{**tensors, "advantages": advantages})
    loss.backward()
    assert loss.item() == pytest.approx(-(1.2 - 2 - 0.8) / 3)
    assert logp.grad.tolist() == [[0, pytest.approx(2 / 3), 0], [0, 0, 0]]
    assert statistics["clip_high_share"] == statistics["clip_low_share"] == pytest.approx(1 / 3)


# --------------------------------------------------------------------------------------------------------- the table
def test_the_pass_that_scores_old_log_probs_runs_only_where_it_is_needed():
    assert {name for name, objective in OBJECTIVES.items() if objective.needs_old_logp} == set(RATIO)
    rejection = SequenceRejection("k3", keep_high=0.01)
    assert Objective(PolicyGradient(), rejection=rejection, source="here").needs_old_logp


@pytest.mark.parametrize("name", NAMES)
def test_old_log_probs_may_be_missing_exactly_where_they_are_not_needed(name):
    tensors = {**random_data(9).tensors(), "logp_old": None}
    if OBJECTIVES[name].needs_old_logp:
        with pytest.raises(ValueError, match="needs logp_old"):
            policy_loss(OBJECTIVES[name], **tensors)
    else:
        assert torch.isfinite(policy_loss(OBJECTIVES[name], **tensors)[0])


def test_sixteen_bit_log_probs_are_refused():
    tensors = random_data(9).tensors()
    tensors["logp"] = tensors["logp"].bfloat16()
    with pytest.raises(TypeError, match="bfloat16"):
        policy_loss(OBJECTIVES["pg"], **tensors)


def test_every_row_says_where_it_comes_from():
    assert all("arXiv" in objective.source or "Williams" in objective.source for objective in OBJECTIVES.values())


def test_settings_change_the_numbers_of_a_row():
    assert named("grpo-token-tis", {"bound": 3}).correction.bound == 3.0
    assert named("grpo", {"clip_high": 0.28}).surrogate.clip_high == 0.28
    assert named("pg", {"scale_by_std": True, "denominator": "response-tokens"}).scale_by_std
    assert named("pg-seq-is") == OBJECTIVES["pg-seq-is"]
    assert OBJECTIVES["grpo-token-tis"].correction.bound == 2.0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("grpo-token-tsi", {}, "did you mean grpo-token-tis"),
        ("pg-seq-tis", {"bond": 3}, r"objective_settings.pg-seq-tis: no setting 'bond'; did you mean bound"),
        ("pg", {"bound": 3}, "no setting 'bound'"),
        ("pg", {"clip_low": 0.1}, "no setting 'clip_low'"),
        ("grpo", {"clip_low": True}, "clip_low must be a float, not True"),
        ("grpo", {"clip_low": "0.1"}, "clip_low must be a float, not '0.1'"),
        ("grpo", {"clip_low": 1.0}, r"must be in \[0, 1\)"),
        ("grpo", {"clip_high": math.nan}, "clip_high nan"),
        ("pg-seq-tis", {"bound": -1}, "must be above 0"),
        ("grpo-dual-clip", {"dual_clip": 1}, "dual_clip 1.0 must be above 1"),
        ("icepop", {"bound_low": 6}, r"bound_low 6.0 must be in \[0, bound 5.0\]"),
        ("cispo", {"dual_clip": 3}, "no setting 'dual_clip'; "),
        ("cispo", {"clip_low": 1.1}, r"clip_low 1.1 must be in \[0, 1\]"),
        ("grpo-geo-mask", {"keep_low": 2}, "keep_low 2.0 must be in"),
        ("grpo-k3-mask", {"keep_low": 0.001}, "no setting 'keep_low'; "),
        ("dppo-tv", {"limit": -1}, "limit -1.0 must be at least 0"),
        ("grpo", {"kl_coefficient": -1}, "kl_coefficient -1.0 must be at least 0"),
        ("grpo", {"kl_estimator": "k4"}, "kl_estimator 'k4'"),
        ("grpo", {"kl_place": "advantage"}, "kl_place 'advantage'"),
        ("pg", {"denominator": "tokens"}, "must be one of max-length"),
        ("pg", {"scale_by_std": 1}, "scale_by_std must be a bool, not 1"),
        ("pg", {"gae_lambda": 1}, "no setting 'gae_lambda'"),
        ("pg", {"overlong_penalty": -1}, "overlong_penalty -1.0 must be at least 0"),
        ("dapo", {"overlong_share": 0}, r"overlong_share 0.0 in \(0, 1\]"),
        ("ppo", {"gae_lambda": 1.5}, r"gae_lambda 1.5 must be in \[0, 1\]"),
        ("ppo", {"discount": math.nan}, "discount nan"),
        ("ppo", {"value_clip": 0}, "value_clip 0.0 must be above 0"),
        ("dpo", {"beta": 0}, "beta 0.0 must be above 0"),
        ("dpo", {"kl_coefficient": 0.1}, "no setting 'kl_coefficient'"),
    ],
)
def test_wrong_names_and_settings_are_refused_with_a_way_on(name, changes, message):
    with pytest.raises(UserError, match=message):
        named(name, changes)
