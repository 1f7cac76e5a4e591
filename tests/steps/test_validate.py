"""The weights along a training: pushed to one engine, answered as an evaluation would, gone on with after a kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from halfmatch import artifacts, engines, models
from halfmatch.config import Config
from halfmatch.engines.transformers import TransformersEngine
from halfmatch.errors import UserError
from halfmatch.models.folder import save
from halfmatch.paths import Paths, iteration_name
from halfmatch.steps import evaluate, validate

RUN = "fp16_grpo_seed0"
PROBLEMS = {"few": 3, "more": 2}
NAMES = {"run": RUN, "engine": "transformers", "rollout": "fp16"}


def config_of(root: Path, **evaluation: Any) -> Config:
    return Config.model_validate(
        {
            "output": str(root),
            "problems": {name: {"source": "generator"} for name in PROBLEMS},
            "models": {"tiny": {"source": "folder", "path": "tiny"}},
            "grading": {"rule": "last-number"},
            "engine": {"slots": 8},
            "solvability": {"model": "tiny", "problems": "few"},
            "mismatch": {"models": ["tiny"], "problems": ["few"]},
            "training": {"iterations": 4, "keep_weights_every": 2, "objectives": ["grpo"], "seeds": [0]},
            "evaluation": {
                "benchmarks": ["more", "few"],
                "samples": 3,
                "k": [1],
                "sampling": {"max_tokens": 6},
                **evaluation,
            },
            "report": {"bootstrap_samples": 100},
        }
    )


@pytest.fixture
def kept(tiny_model_folder: Path, tmp_path: Path, quick_grader: None) -> Paths:
    """The initial model, two sets of weights of a run, and the trained model, which is the second of them."""
    paths = Paths(tmp_path / "results")
    shutil.copytree(tiny_model_folder, paths.of("model", model="tiny"))
    for number, count in enumerate(PROBLEMS.values()):
        rows = [
            {
                "problem_id": f"p{number}{digit}",
                "problem": f"{digit + 2}×{number + 2}",
                "answer": str((digit + 2) * (number + 2)),
                "source": "here",
                "split": "all",
                "level": None,
            }
            for digit in range(count)
        ]
        artifacts.write(paths.of("problems", problems=list(PROBLEMS)[number]), "problems", rows, {})
    for iteration in (2, 4):
        write_weights(tiny_model_folder, folder_of(paths, iteration), seed=iteration)
    shutil.copytree(folder_of(paths, 4), paths.of("trained", run=RUN))
    return paths


def folder_of(paths: Paths, iteration: int) -> Path:
    return paths.of("weights_of_iteration", run=RUN, iteration=iteration_name(iteration))


def write_weights(start: Path, folder: Path, *, seed: int, scale: float = 1.0) -> None:
    """The model with noise of its own on all weights, as training would have moved them."""
    model = models.load(start, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
            weight *= scale
    save(model, models.load_tokenizer(start), folder)


def rows_of(paths: Paths, **names: str) -> list[dict[str, Any]]:
    return artifacts.read(paths.of("validation", **{**NAMES, **names}), "validation").to_pylist()


def results(paths: Paths) -> list[bytes]:
    return [paths.of(kind, **NAMES).read_bytes() for kind in ("validation", "validation_metrics")]


class Asked:
    """Counts the engines that start and the requests of each call, and dies in a call if it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_in: int | None = None):
        self.engines: list[str] = []
        self.requests: list[int] = []
        create, generate = engines.create, TransformersEngine.generate

        def counted(engine: Any, requests: Any, *arguments: Any, **options: Any) -> Any:
            if len(self.requests) + 1 == dies_in:
                raise KeyboardInterrupt
            self.requests.append(len(requests))
            return generate(engine, requests, *arguments, **options)

        def started(name: str, *arguments: Any) -> Any:
            self.engines.append(name)
            return create(name, *arguments)

        monkeypatch.setattr(TransformersEngine, "generate", counted)
        monkeypatch.setattr(engines, "create", started)


@pytest.mark.parametrize(
    ("engine", "precision"),
    [
        *((engine, precision) for engine in ("transformers", "trainer") for precision in ("fp16", "bf16")),
        pytest.param("vllm", "fp16", marks=pytest.mark.vllm),
    ],
)
def test_the_last_weights_score_as_the_trained_model_is_evaluated(kept: Paths, engine: str, precision: str) -> None:
    config, names = config_of(kept.root), {"run": RUN, "engine": engine, "rollout": precision}
    validate.run(config, **names)
    rows = rows_of(kept, **names)
    for benchmark in PROBLEMS:
        evaluate.run(config, problems=benchmark, **names)
        expected = artifacts.read(kept.of("evaluation", problems=benchmark, **names), "evaluation").to_pylist()
        found = [row for row in rows if (row.pop("problems"), row.pop("iteration")) == (benchmark, 4)]
        rows = rows_of(kept, **names)
        assert found == expected
        scores = artifacts.read_json(kept.of("evaluation_metrics", problems=benchmark, **names))
        del scores["provenance"]
        assert artifacts.read_json(kept.of("validation_metrics", **names))["scores"][benchmark]["4"] == scores


def test_every_set_of_weights_answers_in_one_engine(kept: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    validate.run(config_of(kept.root), **NAMES)
    assert asked.engines == ["transformers"]
    assert asked.requests == [9, 6] * 2
    rows = rows_of(kept)
    assert [(row["iteration"], row["problems"], row["problem_id"]) for row in rows] == [
        (iteration, name, f"p{number}{digit}")
        for iteration in (2, 4)
        for number, (name, count) in enumerate(PROBLEMS.items())
        for digit in range(count)
    ]
    lengths = [[row["mean_tokens"] for row in rows if row["iteration"] == iteration] for iteration in (2, 4)]
    assert lengths[0] != lengths[1]  # other weights, other answers
    source = artifacts.provenance(kept.of("validation", **NAMES))
    assert (source["step"], source["dtype"], source["engine"]["name"]) == ("validate", "fp16", "transformers")
    assert source["inputs"][iteration_name(2)] == models.digest(folder_of(kept, 2))


def test_a_job_that_was_killed_goes_on_to_the_same_bytes(kept: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(kept.root)
    with monkeypatch.context() as patch:
        Asked(patch, dies_in=4)
        with pytest.raises(KeyboardInterrupt):
            validate.run(config, **NAMES)
    assert not kept.of("validation", **NAMES).exists()
    asked = Asked(monkeypatch)
    validate.run(config, **NAMES)
    assert asked.requests == [6]
    found = results(kept)
    shutil.rmtree(kept.root / "checkpoints")
    validate.run(config, **NAMES)
    assert results(kept) == found


@pytest.mark.parametrize(
    ("before", "requests"),
    [
        ({"samples": 2}, [3, 2, 3, 2]),  # a response more to each of three and two problems, by two sets of weights
        ({"benchmarks": ["few"]}, [6, 6]),
        ({"k": [1, 2]}, []),
    ],
)
def test_what_is_added_is_all_that_is_sampled(
    kept: Paths, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any], requests: list[int]
) -> None:
    validate.run(config_of(kept.root), **NAMES)
    expected = results(kept)
    shutil.rmtree(kept.root / "checkpoints")
    validate.run(config_of(kept.root, **before), **NAMES)
    asked = Asked(monkeypatch)
    validate.run(config_of(kept.root), **NAMES)
    assert asked.requests == requests
    assert results(kept) == expected


def test_other_weights_are_answered_anew(kept: Paths, monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path) -> None:
    validate.run(config_of(kept.root), **NAMES)
    shutil.rmtree(folder_of(kept, 2))
    write_weights(tiny_model_folder, folder_of(kept, 2), seed=7)
    asked = Asked(monkeypatch)
    validate.run(config_of(kept.root), **NAMES)
    assert asked.requests == [9, 6]


def test_weights_that_overflow_have_no_score_and_the_others_have(
    kept: Paths, tiny_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(folder_of(kept, 2))
    write_weights(tiny_model_folder, folder_of(kept, 2), seed=2, scale=1e6)
    validate.run(config_of(kept.root), **NAMES)
    assert {row["iteration"] for row in rows_of(kept)} == {4}
    content = json.loads(kept.of("validation_metrics", **NAMES).read_text())
    assert list(content["not_finite"]) == ["2"]
    assert "overflows fp16" in content["not_finite"]["2"]
    assert all(list(one) == ["4"] for one in content["scores"].values())
    assert f"{RUN} after 2 iterations: weight" in caplog.text


def test_experts_are_pushed_as_they_lie_in_the_model(kept: Paths, tiny_moe_folder: Path) -> None:
    shutil.copytree(tiny_moe_folder, kept.of("model", model="tiny"), dirs_exist_ok=True)
    for iteration in (2, 4):
        shutil.rmtree(folder_of(kept, iteration))
        write_weights(tiny_moe_folder, folder_of(kept, iteration), seed=iteration)
    shutil.rmtree(kept.of("trained", run=RUN))
    shutil.copytree(folder_of(kept, 4), kept.of("trained", run=RUN))
    test_the_last_weights_score_as_the_trained_model_is_evaluated(kept, "transformers", "fp16")


def test_a_run_that_ended_before_the_first_has_a_table_without_rows(
    kept: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (2, 4):
        shutil.rmtree(folder_of(kept, iteration))
    asked = Asked(monkeypatch)
    validate.run(config_of(kept.root), **NAMES)
    assert rows_of(kept) == []
    assert artifacts.read_json(kept.of("validation_metrics", **NAMES))["scores"] == {"few": {}, "more": {}}
    assert asked.engines == []


def test_what_cannot_be_validated_is_told(kept: Paths) -> None:
    shutil.rmtree(kept.of("trained_weights", run=RUN))
    with pytest.raises(UserError, match="no weights along this training; run its step train"):
        validate.run(config_of(kept.root), **NAMES)
    config = config_of(kept.root)
    assert config.training is not None
    last = config.training.model_copy(update={"keep_weights_every": None})
    with pytest.raises(UserError, match=r"training\.keep_weights_every"):
        validate.run(config.model_copy(update={"training": last}), **NAMES)
