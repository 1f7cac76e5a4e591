"""What every rank of tests/rl/test_ranks.py runs: small trainings, whose results the first rank writes down.

torchrun --nproc-per-node 2 tests/rl/ranked.py MODEL_FOLDER RESULTS_FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch
from test_trainer import EOS, PROBLEMS, CannedEngine, DigitGrader, letters, quiet, settings
from transformers import AutoModelForCausalLM

from halfmatch.config import EngineSettings
from halfmatch.engines import NonFiniteError, create
from halfmatch.precision import Precision
from halfmatch.rl.checkpoints import Checkpoints
from halfmatch.rl.objectives import named
from halfmatch.rl.ranks import Ranks, join
from halfmatch.rl.trainer import Trainer

SCALED = {"initial_scale": 1024.0}
HEAD_IN_FP32 = {"fp32_modules": ("value_head", "norm"), "loss_scaling": SCALED}


def build(model: Path, ranks: Ranks, objective: str, precision: Precision, *, engine=None, training=None, **changes):
    if engine is None:
        engine = CannedEngine()
        engine.dtype = precision.rollout
    return Trainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(),
        engine=engine,
        grader=DigitGrader(),
        decode=letters,
        stop_token_ids=[EOS],
        problems=PROBLEMS,
        settings=training or settings(prompts_per_iteration=3),
        precision=precision,
        objective=named(objective, changes),
        seed=0,
        ranks=ranks,
    )


def trainings(model: Path, folder: Path, ranks: Ranks):
    """Rows and weights of whole runs, by name."""
    adapter = {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}
    for name, objective, precision, changes in (
        ("fp32 grpo", "grpo", Precision.named("fp32"), {"kl_coefficient": 0.1}),
        ("fp32 pg-seq-is", "pg-seq-is", Precision.named("fp32"), {}),
        ("fp32 gspo", "gspo", Precision.named("fp32"), {}),
        ("fp32 grpo sharded", "grpo", Precision.named("fp32"), {}),
        ("bf16 grpo", "grpo", Precision.named("bf16", emulate="always", fp32_modules=("lm_head", "norm")), {}),
        ("fp16 pg-seq-is", "pg-seq-is", Precision.named("fp16", emulate="always", loss_scaling=SCALED), {}),
        ("bf16 grpo lora", "grpo", Precision.named("bf16", emulate="always"), {}),
        ("fp32 ppo", "ppo", Precision.named("fp32"), {"kl_coefficient": 0.1, "kl_place": "reward"}),
        ("fp16 ppo", "ppo", Precision.named("fp16", emulate="always", **HEAD_IN_FP32), {}),
        ("fp32 dpo", "dpo", Precision.named("fp32"), {}),
        ("fp32 dapo", "dapo", Precision.named("fp32"), {}),
    ):
        training = settings(
            prompts_per_iteration=3,
            lora=adapter if name.endswith("lora") else None,
            shard_gradients=name.endswith("sharded"),
        )
        trainer = build(model, ranks, objective, precision, training=training, **changes)
        rows = trainer.run(Checkpoints(folder / name, course={}, keep=1, ranks=ranks), quiet)
        yield name, rows, trainer.trained_weights()


def probed(model: Path, folder: Path, ranks: Ranks):
    """A run in which every rank samples with an engine of its own, and asks it after every sync."""
    precision = Precision.named("bf16", emulate="always")
    engine = create("transformers", model, precision, EngineSettings(slots=8))
    trainer = build(model, ranks, "grpo", precision, engine=engine, training=settings(probe=True))
    return trainer.run(Checkpoints(folder / "probed", course={}, keep=1, ranks=ranks), quiet)


def overflow_on_one_rank(model: Path, ranks: Ranks, clip_norm: float | None):
    """One row's gradients leave the range of fp16, so those of one rank do: what each rank then does."""
    precision = Precision.named("fp16", emulate="always", loss_scaling=SCALED)
    training = settings(prompts_per_iteration=3, gradient_steps=1, clip_norm=clip_norm)
    trainer = build(model, ranks, "pg", precision, training=training)
    make_experience = trainer.experience

    def experience(*arguments):
        made = make_experience(*arguments)
        made.advantages[0] = 1e6
        return made

    trainer.experience = experience
    masters = trainer.policy.masters
    before = [weight.clone() for weight in masters.tensors().values()]
    (row,) = trainer.iteration()
    unchanged = all(torch.equal(old, new) for old, new in zip(before, masters.tensors().values(), strict=True))
    return ranks.gather([[row["step_skipped"], unchanged, trainer.policy.loss_scale, row["first_non_finite"]]])


def interrupted(model: Path, folder: Path, ranks: Ranks, iterations: int):
    """So many iterations of a run of four, from what is in the folder."""
    training = settings(prompts_per_iteration=3, iterations=4, checkpoint_every=2)
    trainer = build(model, ranks, "ppo", Precision.named("fp32"), training=training)
    trainer.settings = training.model_copy(update={"iterations": iterations})
    rows = trainer.run(Checkpoints(folder, course={}, keep=2, ranks=ranks), quiet)
    return rows, trainer.trained_weights()


def blind_on_one_rank(model: Path, folder: Path, ranks: Ranks):
    """The engine of the last rank cannot sample in the second iteration."""

    class Blind(CannedEngine):
        def generate(self, requests, sampling, **options):
            if ranks.rank == ranks.size - 1 and any(kind == "generate" for kind, _ in self.calls):
                raise NonFiniteError("the logits are not finite")
            return super().generate(requests, sampling, **options)

    engine = Blind()
    engine.dtype = "fp32"
    trainer = build(model, ranks, "pg", Precision.named("fp32"), engine=engine, training=settings(iterations=5))
    return trainer.run(Checkpoints(folder / "blind", course={}, keep=1, ranks=ranks), quiet)


def everything(model: Path, folder: Path, ranks: Ranks) -> None:
    """All of it, written to `folder/results.json` and `folder/weights.pt` by the first rank."""
    found, weights = {}, {}
    for name, rows, trained in trainings(model, folder, ranks):
        found[name], weights[name] = rows, trained
    found["probed"] = probed(model, folder, ranks)
    found["overflow"] = overflow_on_one_rank(model, ranks, 1.0)
    found["overflow, no clipping"] = overflow_on_one_rank(model, ranks, None)
    found["blind"] = blind_on_one_rank(model, folder, ranks)
    found["whole"], weights["whole"] = interrupted(model, folder / "whole", ranks, 4)
    interrupted(model, folder / "parts", ranks, 2)
    found["parts"], weights["parts"] = interrupted(model, folder / "parts", ranks, 4)
    interrupted(model, folder / "left", ranks, 2)
    if (folder / "of others").exists():
        _, weights["of others"] = interrupted(model, folder / "of others", ranks, 4)
    if ranks.first:
        (folder / "results.json").write_text(json.dumps(found))
        torch.save(weights, folder / "weights.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join(int(os.environ["WORLD_SIZE"]), "cpu") as all_ranks:
        everything(Path(sys.argv[1]), Path(sys.argv[2]), all_ranks)
