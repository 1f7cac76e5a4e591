"""The plan: sizes worked out by hand, and differences from the paper with their sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from halfmatch.config import Config
from halfmatch.config_files import load, validate
from halfmatch.plan import differences, parameter_count, plan, preset_sources, problem_count, rows_of

REPOSITORY = Path(__file__).parents[1]
PAPER = REPOSITORY / "config/paper.yaml"


@pytest.fixture(autouse=True)
def nothing_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes come from artefacts where there are some, so there are none."""
    monkeypatch.chdir(tmp_path)


def config(**changes: Any) -> Config:
    return validate(changes, "")


def test_responses_and_tokens_of_a_small_run() -> None:
    sampling = {"max_tokens": 10}
    small = config(
        solvability={"samples": 3, "problems": "all", "sampling": sampling},
        mismatch={"models": ["gain16", "gain120"], "precisions": ["bf16"], "samples": 5, "sampling": sampling},
        training={
            "precisions": ["fp16"],
            "objectives": ["grpo", "pg"],
            "seeds": [0, 1, 2],
            "iterations": 7,
            "prompts_per_iteration": 4,
            "samples_per_prompt": 2,
            "sampling": sampling,
        },
        evaluation={"benchmarks": ["all"], "samples": 6, "k": [1], "sampling": sampling},
    )
    sizes = {row.step: (row.jobs, row.responses, row.tokens) for row in rows_of(small)}
    # 64 products of 2..9: 64·3; 64 problems × 5 samples × 2 models; 6 runs × 7 iterations × 8; 7 × 64 × 6
    # by the engine and by the trainer
    assert sizes["solvability"] == (2, 192, 1920)
    assert sizes["rollouts"] == (2, 640, 6400)
    assert sizes["scores"] == (2, 640, 6400)
    assert sizes["train"] == (6, 336, 3360)
    assert sizes["evaluate"] == (14, 5376, 53760)


def test_dynamic_sampling_and_a_critic_count_at_most() -> None:
    """3 runs of 5 iterations of 2 × 4 responses: one draws up to 3 times, one has a second model in its checkpoints."""
    training = {
        "objectives": ["grpo", "dapo", "ppo"],
        "precisions": ["bf16"],
        "seeds": [0],
        "sampling_rounds": 3,
        "iterations": 5,
        "prompts_per_iteration": 2,
        "samples_per_prompt": 4,
        "keep_checkpoints": 2,
        "sampling": {"max_tokens": 10},
    }
    given = config(training=training)
    (row,) = [row for row in rows_of(given) if row.step == "train"]
    size = parameter_count(given, given.solvability.model)
    assert size is not None
    assert (row.jobs, row.responses, row.tokens) == (3, 5 * 5 * 8, 5 * 5 * 8 * 10)
    assert row.bytes == size * (3 * 4 + 4 * 2 * 12)


def test_weights_along_the_training_are_counted() -> None:
    """3 sets a run of 10 iterations, 2 runs: validated in two engines, on 64 products and 16 of them held out."""
    training = {"precisions": ["bf16", "fp16"], "objectives": ["grpo"], "seeds": [0], "iterations": 10}
    evaluation = {"benchmarks": ["all", "heldout"], "samples": 3, "k": [1], "sampling": {"max_tokens": 10}}
    before, after = (
        {row.step: row for row in rows_of(config(training={**training, **more}, evaluation=evaluation))}
        for more in ({}, {"keep_weights_every": 3})
    )
    size = parameter_count(Config(), Config().solvability.model)
    assert size is not None
    assert (before["train"].bytes or 0) + 2 * 3 * size * 4 == after["train"].bytes
    assert "validate" not in before
    row = after["validate"]
    assert (row.jobs, row.responses, row.tokens) == (4, 4 * 3 * 80 * 3, 4 * 3 * 80 * 3 * 10)


def test_every_pair_of_a_grid_is_scored() -> None:
    grid = {"models": ["gain16"], "samples": 5, "sampling": {"max_tokens": 10}, "grid": ["bf16", "fp16"]}
    sizes = {row.step: (row.jobs, row.responses, row.tokens) for row in rows_of(config(mismatch=grid))}
    # 64 problems × 5 samples in bf16, fp16, fp32; scored as they are, and bf16 in fp16 and the other way round
    assert sizes["rollouts"] == (3, 960, 9600)
    assert sizes["scores"] == (5, 1600, 16000)


def test_what_has_to_be_fetched_first_is_unknown_and_not_zero() -> None:
    paper = load([PAPER])
    assert problem_count(paper, "math") is None
    rows = {row.step: row for row in rows_of(paper)}
    assert rows["solvability"].responses is None
    text = plan(paper, PAPER)
    assert "?" in next(line for line in text.splitlines() if line.startswith("solvability"))


def test_files_and_samples_are_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"problem": ["a", "b", "c"], "answer": ["1", "2", "3"]}), tmp_path / "p.parquet")
    source = {"source": "file", "path": "p.parquet"}
    laptop = {name: {"source": "generator", "split": name} for name in ("all", "train", "heldout")}
    counted = config(
        problems={**laptop, "mine": source, "two": {**source, "sample": 2}, "ten": {**source, "sample": 10}}
    )
    assert [problem_count(counted, name) for name in ("mine", "two", "ten")] == [3, 2, 3]


def test_the_size_of_a_model_follows_from_its_shape_or_name() -> None:
    # 4 layers of 64·(2·64 + 2·32) + 3·64·176, and 20 rows of 64
    assert parameter_count(Config(), "gain16") == 4 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 176) + 20 * 64
    named = load([PAPER]).model_copy(update={"shapes": {}})
    assert parameter_count(named, "r1-distill-qwen-1.5b") == 1_500_000_000


def test_differences_name_both_values_and_the_source_of_the_paper_s() -> None:
    paper = load([PAPER])
    sources = preset_sources(PAPER)
    lines = list(differences(load([REPOSITORY / "config/released.yaml"]), paper, sources))
    assert "training.objective_settings.grpo.clip_high: 0.2; paper 0.28 [T1; 0.2 in C]" in lines
    assert "training.objective_settings.grpo-seq-mis.bound: 10.0; paper 3.0 [T1; 10 in C]" in lines
    assert not any(line.startswith(("training.learning_rate", "output", "report")) for line in lines)
    assert list(differences(paper, paper, sources)) == []


def test_a_section_that_is_left_out_is_one_difference() -> None:
    paper, sources = load([PAPER]), preset_sources(PAPER)
    without = paper.model_copy(update={"training": None})
    assert list(differences(without, paper, sources)) == ["training: left out; the paper has it"]
    assert list(differences(paper, without, {})) == ["training: not of the paper"]


def test_sources_are_the_comments_behind_the_values(tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text(
        "a:\n  # a description\n  b: 'x # y'  # T, C\n  c:\n    d: [1, 2]  # F\nnone: 3\n", encoding="utf-8"
    )
    assert preset_sources(file) == {"a.b": "T, C", "a.c.d": "F"}


def test_without_the_preset_the_plan_says_so(tmp_path: Path) -> None:
    assert f"({tmp_path / 'no.yaml'} is not here" in plan(load([PAPER]), tmp_path / "no.yaml")


PRESETS = ("paper-lora", "paper-octothinker", "paper-moe", "paper-14b", "llama-2-7b", "mistral-7b")
# Where a value comes from, as the presets' comments begin: what was printed or released, or our choice.
SOURCES = ("T", "T1", "C", "P", "F", "ours", "PPO", "DPO", "no objective", "the whole")
# What says itself: names, sizes of a published model, a machine's device.
SELF_EVIDENT = ("output", "problems.", "models.", "shapes.", "engine.device", "report.title")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_every_key_with_its_source(name: str) -> None:
    path = REPOSITORY / f"config/{name}.yaml"
    config, sources = load([path]), preset_sources(path)
    written = set(_keys(yaml.safe_load(path.read_text(encoding="utf-8"))))
    whole = ("problems", "models")  # of their keys those of one kind of source apply
    lists = ("training.objective_settings",)
    needed = {key for key in _keys(config.model_dump(mode="json")) if not key.startswith((*whole, *lists))}
    assert needed <= written
    for key in needed:
        if not key.startswith(SELF_EVIDENT):
            assert sources.get(key, "").startswith(SOURCES), key


def _keys(values: Any, prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("name", [*PRESETS, "paper", "released"])
def test_presets_are_planned_and_fit_the_gpus_that_they_name(name: str) -> None:
    config = load([REPOSITORY / f"config/{name}.yaml"])
    text = plan(config, PAPER)
    (smallest,) = [line for line in text.splitlines() if line.startswith("  smallest GPU")]
    sizes = [float(size) for size in re.findall(r"([\d.]+) GiB", smallest)]
    assert len(sizes) == 2
    assert max(sizes) < 80e9 / 2**30
    assert "Differences from" in text
    if name in PRESETS:  # what is not trained here is no difference
        assert not any(line.startswith("  training.objective_settings.gspo") for line in text.splitlines())


def test_of_ppo_and_dpo_the_larger_is_planned() -> None:
    text = plan(load([REPOSITORY / "config/mistral-7b.yaml"]), PAPER)
    assert "4 P / r × 2" in text  # the policy and the value model, or the initial policy
