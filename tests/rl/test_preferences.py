"""Which responses make a pair, and the loss of DPO against its definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.rl.objectives import OBJECTIVES, Totals, merge_statistics, named, policy_loss
from halfmatch.rl.preferences import preference_pairs


def test_pairs_of_a_problem_by_hand():
    verdicts = ["correct", "wrong", "correct", "timeout", "correct", "correct", "correct", "correct"]
    verdicts += ["truncated", "unparseable", "wrong", "correct"]
    assert preference_pairs(verdicts, 4).tolist() == [[0, 1], [11, 8]]
    assert preference_pairs(["wrong", "correct", "truncated", "correct"], 4).tolist() == [[1, 0], [3, 2]]


def test_no_pair_is_a_batch_of_none():
    assert preference_pairs(["correct", "correct", "timeout", "timeout"], 2).shape == (0, 2)


@given(st.lists(st.sampled_from(["correct", "wrong", "truncated", "unparseable", "timeout"]), max_size=24))
def test_every_pair_is_a_right_and_a_wrong_response_to_one_problem_and_none_is_in_two(verdicts):
    pairs = preference_pairs(verdicts, 4).tolist()
    rows = [row for pair in pairs for row in pair]
    assert len(set(rows)) == len(rows)
    for chosen, rejected in pairs:
        assert chosen // 4 == rejected // 4
        assert verdicts[chosen] == "correct"
        assert verdicts[rejected] not in ("correct", "timeout")
    for start in range(0, len(verdicts), 4):
        group = verdicts[start : start + 4]
        right, wrong = group.count("correct"), len(group) - group.count("correct") - group.count("timeout")
        assert sum(chosen // 4 == start // 4 for chosen, _ in pairs) == min(right, wrong)


# -------------------------------------------------------------------------------------------------------- the loss
def pairs_of(seed, pairs=3, time=5):
    generator = torch.Generator().manual_seed(seed)
    logp, reference = -torch.rand(2, 2 * pairs, time, generator=generator, dtype=torch.float64) * 3
    mask = torch.arange(time) < torch.randint(1, time + 1, (2 * pairs, 1), generator=generator)
    return {
        "logp": logp.masked_fill(~mask, math.nan),
        "logp_reference": reference.masked_fill(~mask, math.inf),
        "mask": mask,
        "logp_old": None,
        "logp_rollout": torch.full_like(logp, math.nan),  # the policy that sampled does not enter
        "advantages": torch.full((2 * pairs,), math.nan),
        "max_length": 99,
    }


def plain_dpo(tensors, beta):
    """The mean of −log σ(β (log π/π_ref (chosen) − log π/π_ref (rejected))) over pairs; margins of each."""
    margins = []
    for pair in range(len(tensors["mask"]) // 2):
        chosen, rejected = (
            sum(
                (tensors["logp"][row, t] - tensors["logp_reference"][row, t]).item()
                for t in range(tensors["mask"].shape[1])
                if tensors["mask"][row, t]
            )
            for row in (2 * pair, 2 * pair + 1)
        )
        margins.append(beta * (chosen - rejected))
    return sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins), margins


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_and_its_gradient_are_those_of_the_definition(seed, beta):
    tensors = pairs_of(seed)
    logp = tensors["logp"].requires_grad_()
    loss, statistics = policy_loss(named("dpo", {"beta": beta}), **tensors)
    loss.backward()
    expected, margins = plain_dpo(tensors, beta)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert statistics["preference_margin"] == pytest.approx(sum(margins) / 3)
    assert statistics["preference_accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 3)
    for row in range(6):
        weight = beta / (1 + math.exp(margins[row // 2])) / 3  # arXiv 2305.18290, section 4: σ(−margin)
        for t in range(5):
            slope = (weight if row % 2 else -weight) if tensors["mask"][row, t] else 0.0
            assert logp.grad[row, t].item() == pytest.approx(slope, rel=1e-12)


def test_micro_batches_of_pairs_add_up_to_the_step():
    tensors, objective = pairs_of(5), OBJECTIVES["dpo"]
    whole, statistics = policy_loss(objective, **tensors)
    parts = []
    for rows in (slice(0, 2), slice(2, 6)):
        part = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}
        parts.append(policy_loss(objective, **part, totals=Totals.of(tensors["mask"])))
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), rel=1e-12)
    assert merge_statistics(objective, [part for _, part in parts]) == pytest.approx(statistics)


def test_where_the_policy_is_the_reference_the_loss_is_that_of_a_coin():
    tensors = pairs_of(6)
    loss, statistics = policy_loss(OBJECTIVES["dpo"], **{**tensors, "logp_reference": tensors["logp"]})
    assert loss.item() == pytest.approx(math.log(2))
    assert statistics["preference_margin"] == statistics["preference_accuracy"] == 0


def test_a_reference_is_needed():
    with pytest.raises(ValueError, match="needs logp_reference"):
        policy_loss(OBJECTIVES["dpo"], **{**pairs_of(0), "logp_reference": None})
    assert OBJECTIVES["dpo"].needs_reference
    assert not OBJECTIVES["dpo"].needs_old_logp
    assert {name for name in OBJECTIVES if OBJECTIVES[name].needs_reference} == {"dpo"}
    assert named("pg", {"kl_coefficient": 0.1}).needs_reference


def test_large_margins_overflow_nowhere():
    logp = torch.tensor([[-1e4], [-1.0], [-1.0], [-1e4]], requires_grad=True)
    tensors = {**pairs_of(0), "mask": torch.ones(4, 1, dtype=torch.bool), "logp": logp}
    tensors |= {"logp_reference": torch.zeros(4, 1)}
    loss, _ = policy_loss(OBJECTIVES["dpo"], **tensors)
    loss.backward()
    assert loss.item() == pytest.approx(999.9 / 2, rel=1e-6)
    assert logp.grad.flatten().tolist() == pytest.approx([-0.05, 0.05, 0, 0], abs=1e-9)
