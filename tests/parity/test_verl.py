"""Loss values and gradients against verl's losses as documented, written anew here; and where they differ on purpose.

verl's conventions: losses are maximised surrogates with a minus sign, [B, T]; what rejection leaves out is taken out of
the response mask; the aggregations are token-mean, seq-mean-token-mean and seq-mean-token-sum-norm.
"""

import pytest
import torch

from halfmatch.rl.advantages import generalized_advantages, standardized
from halfmatch.rl.objectives import OBJECTIVES, override, policy_loss
from halfmatch.rl.values import value_loss

MAX_LENGTH = 9


def data(seed, batch=6, time=7, drift=0.5, mismatch=0.5):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, time + 1, (batch,), generator=generator)
    old = -torch.rand(batch, time, generator=generator, dtype=torch.float64) * 3 - 0.01
    return {
        "logp": (old + drift * normal(batch, time)).clamp(max=-1e-3),
        "logp_old": old,
        "logp_rollout": (old + mismatch * normal(batch, time)).clamp(max=-1e-3),
        "advantages": normal(batch),
        "mask": torch.arange(time) < lengths[:, None],
    }


def ours(objective, tensors):
    tensors = {**tensors, "logp": tensors["logp"].clone().requires_grad_()}
    loss, _ = policy_loss(objective, **tensors, max_length=MAX_LENGTH)
    loss.backward()
    return loss.detach(), tensors["logp"].grad


def verl(losses, aggregation, tensors, *, weights=1.0, keep=None):
    """`losses` of (log π(θ), log π(θ'), A) as [B, T], weighted, and aggregated over the mask that rejection leaves."""
    logp = tensors["logp"].clone().requires_grad_()
    mask = tensors["mask"] if keep is None else tensors["mask"] & keep
    values = losses(logp, tensors["logp_old"], tensors["advantages"][:, None]) * weights * mask
    if aggregation == "token-mean":
        loss = values.sum() / mask.sum()
    elif aggregation == "seq-mean-token-mean":
        loss = (values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()
    else:
        loss = values.sum(dim=1).mean() / MAX_LENGTH
    loss.backward()
    return loss.detach(), logp.grad


def vanilla(low=0.2, high=0.2, dual=None):
    def losses(logp, old, advantages):
        ratio = (logp - old).exp()
        clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
        if dual is None:
            return clipped
        return torch.where(advantages < 0, torch.minimum(clipped, -advantages * dual), clipped)

    return losses


def cispo(low, high):
    return lambda logp, old, advantages: -(logp - old).exp().clamp(1 - low, 1 + high).detach() * advantages * logp


def dppo(kind, limit):
    def losses(logp, old, advantages):
        p, q = old.exp(), logp.exp()
        if kind == "tv":
            valid = torch.where(advantages > 0, q - p <= limit, q - p >= -limit)
        else:
            divergence = p * (old - logp) + (1 - p) * ((1 - p) / (1 - q)).log()
            valid = (divergence <= limit) | torch.where(advantages > 0, q <= p, q >= p)
        return -advantages * (logp - old).exp().detach() * logp * valid.detach()

    return losses


def row(name, **changes):
    return override(OBJECTIVES[name], changes)


def assert_same(found, expected):
    assert found[1].abs().max() > 1e-4
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("objective", "losses", "aggregation"),
    [
        (row("grpo"), vanilla(), "seq-mean-token-sum-norm"),
        (row("dapo"), vanilla(0.2, 0.28), "token-mean"),
        (row("dapo", dual_clip=1.5), vanilla(0.2, 0.28, 1.5), "token-mean"),
        (row("grpo-dual-clip", dual_clip=1.5), vanilla(dual=1.5), "seq-mean-token-sum-norm"),
        (row("cispo", clip_low=0.2, clip_high=0.28), cispo(0.2, 0.28), "token-mean"),
        (row("reinforce-plus-plus", denominator="response-mean"), vanilla(), "seq-mean-token-mean"),
    ],
)
def test_losses(objective, losses, aggregation, seed):
    tensors = data(seed)
    assert_same(ours(objective, tensors), verl(losses, aggregation, tensors))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "limit"), [("tv", 0.15), ("kl", 0.05)])
def test_dppo_in_bypass_mode(kind, limit, seed):
    """verl's π_old is μ there, as the authors recommend; its cap of the ratio at 20 is reached by none of these."""
    tensors = data(seed)
    found = ours(row(f"dppo-{kind}"), tensors)
    assert_same(
        found, verl(dppo(kind, limit), "seq-mean-token-sum-norm", {**tensors, "logp_old": tensors["logp_rollout"]})
    )
    assert (found[1][tensors["mask"]] == 0).any()


@pytest.mark.parametrize("seed", range(3))
def test_token_weights(seed):
    tensors = data(seed)
    ratio = (tensors["logp_old"] - tensors["logp_rollout"]).exp()
    truncated = verl(vanilla(), "seq-mean-token-sum-norm", tensors, weights=ratio.clamp(max=1.3))
    assert_same(ours(row("grpo-token-tis", bound=1.3), tensors), truncated)
    masked = torch.where((ratio < 0.8) | (ratio > 1.3), 0.0, ratio)
    icepop = verl(vanilla(), "seq-mean-token-mean", tensors, weights=masked)
    assert_same(ours(row("icepop", bound=1.3, bound_low=0.8), tensors), icepop)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["grpo-geo-mask", "grpo-k3-mask"])
def test_rejection_of_responses(name, seed):
    """The same with a constant denominator. On purpose not with the mean over tokens: verl's counts those that are
    kept, ours all, so that leaving out bad responses does not make the others' step longer."""
    tensors = data(seed)
    mask = tensors["mask"]
    difference = (tensors["logp_old"] - tensors["logp_rollout"]) * mask
    count = mask.sum(dim=1, keepdim=True)
    if name == "grpo-geo-mask":
        # verl bounds the mean of −d by the logarithms, which is the same for an interval that is its own reciprocal
        mean = -difference.sum(dim=1, keepdim=True) / count
        keep, changes = mean.exp().clamp(1 / 1.2, 1.2) == mean.exp(), {"keep_low": 1 / 1.2, "keep_high": 1.2}
    else:
        k3 = (difference.exp() - 1 - difference).sum(dim=1, keepdim=True) / count
        keep, changes = k3 <= 0.1, {"keep_high": 0.1}
    assert 0 < keep.sum() < len(keep)
    assert_same(ours(row(name, **changes), tensors), verl(vanilla(), "seq-mean-token-sum-norm", tensors, keep=keep))
    mean_over_all = ours(row(name, **changes, denominator="response-tokens"), tensors)[1]
    mean_over_kept = verl(vanilla(), "token-mean", tensors, keep=keep)[1]
    share = int((mask & keep).sum()) / int(mask.sum())
    torch.testing.assert_close(mean_over_all, mean_over_kept * share, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------------------------------------- value models
def critic_data(seed, batch=4, time=6):
    generator = torch.Generator().manual_seed(seed)
    values, now = torch.randn(2, batch, time, generator=generator, dtype=torch.float64)
    mask = torch.arange(time) < torch.randint(1, time + 1, (batch, 1), generator=generator)
    rewards = torch.zeros(batch, time, dtype=torch.float64)
    rewards[torch.arange(batch), mask.sum(dim=1) - 1] = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    return rewards, values, now, mask


def verl_gae(rewards, values, mask, discount, gae_lambda):
    """verl carries the value and the advantage of the last real token over what is masked."""
    following = last = torch.zeros(len(values), dtype=torch.float64)
    columns = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + discount * following - values[:, t]
        advantage = delta + discount * gae_lambda * last
        following = torch.where(mask[:, t], values[:, t], following)
        last = torch.where(mask[:, t], advantage, last)
        columns.insert(0, last)
    advantages = torch.stack(columns, dim=1)
    return advantages, advantages + values


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5)])
def test_generalized_advantages(seed, discount, gae_lambda):
    rewards, values, _, mask = critic_data(seed)
    found = generalized_advantages(rewards, values, mask, discount=discount, gae_lambda=gae_lambda)
    for ours, theirs in zip(found, verl_gae(rewards, values, mask, discount, gae_lambda), strict=True):
        torch.testing.assert_close(ours[mask].double(), theirs[mask], rtol=1e-6, atol=1e-6)  # ours are rounded


@pytest.mark.parametrize("seed", range(3))
def test_standardised_advantages_but_for_what_keeps_the_division_finite(seed):
    """verl divides by the root of the variance plus 1e-8, ours by the standard deviation plus 1e-6."""
    _, advantages, _, mask = critic_data(seed)
    chosen = advantages[mask]
    theirs = (advantages - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8)
    torch.testing.assert_close(standardized(advantages, mask)[mask], theirs[mask], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_the_clipped_value_loss(seed):
    rewards, values, now, mask = critic_data(seed)
    _, returns = verl_gae(rewards, values, mask, 1.0, 0.95)
    results = []
    for _ in range(2):
        leaf = now.clone().requires_grad_()
        if not results:
            count = int(mask.sum())
            loss, binding = value_loss(leaf, values_old=values, returns=returns, mask=mask, clip=0.5, tokens=count)
        else:
            clipped = leaf.clamp(values - 0.5, values + 0.5)
            larger = torch.max((leaf - returns) ** 2, (clipped - returns) ** 2)
            loss = 0.5 * (larger * mask).sum() / mask.sum()
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    assert 0 < binding < mask.sum()
    assert_same(*results)
