"""Loss values and gradients against TRL's GRPOTrainer, on the same tensors; and where they differ on purpose.

TRL's own `_compute_loss` runs, with log-probs handed to it in the place of a model's. Its importance-sampling weights
are computed while it samples, so they are formed here by its four documented modes.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from halfmatch.rl.objectives import OBJECTIVES, Totals, override, policy_loss
from halfmatch.rl.parts import ClippedRatio, Correction, Objective

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed (pip install -e .[dev])")

MAX_LENGTH = 11


def data(seed, batch=6, time=8, drift=0.4, mismatch=0.4):
    """Responses of 1 to `time` tokens; log-probs in float64, so that only formulas can differ."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, time + 1, (batch,), generator=generator)
    logp = -torch.rand(batch, time, generator=generator, dtype=torch.float64) * 3 - 1.5
    old = logp + drift * normal(batch, time)
    return {
        "logp": logp,
        "logp_old": old,
        "logp_rollout": old + mismatch * normal(batch, time),
        "advantages": normal(batch),
        "mask": torch.arange(time) < lengths[:, None],
    }


def ours(objective, tensors, **settings):
    tensors = {**tensors, "logp": tensors["logp"].clone().requires_grad_()}
    loss, _ = policy_loss(objective, **tensors, max_length=MAX_LENGTH, **settings)
    loss.backward()
    return loss.detach(), tensors["logp"].grad


def trl_weights(mode, tensors, low=None, high=None):
    """π(θ')/μ of tokens or of responses; beyond its limits truncated to them, or 0."""
    difference = (tensors["logp_old"] - tensors["logp_rollout"]) * tensors["mask"]
    level, beyond = mode.split("_")
    ratio = (difference.sum(dim=1, keepdim=True) if level == "sequence" else difference).exp()
    if beyond == "truncate":
        return ratio.clamp(low, high)
    return torch.where((ratio < (low or 0)) | (ratio > high), 0.0, ratio)


def trl(loss_type, tensors, *, weights=None, level="token", epsilon=(0.2, 0.2), delta=None, beta=0.0):
    logp = tensors["logp"].clone().requires_grad_()
    trainer = object.__new__(grpo_trainer.GRPOTrainer)
    parts = {
        "args": SimpleNamespace(delta=delta, steps_per_generation=1, use_bias_correction_kl=False),
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value
        ),
        "model": SimpleNamespace(training=True),
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon_low": epsilon[0],
        "epsilon_high": epsilon[1],
        "beta": beta,
        "max_completion_length": MAX_LENGTH,
        "current_gradient_accumulation_steps": 1,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "use_vllm": weights is not None,
        "vllm_importance_sampling_correction": weights is not None,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logp, torch.zeros_like(logp), None),
    }
    for name, part in parts.items():
        setattr(trainer, name, part)
    mask = tensors["mask"].long()
    prompt = torch.ones(len(mask), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["logp_old"],
        "ref_per_token_logps": tensors.get("logp_reference"),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": weights,
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), logp.grad


def row(name, **changes):
    return override(OBJECTIVES[name], changes)


# Our row, TRL's loss type and its settings, and its importance-sampling mode with its limits.
SAME = {
    "grpo": (row("grpo"), "dr_grpo", {}, None),
    "grpo of the original GRPO": (row("grpo", denominator="response-mean"), "grpo", {}, None),
    "token mean": (row("grpo", denominator="response-tokens"), "bnpo", {}, None),
    "dapo": (row("dapo"), "dapo", {"epsilon": (0.2, 0.28)}, None),
    "reinforce-plus-plus": (row("reinforce-plus-plus"), "dapo", {}, None),
    "grpo-dual-clip": (row("grpo-dual-clip", dual_clip=1.5), "dr_grpo", {"delta": 1.5}, None),
    "gspo": (row("gspo"), "grpo", {"level": "sequence", "epsilon": (3e-4, 4e-4)}, None),
    "gspo, wide": (
        row("gspo", clip_low=0.2, clip_high=0.2),
        "grpo",
        {"level": "sequence"},
        None,
    ),
    "cispo": (row("cispo", clip_high=0.3), "cispo", {"epsilon": (0.2, 1.3)}, None),  # TRL's bound is of r itself
    "grpo-token-tis": (row("grpo-token-tis", bound=1.3), "dr_grpo", {}, ("token_truncate", None, 1.3)),
    "token truncation on both sides": (
        row("grpo-token-tis", bound=1.3, bound_low=0.8),
        "dr_grpo",
        {},
        ("token_truncate", 0.8, 1.3),
    ),
    "icepop": (row("icepop", bound=1.3, bound_low=0.8), "grpo", {}, ("token_mask", 0.8, 1.3)),
    "grpo-seq-mis": (row("grpo-seq-mis", bound=1.5), "dr_grpo", {}, ("sequence_mask", None, 1.5)),
    "sequence truncation": (
        Objective(ClippedRatio(), Correction("old", "sequence", 1.5), source="TRL"),
        "dr_grpo",
        {},
        ("sequence_truncate", None, 1.5),
    ),
}


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("seed", range(3))
def test_same_loss_and_same_gradient(case, seed):
    objective, loss_type, settings, mode = SAME[case]
    tensors = data(seed)
    weights = None if mode is None else trl_weights(mode[0], tensors, *mode[1:])
    loss, gradient = ours(objective, tensors)
    their_loss, their_gradient = trl(loss_type, tensors, weights=weights, **settings)
    assert gradient.abs().max() > 1e-4
    torch.testing.assert_close(loss, their_loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "loss_type", "epsilon"), [("grpo", "dr_grpo", (0.2, 0.2)), ("dapo", "dapo", (0.2, 0.28))]
)
def test_same_kl_to_the_reference(name, loss_type, epsilon):
    tensors = data(0)
    tensors["logp_reference"] = tensors["logp_rollout"]
    found = ours(row(name, kl_coefficient=0.3, kl_estimator="k3"), tensors)
    expected = trl(loss_type, tensors, epsilon=epsilon, beta=0.3)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(found[1], ours(row(name), tensors)[1], rtol=1e-3)


def halves(tensors):
    return [{name: value[rows] for name, value in tensors.items()} for rows in (slice(0, 2), slice(2, 6))]


def test_on_purpose_the_gradient_does_not_depend_on_micro_batches():
    """TRL's bnpo divides by the tokens of the micro-batch; ours by those of the batch, however it is split."""
    tensors = data(0)
    objective = row("grpo", denominator="response-tokens")
    whole = ours(objective, tensors)[1]
    parts = torch.cat([ours(objective, half, totals=Totals.of(tensors["mask"]))[1] for half in halves(tensors)])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)
    their_whole = trl("bnpo", tensors)[1]
    their_parts = torch.cat([trl("bnpo", half)[1] / 2 for half in halves(tensors)])  # a mean over the two
    torch.testing.assert_close(whole, their_whole, rtol=1e-12, atol=1e-14)
    assert (their_parts - their_whole).abs().max() > 0.05 * their_whole.abs().max()


def test_on_purpose_a_clipped_ratio_beyond_the_floating_point_range_has_gradient_zero():
    """TRL's is NaN: 0 times the infinite derivative of the exponential. Ours cuts the logarithm."""
    tensors = data(0)
    tensors["advantages"] = tensors["advantages"].abs()
    tensors["logp_old"][0, 0] = -800.0
    loss, gradient = ours(row("grpo"), tensors)
    assert torch.isfinite(loss)
    assert gradient[0, 0] == 0
    assert torch.isfinite(gradient).all()
    assert trl("dr_grpo", tensors)[1][0, 0].isnan()


def test_on_purpose_the_default_bound_is_above_alone():
    """A small weight is as valid as a large one, and bounded by itself: a lower bound has to be asked for."""
    tensors = data(0)
    for name in ("grpo-token-tis", "grpo-seq-mis", "pg-token-tis", "pg-seq-tis", "pg-seq-mis"):
        assert OBJECTIVES[name].correction.bound_low == 0
    both_sides = trl("dr_grpo", tensors, weights=trl_weights("token_truncate", tensors, 0.8, 2.0))[1]
    above = trl("dr_grpo", tensors, weights=trl_weights("token_truncate", tensors, None, 2.0))[1]
    gradient = ours(row("grpo-token-tis"), tensors)[1]
    torch.testing.assert_close(gradient, above, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(gradient, both_sides, rtol=1e-3)
