"""Which jobs a configuration asks for."""

from __future__ import annotations

from typing import Any

from halfmatch import jobs
from halfmatch.config import Config
from halfmatch.config_files import validate
from halfmatch.paths import Run


def config(**changes: Any) -> Config:
    return validate(changes, "")


def test_the_laptop_run() -> None:
    counts = {step: len(jobs.jobs(Config(), step)) for step in ("model", "rollouts", "scores", "train", "evaluate")}
    # 4 models; 4 models × 3 precisions; 2 × 2 × 2 runs; (8 runs + the untrained model in 2 precisions) × 2 benchmarks,
    # by the engine and by the trainer
    assert counts == {"model": 4, "rollouts": 12, "scores": 12, "train": 8, "evaluate": 40}


def test_runs_are_the_whole_matrix() -> None:
    training = {"precisions": ["fp16"], "objectives": ["grpo", "pg"], "seeds": [3, 1]}
    assert jobs.runs(config(training=training)) == [
        Run("fp16", "grpo", 3),
        Run("fp16", "grpo", 1),
        Run("fp16", "pg", 3),
        Run("fp16", "pg", 1),
    ]


def test_a_run_is_deployed_in_its_own_precision_or_in_all_that_are_listed() -> None:
    own = jobs.jobs(config(), "evaluate")
    assert all(job["rollout"] == job["run"].split("_")[0] for job in own if job["run"] != jobs.INITIAL)
    listed = jobs.jobs(config(evaluation={"precisions": ["fp16", "fp32"]}), "evaluate")
    deployed = [job for job in listed if job["engine"] != jobs.TRAINER]
    assert {job["rollout"] for job in deployed if job["run"] == "bf16_grpo_seed0"} == {"fp16", "fp32"}


def test_the_trainer_evaluates_weights_in_the_precision_of_their_training_alone() -> None:
    listed = jobs.jobs(config(evaluation={"precisions": ["fp16", "fp32"]}), "evaluate")
    in_trainer = {(job["run"], job["rollout"]) for job in listed if job["engine"] == "trainer"}
    assert {("bf16_grpo_seed0", "bf16"), ("fp16_grpo_seed1", "fp16")} < in_trainer
    assert all(rollout == run.split("_")[0] for run, rollout in in_trainer if run != jobs.INITIAL)
    assert {rollout for run, rollout in in_trainer if run == jobs.INITIAL} == {"bf16", "fp16"}


def test_without_training_the_untrained_model_is_evaluated_alone() -> None:
    evaluated = jobs.jobs(config(training=None), "evaluate")
    assert {(job["run"], job["rollout"]) for job in evaluated} == {(jobs.INITIAL, "fp16")}
    assert jobs.jobs(config(training=None, evaluation=None), "evaluate") == []


def test_models_come_after_those_they_start_from_and_unused_ones_not_at_all() -> None:
    used = config(mismatch={"models": ["gain120"]}, solvability={"model": "gain120"})
    assert jobs.model_names(used) == ["gain16", "gain120"]


def test_shards_say_how_many_there_are() -> None:
    assert jobs.shards(config(solvability={"shards": 3})) == ["0-of-3", "1-of-3", "2-of-3"]


def pairs(config: Config, step: str) -> set[tuple[str, str]]:
    return {(job["rollout"], job["train"]) for job in jobs.jobs(config, step)}


def test_the_grid_is_every_pair_of_its_precisions_and_the_others_as_they_are() -> None:
    crossed = config(mismatch={"grid": ["bf16", "fp32"]})
    expected = {("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp32"), ("fp16", "fp16")}
    for step in ("scores", "mismatch", "fidelity"):
        assert pairs(crossed, step) == expected
    assert jobs.jobs(crossed, "rollouts") == jobs.jobs(config(), "rollouts")
    assert all(rollout == train for rollout, train in pairs(config(), "scores"))


def test_what_is_traced_is_the_transformers_engine_in_each_precision() -> None:
    assert jobs.jobs(config(), "origin") == []
    origin = {"engines": ["transformers", "vllm"], "grid": ["bf16", "fp16"], "origin": {"enabled": True}}
    traced = config(mismatch=origin)
    assert pairs(traced, "origin") == {("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")}
    assert {job["engine"] for job in jobs.jobs(traced, "origin")} == {"transformers"}


def test_gradient_fidelity_can_be_left_out() -> None:
    assert jobs.jobs(config(mismatch={"gradient_fidelity": {"enabled": False}}), "fidelity") == []


def test_weights_along_a_run_are_one_job_wherever_it_is_deployed_and_none_where_they_are_not_kept() -> None:
    training = {"precisions": ["bf16"], "objectives": ["grpo"], "seeds": [0, 1], "keep_weights_every": 20}
    assert jobs.jobs(config(training={**training, "keep_weights_every": None}), "validate") == []
    evaluation = {"benchmarks": ["train", "heldout"], "precisions": ["fp16", "fp32"]}
    found = jobs.jobs(config(training=training, evaluation=evaluation), "validate")
    assert [tuple(job.values()) for job in found] == [
        (run, engine, precision)
        for run in ("bf16_grpo_seed0", "bf16_grpo_seed1")
        for engine, precision in (("transformers", "fp16"), ("transformers", "fp32"), ("trainer", "bf16"))
    ]
    own = jobs.jobs(config(training=training), "validate")
    assert {job["rollout"] for job in own} == {"bf16"}
