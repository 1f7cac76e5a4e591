"""What a step depends on: the parts of the configuration, the source files, and what its artefacts say of both."""

from __future__ import annotations

from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import pytest

from halfmatch import jobs
from halfmatch.code_files import PACKAGE, code_files
from halfmatch.config import Config
from halfmatch.config_files import validate
from halfmatch.steps import STEPS, digest, parameters, provenance


def config(**changes: Any) -> Config:
    return validate(changes, "")


def changed_jobs(before: Config, after: Config) -> set[tuple[str, str]]:
    """The jobs (step, wildcards) of both configurations whose parameters differ."""
    return {
        (step, " ".join(names.values()))
        for step in STEPS
        for names in jobs.jobs(before, step)
        if names in jobs.jobs(after, step) and parameters(before, step, **names) != parameters(after, step, **names)
    }


def steps_changed_by(**changes: Any) -> set[str]:
    return {step for step, _ in changed_jobs(Config(), config(**changes))}


def test_a_job_depends_on_its_own_precision_and_no_other() -> None:
    before = Config()
    values = before.model_dump(mode="json")
    values["precisions"]["fp16"]["loss_scaling"]["growth_interval"] = 7
    changed = changed_jobs(before, validate(values, ""))
    assert ("train", "fp16_grpo_seed0") in changed
    assert ("scores", "gain16 all transformers fp16 fp16") in changed
    assert not any("bf16" in names for _, names in changed)


def test_another_seed_or_objective_in_the_matrix_changes_no_run_that_is_there() -> None:
    changes = {"training": {"seeds": [0, 1, 2], "objectives": ["grpo", "pg-seq-is", "gspo"]}}
    assert steps_changed_by(**changes) == {"report"}


def test_a_setting_of_one_objective_changes_its_runs_alone() -> None:
    changed = changed_jobs(Config(), config(training={"objective_settings": {"grpo": {"clip_high": 0.28}}}))
    trained = {names for step, names in changed if step == "train"}
    assert trained == {"bf16_grpo_seed0", "bf16_grpo_seed1", "fp16_grpo_seed0", "fp16_grpo_seed1"}


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"grading": {"workers": 4}}, set()),
        ({"output": "results/elsewhere"}, set()),
        ({"engine": {"gpu_memory": 0.9}}, set()),
        ({"engine": {"name": "vllm", "draws": "race"}}, {"solvability", "rollouts", "train", "evaluate"}),
        ({"training": {"checkpoint_every": 3, "keep_checkpoints": 1}}, {"report"}),
        ({"solvability": {"low": 0.1}}, {"perfectible"}),
        ({"solvability": {"samples": 8}}, {"solvability"}),
        ({"mismatch": {"samples": 9}}, {"rollouts", "report"}),
        ({"mismatch": {"gradient_fidelity": {"objectives": ["pg"]}}}, {"fidelity", "report"}),
        ({"report": {"bootstrap_samples": 200}}, {"mismatch", "evaluate", "report"}),
        ({"training": {"learning_rate": 1e-4}}, {"train", "report"}),
        ({"evaluation": {"samples": 40}}, {"evaluate", "report"}),
        ({"report": {"title": "x"}}, {"report"}),
        ({"report": {"confidence": 0.9}}, {"perfectible", "mismatch", "fidelity", "evaluate", "report"}),
        ({"prompt": {"template": "boxed"}}, {"solvability", "rollouts", "train", "evaluate"}),
        ({"grading": {"rule": "boxed"}}, {"problems", "solvability", "rollouts", "train", "evaluate"}),
    ],
)
def test_a_change_reaches_the_steps_that_depend_on_it_and_no_other(changes: dict[str, Any], steps: set[str]) -> None:
    assert steps_changed_by(**changes) == steps


def test_every_parameter_names_a_key_that_exists() -> None:
    values = Config().model_dump(mode="json")
    for step, entry in STEPS.items():
        for key in entry.parameters:
            section: Any = values
            for part in key.split("."):
                if part.startswith("{"):
                    break
                assert part in section, f"{step}: {key}"
                section = section[part]


def test_provenance_says_what_an_artefact_came_from_and_nothing_of_where_and_when(tmp_path: Path) -> None:
    file = tmp_path / "shard.parquet"
    file.write_bytes(b"abc")
    before = provenance(Config(), "perfectible", inputs={"shard": file})
    # sha256("abc"), as FIPS 180-2 has it.
    assert before["inputs"]["shard"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert set(before["versions"]) == {"halfmatch", "pyarrow", *STEPS["perfectible"].packages}
    assert str(tmp_path) not in str(before)
    assert before == provenance(config(output="results/elsewhere"), "perfectible", inputs={"shard": file})
    assert (
        before["config"]
        != provenance(config(solvability={"low": 0.3}), "perfectible", inputs={"shard": file})["config"]
    )


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [1.5, None]}) == digest({"b": [1.5, None], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


@pytest.mark.parametrize("step", STEPS)
def test_the_code_files_of_a_step_are_what_python_s_own_module_finder_finds(step: str) -> None:
    """It reads the compiled code, of functions too; what only passes parameters on is left out there and here."""
    passing_on = (
        "cli",
        "config",
        "config_checks",
        "config_files",
        "config_section",
        "errors",
        "paths",
        "progress",
        "steps",
    )
    finder = ModuleFinder([str(PACKAGE.parent)], excludes=[f"halfmatch.{name}" for name in passing_on])
    finder.run_script(str(PACKAGE / "steps" / f"{step}.py"))
    files = {Path(module.__file__).relative_to(PACKAGE) for module in finder.modules.values() if module.__file__}
    assert files - {Path("__init__.py")} == {file for file in code_files(step) if file.suffix == ".py"}


def test_what_is_imported_inside_of_functions_counts_and_so_do_templates() -> None:
    rollouts = {file.as_posix() for file in code_files("rollouts")}
    assert "engines/transformers.py" in rollouts  # engines.create imports it
    assert "rl/trainer.py" not in rollouts
    assert "report/__init__.py" not in rollouts
    assert not any(file.as_posix().startswith("rl/") for file in code_files("problems"))
