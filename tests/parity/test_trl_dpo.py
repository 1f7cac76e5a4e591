"""DPO's loss and gradient against TRL's DPOTrainer, on the same log-probs.

TRL's own `_compute_loss` runs, with log-probs handed to it in the place of a model's. TRL ships no PPO trainer any
more: generalized advantages and the clipped value loss are compared with float64 loops (tests/rl).
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from halfmatch.rl.objectives import named, policy_loss

dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer", reason="TRL is not installed (pip install -e .[dev])")


def data(seed, pairs=4, time=7):
    """Chosen and rejected responses of 1 to `time` tokens, in turn; log-probs in float64."""
    generator = torch.Generator().manual_seed(seed)
    logp, reference = -torch.rand(2, 2 * pairs, time, generator=generator, dtype=torch.float64) * 3
    lengths = torch.randint(1, time + 1, (2 * pairs, 1), generator=generator)
    return logp, reference, torch.arange(time) < lengths


def ours(logp, reference, mask, beta):
    logp = logp.clone().requires_grad_()
    loss, statistics = policy_loss(
        named("dpo", {"beta": beta}),
        logp=logp,
        logp_old=None,
        logp_rollout=torch.zeros_like(logp),
        advantages=torch.zeros(len(logp)),
        mask=mask,
        max_length=99,
        logp_reference=reference,
    )
    loss.backward()
    return loss.detach(), logp.grad, statistics


def trl(logp, reference, mask, beta):
    """TRL's batch is all chosen responses, then all rejected ones; its log-probs are 0 outside of the responses."""
    order = torch.cat([torch.arange(0, len(logp), 2), torch.arange(1, len(logp), 2)])
    logp = logp.clone().requires_grad_()
    completion = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask[order].long()], dim=1)

    def outputs(values):
        values = (values * mask)[order]
        zeros = torch.zeros_like(values)
        return SimpleNamespace(
            log_probs=values, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=zeros
        )

    metrics = defaultdict(list)
    trainer = object.__new__(dpo_trainer.DPOTrainer)
    parts = {
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
        "accelerator": SimpleNamespace(
            device="cpu", gather=lambda value: value, gather_for_metrics=lambda value: value
        ),
        "model": lambda **_: outputs(logp),
        "ref_model": lambda **_: outputs(reference),
        "beta": beta,
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "f_divergence_type": "reverse_kl",
        "ld_alpha": None,
        "precompute_ref_logps": False,
        "use_weighting": False,
        "aux_loss_enabled": False,
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "_metrics": {"train": metrics},
    }
    trainer.__dict__.update(parts)
    trainer.model.training = True
    inputs = {"input_ids": completion, "attention_mask": completion, "completion_mask": completion}
    loss = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    loss.backward()
    return loss.detach(), logp.grad, metrics


@pytest.fixture(autouse=True)
def no_gradient_checkpointing(monkeypatch):
    from contextlib import nullcontext

    monkeypatch.setattr(dpo_trainer, "disable_gradient_checkpointing", lambda *_: nullcontext())
    monkeypatch.setattr(dpo_trainer, "is_peft_model", lambda _: False)


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_same_loss_and_same_gradient(seed, beta):
    tensors = data(seed)
    loss, gradient, statistics = ours(*tensors, beta)
    their_loss, their_gradient, metrics = trl(*tensors, beta)
    assert gradient.abs().max() > 1e-4
    torch.testing.assert_close(loss, their_loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-12, atol=1e-14)
    assert statistics["preference_margin"] == pytest.approx(metrics["rewards/margins"][0], rel=1e-6)
    assert statistics["preference_accuracy"] == pytest.approx(metrics["rewards/accuracies"][0])
