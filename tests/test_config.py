"""The configuration refuses what cannot mean anything, and says what to do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from halfmatch.config import Config
from halfmatch.config_files import validate
from halfmatch.errors import UserError


def complaints(values: dict[str, Any]) -> list[str]:
    """The lines that a user sees for these values, without the file's name."""
    with pytest.raises(UserError) as caught:
        validate(values, "file.yaml")
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("file.yaml: ")
    return [line.strip() for line in lines]


def bootstrapped(**settings: Any) -> dict[str, Any]:
    return {"source": "bootstrap", "bootstrap": settings}


def test_the_defaults_are_valid() -> None:
    assert Config().output == "results/laptop"


@pytest.mark.parametrize(
    ("values", "path", "known"),
    [
        ({"traning": {}}, "traning", "training"),
        ({"training": {"learning_rat": 1}}, "training.learning_rat", "learning_rate"),
        ({"training": {"sampling": {"topp": 1}}}, "training.sampling.topp", "top_p"),
        ({"models": {"m": bootstrapped(gian=3)}}, "models.m.bootstrap.gian", "gain"),
        ({"models": {"m": {"source": "gguf", "pakage": "x"}}}, "models.m.pakage", "package"),
        (
            {"precisions": {"bf16": {"compute": "bf16", "rollout": "bf16", "emulat": "auto"}}},
            "precisions.bf16.emulat",
            "emulate",
        ),
        (
            {"precisions": {"fp16": {"compute": "fp16", "rollout": "fp16", "loss_scaling": {"grwth_factor": 2}}}},
            "precisions.fp16.loss_scaling.grwth_factor",
            "growth_factor",
        ),
        ({"problems": {"p": {"source": "generator", "columns": {"answr": "a"}}}}, "problems.p.columns.answr", "answer"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_the_nearest_known_key(
    values: dict[str, Any], path: str, known: str
) -> None:
    assert f"{path}: unknown key; did you mean {known}?" in complaints(values)


def test_a_key_like_no_other_is_refused_with_all_known_keys() -> None:
    (line,) = complaints({"report": {"zzz": 1}})
    assert line == "report.zzz: unknown key; known: bootstrap_samples, confidence, title"


def test_everything_that_is_wrong_is_told_at_once_a_line_each() -> None:
    lines = complaints(
        {"training": {"iterations": 0, "seeds": [-1], "learning_rate": "fast"}, "engine": {"device": "tpu"}, "sead": 1}
    )
    assert sorted(line.split(":")[0] for line in lines) == [
        "engine.device",
        "sead",
        "training.iterations",
        "training.learning_rate",
        "training.seeds.0",
    ]
    assert any("not 'tpu'" in line for line in lines)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"solvability": {"model": "gain12"}},
            "solvability.model: there is no model 'gain12'; did you mean gain120?",
        ),
        (
            {"solvability": {"problems": "trian"}},
            "solvability.problems: there is no problem set 'trian'; did you mean train?",
        ),
        (
            {"mismatch": {"precisions": ["bf16", "tf32"]}},
            "mismatch.precisions: there is no precision 'tf32'; did you mean fp32?",
        ),
        (
            {"mismatch": {"models": ["gain16", "gain16"]}},
            "mismatch.models: 'gain16' stands there twice",
        ),
        (
            {"mismatch": {"precisions": ["bf16", "fp16"], "grid": ["bf16", "fp32"]}},
            "mismatch.grid: 'fp32' is not sampled in; add it to mismatch.precisions",
        ),
        (
            {"training": {"objectives": ["grrpo"]}},
            "training.objectives: there is no objective 'grrpo'; did you mean grpo?",
        ),
        (
            {"training": {"objective_settings": {"grpo": {"clip_hihg": 0.28}}}},
            "training.objective_settings.grpo.clip_hihg: unknown setting; did you mean clip_high?",
        ),
        ({"training": {"seeds": [3, 3]}}, "training.seeds: a seed stands twice in [3, 3]"),
        (
            {"evaluation": {"benchmarks": ["aime"]}},
            "evaluation.benchmarks: there is no problem set 'aime'; known: all, heldout, train",
        ),
    ],
)
def test_every_name_must_exist(values: dict[str, Any], line: str) -> None:
    assert complaints(values) == [line]


def test_names_of_the_three_kinds_of_thing_carry_no_underscore_because_runs_are_named_by_them() -> None:
    (line,) = complaints({"models": {"gain_16": bootstrapped()}})
    assert line.startswith("models.gain_16: names are letters, digits, dots and hyphens")


def with_models(**models: dict[str, Any]) -> dict[str, Any]:
    first = next(iter(models))
    return {"models": models, "solvability": {"model": first}, "mismatch": {"models": [first]}}


def test_a_model_cannot_start_from_itself_or_round_a_circle() -> None:
    lines = complaints(with_models(a=bootstrapped(start="b"), b=bootstrapped(start="c"), c=bootstrapped(start="a")))
    assert lines[0] == "models.a.bootstrap.start: goes round in a circle (a → b → c → a)"
    assert complaints(with_models(a=bootstrapped(start="a"))) == [
        "models.a.bootstrap.start: goes round in a circle (a → a)"
    ]


def test_a_model_that_only_leads_into_a_circle_is_told_by_those_in_it() -> None:
    lines = complaints(with_models(a=bootstrapped(start="b"), b=bootstrapped(start="b")))
    assert lines == ["models.b.bootstrap.start: goes round in a circle (b → b)"]


def test_a_model_starts_from_a_bootstrapped_one_of_its_own_architecture() -> None:
    values = with_models(
        wide=bootstrapped(start="narrow", hidden_size=128, heads=4),
        narrow=bootstrapped(),
        other=bootstrapped(start="fetched"),
        fetched={"source": "folder", "path": "weights"},
        lost=bootstrapped(start="narow"),
    )
    assert complaints(values) == [
        "models.wide.bootstrap.start: 'narrow' has another architecture (hidden_size, heads); its weights do not fit",
        "models.other.bootstrap.start: 'fetched' is not bootstrapped here (source: folder)",
        "models.lost.bootstrap.start: there is no model 'narow'; did you mean narrow?",
    ]


def test_a_rollout_dtype_other_than_the_trainers_must_be_said_by_name() -> None:
    mixed = {"compute": "bf16", "rollout": "fp16"}
    others = {"mismatch": {"precisions": ["p"]}, "training": None, "solvability": {"precision": "p"}}
    (line,) = complaints({"precisions": {"p": mixed}, **others})
    assert "the trainer computes in bf16 and the engine in fp16" in line
    assert line.endswith("call it bf16-fp16")
    said = {"mismatch": {"precisions": ["bf16-fp16"]}, "training": None, "solvability": {"precision": "bf16-fp16"}}
    assert validate({"precisions": {"bf16-fp16": mixed}, **said}, "").precisions["bf16-fp16"].rollout == "fp16"


def test_a_precision_is_not_named_after_another_dtype() -> None:
    values = {"precisions": {name: {"compute": "bf16", "rollout": "bf16"} for name in ("bf16", "fp16", "fp32")}}
    assert complaints(values) == [
        "precisions.fp16: computes in bf16; call it bf16",
        "precisions.fp32: computes in bf16; call it bf16",
    ]


def test_no_dtype_is_guessed() -> None:
    (line,) = complaints({"precisions": {"bf16": {"compute": "bf16", "rollout": "auto"}}})
    assert line.startswith("precisions.bf16.rollout: ")
    assert "not 'auto'" in line


def test_training_and_evaluation_may_be_left_out() -> None:
    config = validate({"training": None, "evaluation": None}, "")
    assert config.training is None
    assert config.evaluation is None


def test_mappings_are_asked_for_where_a_section_belongs() -> None:
    assert complaints({"mismatch": 3}) == ["mismatch: needs `key: value` lines, not 3"]


@pytest.mark.parametrize(
    "section", [{"mismatch": {"sampling": {"top_p": 0.9}}}, {"training": {"sampling": {"top_p": 0.9}}}]
)
def test_a_nucleus_is_refused_where_ratios_are_taken(section: dict[str, Any]) -> None:
    (line,) = complaints(section)
    assert "a nucleus biases the ratio" in line


def test_reading_a_configuration_needs_no_torch() -> None:
    code = "import sys, halfmatch.config_files; halfmatch.config.Config(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("objective", "settings", "line"),
    [
        ("grpo", {"clip_low": -1}, "grpo: clip_low -1.0 must be in [0, 1), clip_high 0.2 at least 0"),
        ("grpo", {"clip_low": True}, "grpo: clip_low must be a float, not True"),
        ("grpo", {"clip_low": "0.1"}, "grpo: clip_low must be a float, not '0.1'"),
        (
            "pg",
            {"denominator": "tokens"},
            "pg: denominator 'tokens' must be one of max-length, response-tokens, response-mean",
        ),
        ("icepop", {"bound_low": 6}, "icepop: bound_low 6.0 must be in [0, bound 5.0]"),
        ("pg", {"kl_coefficient": float("nan")}, "pg: kl_coefficient nan must be at least 0"),
    ],
)
def test_settings_of_objectives_are_checked_when_they_are_read(
    objective: str, settings: dict[str, Any], line: str
) -> None:
    values = {"training": {"objective_settings": {objective: settings}}}
    assert complaints(values) == [f"training.objective_settings.{line}"]


def test_settings_that_fit_together_only_together_are_read_together() -> None:
    values = {"training": {"objective_settings": {"grpo-geo-mask": {"keep_low": 2, "keep_high": 3}}}}
    assert validate(values, "").training is not None


PRECISIONS = {name: {"compute": name, "rollout": name} for name in ("bf16", "fp16", "fp32")}
WITH_VALUE_HEAD = {"compute": "bf16", "rollout": "bf16", "fp32_modules": ["value_head"]}


@pytest.mark.parametrize(
    ("values", "path", "remedy"),
    [
        ({"training": {"critic_learning_rate": 1e-5}}, "training.critic_learning_rate", "add ppo"),
        ({"training": {"sampling_rounds": 3}}, "training.sampling_rounds", "set dynamic_sampling"),
        (
            {"training": {"objectives": ["dapo"], "sampling_rounds": 3,
                          "objective_settings": {"dapo": {"dynamic_sampling": False}}}},
            "training.sampling_rounds", "set dynamic_sampling",
        ),
        (
            {"precisions": PRECISIONS | {"bf16": WITH_VALUE_HEAD}},
            "precisions.bf16.fp32_modules", "remove value_head",
        ),
        (
            {"mismatch": {"gradient_fidelity": {"objectives": ["ppo"]}}},
            "mismatch.gradient_fidelity.objectives", "ppo has a value model",
        ),
        (
            {"mismatch": {"gradient_fidelity": {"objectives": ["dpo"]}}},
            "mismatch.gradient_fidelity.objectives", "dpo learns from pairs",
        ),
    ],
)  # fmt: skip
def test_what_no_objective_uses_is_refused(values: dict[str, Any], path: str, remedy: str) -> None:
    (line,) = complaints(values)
    assert line.startswith(f"{path}: ")
    assert remedy in line


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"training": {"iterations": 9, "keep_weights_every": 10}}, "10 is more than training.iterations, 9"),
        ({"training": {"keep_weights_every": 10}, "evaluation": None}, "without the section evaluation"),
    ],
)
def test_weights_that_nothing_would_be_kept_of_or_read_are_refused(values: dict[str, Any], remedy: str) -> None:
    (line,) = complaints(values)
    assert line.startswith("training.keep_weights_every: ")
    assert remedy in line


def test_the_last_weights_alone_may_be_kept() -> None:
    training = validate({"training": {"iterations": 9, "keep_weights_every": 9}}, "").training
    assert training is not None
    assert training.keep_weights_every == 9


def test_what_an_objective_uses_is_read() -> None:
    training = {"objectives": ["ppo", "dapo"], "critic_learning_rate": 1e-5, "sampling_rounds": 3}
    training |= {"objective_settings": {"ppo": {"gae_lambda": 1, "value_clip": float("inf")}}}
    values = {"training": training, "precisions": PRECISIONS | {"bf16": WITH_VALUE_HEAD}}
    assert validate(values, "").training is not None


def test_yes_and_no_are_no_numbers_of_a_precision() -> None:
    for setting in ("initial_scale", "growth_factor", "growth_interval"):
        precision = {"compute": "fp16", "rollout": "fp16", "loss_scaling": {setting: True}}
        (line,) = complaints({"precisions": {"fp16": precision}})
        assert line.startswith(f"precisions.fp16.loss_scaling.{setting}: true (in YAML also yes, no, on, off)")
    (line,) = complaints({"precisions": {"fp16": {"compute": "fp16", "rollout": "fp16", "loss_scaling": True}}})
    assert line.startswith("precisions.fp16.loss_scaling: true")
