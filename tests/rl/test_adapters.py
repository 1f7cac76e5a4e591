"""Training runs of LoRA adapters, and with the routing of a mixture of experts replayed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from halfmatch.config import EngineSettings, Lora
from halfmatch.config_files import validate
from halfmatch.engines import create
from halfmatch.errors import UserError
from halfmatch.models.lora import adapter_weights, save_adapter
from halfmatch.models.routing import recorded
from halfmatch.precision import Precision
from halfmatch.rl.checkpoints import Checkpoints
from halfmatch.rl.ranks import ALONE
from halfmatch.rl.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
import ranked
from test_trainer import quiet, settings

ADAPTER = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}
BF16 = Precision.named("bf16", emulate="always")


def with_adapter(
    folder: Path, precision: Precision = BF16, push: str = "merged", objective: str = "grpo", **changes
) -> Trainer:
    training = settings(lora={**ADAPTER, "push": push}, **changes)
    adapter = training.lora if push == "unmerged" else None
    engine = create("transformers", folder, precision, EngineSettings(slots=8), adapter=adapter)
    return ranked.build(folder, ALONE, objective, precision, engine=engine, training=training)


def canned(folder: Path, precision: Precision, objective: str = "grpo", **changes) -> Trainer:
    """On responses that do not depend on the weights, so that there always is something to learn."""
    return ranked.build(folder, ALONE, objective, precision, training=settings(lora=ADAPTER), **changes)


def run(trainer: Trainer, folder: Path) -> list[dict]:
    return trainer.run(Checkpoints(folder, course={}, keep=2), quiet)


def test_the_engine_gets_weights_with_the_adapter_merged_and_rounded_once(tiny_model_folder: Path, tmp_path: Path):
    trainer = with_adapter(tiny_model_folder)
    rows = run(trainer, tmp_path)
    stored = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    masters = dict(trainer.policy.masters.named())
    held = dict(trainer.engine._model.named_parameters())
    adapted = 0
    for name, weight in stored.named_parameters():
        exact = weight.bfloat16().double()
        path = name.removesuffix(".weight")
        if f"{path}.lora_A.default.weight" in masters:
            a, b = (masters[f"{path}.lora_{side}.default.weight"].double() for side in "AB")
            assert b.abs().max() > 0
            exact = exact + 8 / 4 * (b @ a)
            adapted += 1
        # the nearest, or of two that are as near to fp32's accuracy the other
        error, best = (held[name].double() - exact).abs(), (exact.bfloat16().double() - exact).abs()
        assert (error <= best + 1e-7).all(), name
    assert adapted == 6
    assert rows[-1]["weight_change"] > 0


def test_what_merging_loses_is_logged_with_the_mismatch_that_it_is_part_of(tiny_model_folder: Path, tmp_path: Path):
    rows = run(canned(tiny_model_folder, BF16), tmp_path)
    assert (rows[0]["merge_k3"], rows[0]["merge_lost"]) == (0, 0)  # B is 0
    assert rows[1]["merge_k3"] is None  # as the mismatch, once an iteration
    assert 0 < rows[2]["merge_k3"] < 0.1
    assert 0 < rows[2]["merge_lost"] < 1.1
    assert rows[2]["k3"] is not None
    fp32 = run(canned(tiny_model_folder, Precision.named("fp32")), tmp_path / "fp32")
    assert fp32[2]["merge_k3"] < 1e-6 < rows[2]["merge_k3"]


def test_an_engine_that_computes_the_adapter_itself_gets_it(tiny_model_folder: Path, tmp_path: Path):
    trainer = with_adapter(tiny_model_folder, push="unmerged", probe=True)
    rows = run(trainer, tmp_path)
    held = adapter_weights(trainer.engine._model)
    for name, master in trainer.policy.masters.named():
        assert torch.equal(held[name], master.bfloat16()), name
    assert all(row["merge_k3"] is None for row in rows)
    assert all(row["probe_k3"] < 1e-3 for row in rows if row["probe_k3"] is not None)


def test_the_trained_model_and_its_adapter_are_one_policy(tiny_model_folder: Path, tmp_path: Path):
    trainer = with_adapter(tiny_model_folder, Precision.named("fp32"))
    run(trainer, tmp_path / "run")
    merged = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()
    merged.load_state_dict(trainer.trained_weights(), strict=False)
    save_adapter(trainer.trained_adapter(), Lora.model_validate(ADAPTER), tmp_path / "adapter", base=None)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()
    ids = torch.arange(2, 18)[None]
    before = plain(input_ids=ids).logits
    beside = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(beside(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-3, atol=1e-4)
    assert (merged(input_ids=ids).logits - before).abs().max() > 1e-2


@pytest.mark.parametrize("objective", ["grpo", "ppo", "dpo"])
def test_resumed_equals_uninterrupted_bit_for_bit(tiny_model_folder: Path, tmp_path: Path, objective: str):
    changes = {"objective": objective, "iterations": 3}
    whole = with_adapter(tiny_model_folder, **changes)
    rows = run(whole, tmp_path / "whole")
    first = with_adapter(tiny_model_folder, **changes)
    first.settings = first.settings.model_copy(update={"iterations": 1})
    run(first, tmp_path / "parts")
    second = with_adapter(tiny_model_folder, **changes)
    assert repr(run(second, tmp_path / "parts")) == repr(rows)
    assert any(row["gradient_norm"] > 0 for row in rows[2:])
    ours, theirs = second.trained_weights(), whole.trained_weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_adapter_is_trained_with_a_kl_to_the_model_it_adapts(tiny_model_folder: Path, tmp_path: Path):
    trainer = canned(tiny_model_folder, BF16, kl_coefficient=0.1)
    assert not any(".lora_" in name for name, _ in trainer.reference.named_parameters())
    free, held = run(canned(tiny_model_folder, BF16), tmp_path / "free"), run(trainer, tmp_path / "held")
    assert held[0]["loss"] == free[0]["loss"]  # a new adapter is no distance from the model that it adapts
    assert held[1]["loss"] > free[1]["loss"]


@pytest.mark.parametrize("precision", [BF16, Precision.named("fp16", emulate="always")], ids=["bf16", "fp16"])
@pytest.mark.parametrize("objective", ["ppo", "dpo"])
def test_of_the_policy_the_adapter_alone_is_trained(
    tiny_model_folder: Path, tmp_path: Path, objective: str, precision: Precision
):
    """Against plain training in test_methods."""
    trainer = canned(tiny_model_folder, precision, objective)
    before = {name: weight.detach().clone() for name, weight in trainer.policy.model.named_parameters()}
    run(trainer, tmp_path)
    for name, weight in trainer.policy.model.named_parameters():
        assert torch.equal(weight, before[name]) != (".lora_" in name), name


def test_with_an_adapter_ppo_trains_its_value_model_whole(tiny_model_folder: Path, tmp_path: Path):
    trainer = canned(tiny_model_folder, BF16, "ppo")
    learner = trainer.critic.learner
    before = {name: weight.clone() for name, weight in learner.masters.named()}
    assert "value_head.weight" in before
    assert not any(".lora_" in name for name in before)
    run(trainer, tmp_path)
    assert not any(torch.equal(weight, before[name]) for name, weight in learner.masters.named())


# --------------------------------------------------------------------------------------------------- routing, replayed
def with_routing(folder: Path, precision: Precision, **changes) -> Trainer:
    engine = create("transformers", folder, precision, EngineSettings(slots=8), record_routing=True)
    training = settings(router_replay=True, **changes)
    return ranked.build(folder, ALONE, "grpo", precision, engine=engine, training=training)


def test_the_training_pass_takes_the_experts_that_the_engine_took(tiny_moe_folder: Path):
    trainer = with_routing(tiny_moe_folder, BF16, gradient_steps=2, micro_batch_tokens=1000)
    sampled = []
    generate = trainer.engine.generate

    def watched(*arguments, **options):
        sampled.extend(generate(*arguments, **options))
        return sampled

    trainer.engine.generate = watched
    passes = []
    with recorded(trainer.policy.model) as recorder:
        score = trainer._score

        def scored(model, batch, rows):
            result = score(model, batch, rows)
            passes.append((rows, batch, recorder.take()))
            return result

        trainer._score = scored
        first, second = trainer.iteration()
    assert len(passes) == 3  # of π(θ') on the second step's rows, and of the two steps
    for rows, batch, routing in passes:
        for index, chosen in zip(rows.tolist(), routing.split((batch.lengths[rows] - 1).tolist()), strict=True):
            np.testing.assert_array_equal(chosen.numpy(), sampled[index].routing)
    assert first["ratio_max"] == first["ratio_min"] == 1
    assert second["gradient_norm"] > 0


def test_a_run_with_replayed_routing_trains_routers_too(tiny_moe_folder: Path, tmp_path: Path):
    trainer = with_routing(tiny_moe_folder, Precision.named("fp16", emulate="always", fp32_modules=["router"]))
    start = {name: weight.clone() for name, weight in trainer.policy.masters.named()}
    rows = run(trainer, tmp_path)
    assert len(rows) == 4
    for name, weight in trainer.policy.masters.named():
        if "mlp.gate" in name:
            assert not torch.equal(weight, start[name]), name


def test_without_an_engine_that_gives_its_routing_replay_is_refused():
    training = {"router_replay": True}
    with pytest.raises(UserError, match=r"training\.router_replay: the engine vllm does not give"):
        validate({"training": training, "engine": {"name": "vllm"}}, "")
    with pytest.raises(UserError, match=r"training\.router_replay: blocks that are computed again"):
        validate({"training": {**training, "activation_checkpointing": True}}, "")
    validate({"training": training}, "")
