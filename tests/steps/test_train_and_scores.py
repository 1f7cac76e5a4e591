import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from halfmatch import artifacts, models, steps
from halfmatch.config import Config
from halfmatch.errors import UserError
from halfmatch.paths import Paths, iteration_name
from halfmatch.precision import Precision
from halfmatch.rl.export import export
from halfmatch.steps import course, scores, train

RUN_CLI = "from halfmatch.cli import main; raise SystemExit(main())"
RUN = "fp16_grpo_seed0"
NAMES = {"model": "tiny", "problems": "few", "engine": "transformers", "rollout": "fp16"}


def settings(output, **training):
    return {
        "output": str(output),
        "problems": {"few": {"source": "file", "path": "few.jsonl"}},
        "models": {"tiny": {"source": "folder", "path": "tiny"}},
        "grading": {"rule": "last-number"},
        "engine": {"slots": 8},
        "solvability": {"model": "tiny", "problems": "few"},
        "mismatch": {"models": ["tiny"], "problems": ["few"], "gradient_fidelity": {"objectives": ["pg"]}},
        "evaluation": {"benchmarks": ["few"]} if training.get("keep_weights_every") else None,
        "training": {
            "objectives": ["grpo"],
            "seeds": [0],
            "iterations": 3,
            "prompts_per_iteration": 2,
            "samples_per_prompt": 4,
            "gradient_steps": 2,
            "max_prompt_tokens": 5,
            "sampling": {"max_tokens": 12},
            "learning_rate": 1e-2,
            "checkpoint_every": 1,
            **training,
        },
    }


def perfectible_row(problem_id, problem, answer, kept=True, solve_rate=0.5):
    return {
        "problem_id": problem_id,
        "problem": problem,
        "answer": answer,
        "source": "here",
        "split": "train",
        "level": None,
        "tries": 40,
        "solved": 20,
        "wrong": 20,
        "truncated": 0,
        "timeout": 0,
        "unparseable": 0,
        "solve_rate": solve_rate,
        "solve_rate_low": 0.4,
        "solve_rate_high": 0.6,
        "kept": kept,
    }


@pytest.fixture
def prepare(tiny_model_folder, tmp_path):
    """A configuration with the artefacts that the steps read."""

    def make(name="results", rows=None, **training):
        config = Config.model_validate(settings(tmp_path / name, **training))
        paths = Paths(Path(config.output))
        shutil.copytree(tiny_model_folder, paths.of("model", model="tiny"))
        rows = rows or [perfectible_row(f"p{digit}", f"{digit}×{digit}", str(digit)) for digit in range(2, 6)]
        artifacts.write(paths.of("perfectible"), "perfectible", rows, {})
        return config, paths

    return make


def test_train_writes_log_curves_and_model(prepare, quick_grader):
    config, paths = prepare()
    train.run(config, run=RUN)
    log = artifacts.read(paths.of("training_log", run=RUN), "training_log")
    assert log["step"].to_pylist() == list(range(6))
    assert log["iteration"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert all(scale is not None for scale in log["loss_scale"].to_pylist())
    with open(paths.of("training_curves", run=RUN), encoding="utf-8") as file:
        assert [float(row["entropy"]) for row in csv.DictReader(file)] == log["entropy"].to_pylist()

    source = artifacts.provenance(paths.of("training_log", run=RUN))
    assert source["engine"]["name"] == "transformers"
    assert (source["step"], source["compute"], source["engine"]["dtype"]) == ("train", "fp16", "fp16")
    assert str(paths.root) not in str(source)

    folder = paths.of("trained", run=RUN)
    trained = models.load(folder, torch.float32)
    (shard,) = (paths.of("checkpoints", run=RUN) / "iteration-00000003").glob("*.safetensors")
    stored = load_file(shard)
    for name, weight in trained.named_parameters():
        assert torch.equal(weight, stored[f"policy.master.{name}"])
    assert models.load_config(folder).dtype == torch.float32
    assert (
        models.load_tokenizer(folder).get_vocab() == models.load_tokenizer(paths.of("model", model="tiny")).get_vocab()
    )
    assert (folder / "generation_config.json").is_file()


@pytest.mark.parametrize(
    ("objective", "columns"),
    [
        ("ppo", {"value_loss", "explained_variance", "critic_gradient_norm", "critic_loss_scale"}),
        ("dpo", {"preference_margin", "preference_accuracy", "problems_drawn", "mixed_problems"}),
        ("dapo", {"problems_drawn", "mixed_problems", "clip_high_share"}),
    ],
)
def test_every_method_trains_by_its_name_in_the_configuration(prepare, quick_grader, objective, columns):
    rate = {"critic_learning_rate": 1e-3} if objective == "ppo" else {}
    config, paths = prepare(objectives=[objective], iterations=2, **rate)
    name = f"fp16_{objective}_seed0"
    train.run(config, run=name)
    rows = artifacts.read(paths.of("training_log", run=name), "training_log").to_pylist()
    assert len(rows) == 4
    for row in rows:
        assert {column for column in columns if row[column] is None} <= {"explained_variance"}
    taken = [row["gradient_norm"] for row in rows if not row["step_skipped"]]  # the loss scale may have to back off
    assert taken
    assert min(taken) > 0
    start = models.load(paths.of("model", model="tiny"), torch.float32).state_dict()
    trained = models.load(paths.of("trained", run=name), torch.float32).state_dict()
    assert trained.keys() == start.keys()  # the policy alone
    assert all(not torch.equal(weight, start[key]) for key, weight in trained.items() if "proj.weight" in key)


def test_trainer_and_engine_may_compute_in_different_dtypes(prepare, quick_grader):
    config, paths = prepare(iterations=1)
    mixed = Precision(compute="bf16", rollout="fp16", emulate="always")
    config = config.model_copy(update={"precisions": {**config.precisions, "bf16-fp16": mixed}})
    train.run(config, run="bf16-fp16_grpo_seed0")
    path = paths.of("training_log", run="bf16-fp16_grpo_seed0")
    source = artifacts.provenance(path)
    assert (source["compute"], source["engine"]["dtype"]) == ("bf16", "fp16")
    row = artifacts.read(path, "training_log").to_pylist()[0]
    assert row["loss_scale"] is None
    assert row["k3"] > 1e-5  # weights are rounded differently, too


@pytest.mark.parametrize("push", ["merged", "unmerged"])
def test_an_adapter_is_written_beside_the_model_that_it_is_merged_into(prepare, quick_grader, push):
    config, paths = prepare(lora={"rank": 2, "alpha": 4, "targets": ["q_proj"], "push": push})
    train.run(config, run="fp16_grpo_seed0")
    folder = paths.of("trained", run="fp16_grpo_seed0")
    adapter = load_file(folder / "adapter/adapter_model.safetensors")
    settings = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["target_modules"]) == (2, ["q_proj"])
    merged = models.load(folder, torch.float32).state_dict()
    start = models.load(paths.of("model", model="tiny"), torch.float32).state_dict()
    path = "model.layers.1.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{path}.lora_{side}.weight"].double() for side in "AB")
    assert b.abs().max() > 0
    expected = start[f"{path}.weight"].half().double() + 2 * (b @ a)
    torch.testing.assert_close(merged[f"{path}.weight"].double(), expected, rtol=0, atol=1e-7)
    # what is not adapted is as the run computed with it
    assert torch.equal(merged["model.norm.weight"], start["model.norm.weight"].half().float())
    rows = artifacts.read(paths.of("training_log", run="fp16_grpo_seed0"), "training_log").to_pylist()
    assert [row["merge_lost"] is not None for row in rows] == ([push == "merged", False] * 3)


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(prepare, quick_grader):
    files = []
    for name in ("here", "there"):
        config, paths = prepare(name)
        train.run(config, run=RUN)
        files.append(outputs(paths))
    assert files[0] == files[1]


def test_a_finished_run_is_written_again_without_training(prepare, quick_grader, monkeypatch):
    config, paths = prepare()
    train.run(config, run=RUN)
    before = outputs(paths)
    for artefact in ("training_log", "training_curves"):
        paths.of(artefact, run=RUN).unlink()
    monkeypatch.setattr(train.Trainer, "iteration", lambda self: pytest.fail("trained again"))
    train.run(config, run=RUN)
    assert outputs(paths) == before


def test_more_iterations_go_on_from_the_end(prepare, quick_grader):
    config, paths = prepare("short", iterations=2)
    train.run(config, run=RUN)
    longer = Config.model_validate(settings(config.output, iterations=4))
    train.run(longer, run=RUN)
    whole, whole_paths = prepare("whole", iterations=4)
    train.run(whole, run=RUN)
    assert outputs(paths) == outputs(whole_paths)


def test_a_changed_setting_starts_afresh_after_the_end_and_is_refused_before_it(prepare, quick_grader, monkeypatch):
    config, paths = prepare()
    train.run(config, run=RUN)
    changed = Config.model_validate(settings(config.output, learning_rate=2e-2))
    monkeypatch.setattr(train, "save_trained", lambda *_: pytest.fail("killed"))
    original, steps = train.Trainer.iteration, []

    def dies_in_the_second(self):
        steps.append(1)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(train.Trainer, "iteration", dies_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        train.run(changed, run=RUN)
    assert [path.name for path in paths.of("checkpoints", run=RUN).glob("iter*")] == ["iteration-00000001"]
    with pytest.raises(UserError, match=r"iteration-00000001: .*unfinished run with other settings"):
        train.run(config, run=RUN)


def test_changed_code_is_another_course(prepare, monkeypatch):
    config, _ = prepare()
    source = {"inputs": {}, "versions": {}}
    before = course(config, "train", source, without=train.HOW_FAR, run=RUN)
    longer = Config.model_validate(settings(config.output, iterations=9))
    assert before == course(longer, "train", source, without=train.HOW_FAR, run=RUN)
    monkeypatch.setattr(steps, "checksums", lambda step: "another")
    after = course(config, "train", source, without=train.HOW_FAR, run=RUN)
    assert [name for name in before if before[name] != after[name]] == ["code"]


def test_an_empty_perfectible_set_says_the_counts_and_what_to_change(prepare):
    rows = [perfectible_row(f"p{n}", "2×3", "6", kept=False, solve_rate=rate) for n, rate in enumerate((0.0, 0.1, 1.0))]
    config, _ = prepare(rows=rows)
    with pytest.raises(
        UserError, match=r"none of 3 problems .* 20% and 80% .*\(2 less often, 1 more often\).*solvability"
    ):
        train.run(config, run=RUN)


def test_long_prompts_are_left_out_counted_and_named(prepare, quick_grader, caplog):
    rows = [perfectible_row("fits", "2×3", "6"), perfectible_row("long", "2×3=2×3=6", "6")]
    config, paths = prepare(rows=rows, prompts_per_iteration=1, samples_per_prompt=2, iterations=1)
    train.run(config, run=RUN)
    assert "1 problems have prompts of more than 5 tokens and are left out: ['long']" in caplog.text
    assert artifacts.provenance(paths.of("training_log", run=RUN))["long_prompts"] == ["long"]
    config, _ = prepare("none", rows=rows[1:])
    with pytest.raises(UserError, match="all 1 kept problems have prompts of more than 5 tokens"):
        train.run(config, run=RUN)


def outputs(paths):
    """Every byte that the step leaves for others."""
    folders = paths.of("trained", run=RUN).parent, paths.of("trained_weights", run=RUN)
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(paths.root).as_posix(): file.read_bytes() for file in files}


# ------------------------------------------------------------------------------------------- weights along the training
def kept(paths):
    return sorted(path.name for path in paths.of("trained_weights", run=RUN).iterdir())


@pytest.fixture
def along(prepare):
    """A run of five iterations whose weights are kept after every second."""

    def make(name="results", **training):
        defaults = {"iterations": 5, "keep_weights_every": 2, "checkpoint_every": 3, "keep_checkpoints": 9}
        return prepare(name, **{**defaults, **training})

    return make


def test_weights_along_the_training_are_those_of_its_checkpoints_and_change_nothing(along, quick_grader, tmp_path):
    config, paths = along(checkpoint_every=1)
    train.run(config, run=RUN)
    assert kept(paths) == ["iteration-00000002", "iteration-00000004"]
    for iteration in (2, 4):
        export(config, RUN, iteration, tmp_path / str(iteration))
        folder = paths.of("weights_of_iteration", run=RUN, iteration=iteration_name(iteration))
        assert models.digest(folder) == models.digest(tmp_path / str(iteration))
        assert {file.name for file in folder.iterdir()} == {
            file.name for file in paths.of("trained", run=RUN).iterdir()
        }

    plain, plain_paths = along("plain", keep_weights_every=None)
    train.run(plain, run=RUN)
    assert not plain_paths.of("trained_weights", run=RUN).exists()
    log, plain_log = (artifacts.read(one.of("training_log", run=RUN), "training_log") for one in (paths, plain_paths))
    assert log.equals(plain_log)
    assert models.digest(paths.of("trained", run=RUN)) == models.digest(plain_paths.of("trained", run=RUN))


def test_a_key_that_is_not_set_is_no_part_of_what_a_run_was_of(along):
    config, _ = along(keep_weights_every=None)
    assert "training.keep_weights_every" not in steps.parameters(config, "train", run=RUN)
    assert steps.parameters(along("other")[0], "train", run=RUN)["training.keep_weights_every"] == 2


@pytest.mark.parametrize("dies_in", [3, 4, 5])
def test_a_run_that_was_killed_leaves_the_same_weights_along_its_way(along, quick_grader, monkeypatch, dies_in):
    """Before its first checkpoint and after it; what the tools remove of a killed job's results is removed."""
    whole, whole_paths = along("whole")
    train.run(whole, run=RUN)
    config, paths = along("killed")
    original, begun = train.Trainer.iteration, []

    def dies(self):
        begun.append(1)
        if len(begun) == dies_in:
            raise KeyboardInterrupt
        return original(self)

    with monkeypatch.context() as patched:
        patched.setattr(train.Trainer, "iteration", dies)
        with pytest.raises(KeyboardInterrupt):
            train.run(config, run=RUN)
    assert not paths.of("trained_weights", run=RUN).exists()
    train.run(config, run=RUN)
    assert outputs(paths) == outputs(whole_paths)
    assert len(kept(paths)) == 2


def test_weights_of_a_finished_run_are_there_again_without_training(along, quick_grader, monkeypatch):
    config, paths = along()
    train.run(config, run=RUN)
    before = outputs(paths)
    shutil.rmtree(paths.of("trained_weights", run=RUN))
    monkeypatch.setattr(train.Trainer, "iteration", lambda self: pytest.fail("trained again"))
    train.run(config, run=RUN)
    assert outputs(paths) == before
    train.run(Config.model_validate(settings(paths.root, iterations=5, keep_weights_every=4)), run=RUN)
    assert kept(paths) == ["iteration-00000004"]


def test_weights_that_a_finished_run_did_not_keep_are_trained_for_again(along, quick_grader):
    config, paths = along(keep_weights_every=None)
    train.run(config, run=RUN)
    train.run(Config.model_validate(settings(paths.root, iterations=5, keep_weights_every=1)), run=RUN)
    assert kept(paths) == [f"iteration-{done:08d}" for done in range(1, 6)]
    again, again_paths = along("again", keep_weights_every=1)
    train.run(again, run=RUN)
    assert outputs(paths) == outputs(again_paths)


# ------------------------------------------------------------------------------------------------------------- scores
@pytest.fixture
def rollouts(prepare):
    config, paths = prepare()
    generator = torch.Generator().manual_seed(0)

    def ints(count):
        return torch.randint(2, 20, (count,), generator=generator).tolist()

    rows = [
        {
            "problem_id": f"p{problem}",
            "sample": sample,
            "prompt_ids": [2 + problem, 9],
            "verdict": "wrong",
            "token_ids": ints(3 + sample),
            "logprobs": [-0.5] * (3 + sample),
            "finish_reason": "length",
        }
        for problem in range(3)
        for sample in range(4)
    ]
    artifacts.write(paths.of("rollouts", **NAMES), "completions", rows, {})
    return config, paths, rows


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scores_are_the_trainers_logprobs_of_the_recorded_tokens(rollouts, precision):
    config, paths, rows = rollouts
    scores.run(config, **NAMES, train=precision)
    path = paths.of("scores", **NAMES, train=precision)
    table = artifacts.read(path, "scores").to_pylist()
    exact = models.load(paths.of("model", model="tiny"), torch.float64)
    exact.set_attn_implementation("eager")
    for row, scored in zip(rows, table, strict=True):
        assert (scored["problem_id"], scored["sample"]) == (row["problem_id"], row["sample"])
        assert scored["token_ids"] == row["token_ids"]
        assert scored["logp_rollout"] == row["logprobs"]
        logits = exact(input_ids=torch.tensor([row["prompt_ids"] + row["token_ids"]])).logits[0, 1:-1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(row["token_ids"])[:, None])[:, 0]
        error = (torch.tensor(scored["logp_train"], dtype=torch.float64) - expected).abs().max()
        assert error < 1e-4 if precision == "fp32" else 1e-4 < error < 1
    assert artifacts.provenance(path)["dtype"] == precision
    first = path.read_bytes()
    scores.run(config, **NAMES, train=precision)
    assert path.read_bytes() == first


# --------------------------------------------------------------------------------------------------------- kill -9
def command_line(config_file):
    return subprocess.Popen(
        [sys.executable, "-c", RUN_CLI, "train", "--config", str(config_file), "--run", RUN],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_run_killed_with_9_again_and_again_ends_in_the_same_bytes(prepare, tmp_path):
    training = {"iterations": 12, "checkpoint_every": 2, "keep_weights_every": 3}
    whole, whole_paths = prepare("whole", **training)
    train.run(whole, run=RUN)
    rewards = artifacts.read(whole_paths.of("training_log", run=RUN), "training_log")["reward"].to_pylist()
    assert any(rewards)

    _, paths = prepare("killed", **training)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings(paths.root, **training)), encoding="utf-8")
    checkpoints = paths.of("checkpoints", run=RUN)
    for wanted in ("iteration-00000002", "iteration-00000006"):
        process = command_line(file)
        deadline = time.monotonic() + 300
        while process.poll() is None and not (checkpoints / wanted).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.stderr.read()
        process.stderr.close()
    with command_line(file) as process:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert outputs(paths) == outputs(whole_paths)


# ------------------------------------------------------------------------------------------------------ several ranks
@pytest.mark.slow
def test_two_ranks_train_like_one_and_go_on_from_its_checkpoint(prepare, tmp_path):
    _, alone = prepare("alone")
    file = tmp_path / "config.yaml"

    def run_on(paths, **training):
        file.write_text(yaml.safe_dump(settings(paths.root, **training)), encoding="utf-8")
        with command_line(file) as process:
            _, errors = process.communicate()
        assert process.returncode == 0, errors
        return artifacts.read(paths.of("training_log", run=RUN), "training_log").to_pylist()

    first = run_on(alone)
    _, many = prepare("many")
    rows = run_on(many, ranks=2, keep_weights_every=3)
    assert len(rows) == len(first) == 6
    assert rows[0]["k3"] == pytest.approx(first[0]["k3"], rel=1e-3)
    assert rows[0]["loss"] == pytest.approx(first[0]["loss"], abs=1e-5)
    assert rows[0]["gradient_norm"] == pytest.approx(first[0]["gradient_norm"], rel=0.02)
    assert models.load_config(many.of("trained", run=RUN)).vocab_size == 20
    assert kept(many) == ["iteration-00000003"]  # the last ones, written once more
    last = many.of("weights_of_iteration", run=RUN, iteration=iteration_name(3))
    assert models.digest(last) == models.digest(many.of("trained", run=RUN))

    longer = run_on(alone, ranks=2, iterations=5)
    assert longer[:6] == first
    assert len(longer) == 10


@pytest.mark.slow
def test_what_is_wrong_on_the_ranks_is_told_with_the_same_exit_status(prepare, tmp_path):
    _, paths = prepare(rows=[perfectible_row("p2", "2×2", "4", kept=False)])
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings(paths.root, ranks=2)), encoding="utf-8")
    with command_line(file) as process:
        _, errors = process.communicate()
    assert process.returncode == 2
    assert "so there is nothing to train on" in errors
    assert not paths.of("training_log", run=RUN).exists()


# ------------------------------------------------------------------------------------------------------------ export
def test_a_checkpoint_is_exported_as_a_model_that_transformers_loads(prepare, quick_grader, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    config, paths = prepare()
    train.run(config, run=RUN)
    export(config, RUN, None, tmp_path / "last")
    export(config, RUN, 2, tmp_path / "second")
    last, second, final = (
        dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
        for folder in (tmp_path / "last", tmp_path / "second", paths.of("trained", run=RUN))
    )
    assert all(torch.equal(last[name], weight) for name, weight in final.items())
    assert any(not torch.equal(second[name], weight) for name, weight in final.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "last").eos_token == "<eos>"
    assert GenerationConfig.from_pretrained(tmp_path / "last").eos_token_id is not None


def test_what_cannot_be_exported_is_told(prepare, quick_grader, tmp_path):
    config, paths = prepare()
    with pytest.raises(UserError, match="no checkpoint is there"):
        export(config, RUN, None, tmp_path / "none")
    train.run(config, run=RUN)
    with pytest.raises(UserError, match="no checkpoint of iteration 7; there are those of 2, 3"):
        export(config, RUN, 7, tmp_path / "none")
    with pytest.raises(UserError, match="exists and is not empty"):
        export(config, RUN, None, paths.of("trained", run=RUN))
