"""The plan at the paper's scale: a job a cell, and a longer list adds the jobs of its new cells alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from halfmatch.config_files import load
from halfmatch.paths import Paths
from halfmatch.pipeline import Pipeline
from halfmatch.steps import STEPS

if TYPE_CHECKING:
    from conftest import Checkout

pytestmark = pytest.mark.workflow

FILES = ("config/paper.yaml", "benchmarks/paper_scale.yaml")
# 2 precisions × 10 objectives × 3 seeds are 60 runs; with the untrained model 61, on 5 benchmarks in 3 dtypes. The
# weights along a run are one job a dtype. Six sets of problems: those to train on and the benchmarks.
JOBS = {
    "problems": 6,
    "model": 1,
    "solvability": 1200,
    "perfectible": 1,
    "rollouts": 3,
    "scores": 3,
    "mismatch": 3,
    "fidelity": 3,
    "train": 60,
    "evaluate": 915,
    "validate": 180,
    "report": 1,
}


def planned(checkout: Checkout, *files: str) -> dict[str, int]:
    """The jobs of a dry run, by rule."""
    text = checkout.run("snakemake", "-n", "--quiet", "rules", "--configfile", *files).stdout
    if "Job stats:" not in text:
        assert "Nothing to be done" in text
        return {}
    table = text.split("Job stats:")[1].split("total")[0].splitlines()[3:]
    counts = {line.split()[0]: int(line.split()[1]) for line in table if line.strip()}
    return {rule: count for rule, count in counts.items() if rule != "all"}


@pytest.fixture(scope="module")
def checkout(new_checkout: Callable[[str], Checkout]) -> Checkout:
    return new_checkout("scale")


@pytest.fixture(scope="module")
def ended(checkout: Checkout) -> Checkout:
    """Where a stand-in of every result lies, which Snakemake takes for what it made."""
    files = [checkout.root / name for name in FILES]
    pipeline = Pipeline(load(files), tuple(files))
    results = [*(path for step in STEPS for path in pipeline.results(step)), *_beside(pipeline)]
    for path in (checkout.root / name for name in results):
        file = path if path.suffix and path.name != pipeline.config.solvability.model else path / "stand-in"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    checkout.run("snakemake", "--touch", "--forceall", "--quiet", "--configfile", *FILES)
    return checkout


def _beside(pipeline: Pipeline) -> list[str]:
    """What some steps write beside what stands for them."""
    paths = Paths(Path(pipeline.config.output))
    return [
        *pipeline.results("problems", "excluded"),
        *pipeline.results("mismatch", "mismatch_curves"),
        *pipeline.results("train", "training_log"),
        *pipeline.results("train", "training_curves"),
        *pipeline.results("evaluate", "evaluation"),
        *pipeline.results("evaluate", "evaluated_responses"),
        *pipeline.results("train", "trained_weights"),
        *pipeline.results("validate", "validation"),
        str(paths.of("headline")),
        str(paths.of("figures")),
    ]


def test_there_is_a_job_a_cell(checkout: Checkout) -> None:
    assert planned(checkout, *FILES) == JOBS


@pytest.mark.parametrize(
    ("layer", "jobs"),
    [
        ({}, {}),
        # 2 precisions × 10 objectives, each evaluated on 5 benchmarks in 3 dtypes
        ({"training": {"seeds": [0, 1, 2, 3]}}, {"train": 20, "evaluate": 300, "validate": 60, "report": 1}),
        # 61 sets of weights on one benchmark more, in 3 dtypes; the jobs of the weights along the runs keep their other
        # responses
        (
            {"evaluation": {"benchmarks": ["aime24", "benchmark2", "benchmark3", "benchmark4", "benchmark5", "math"]}},
            {"evaluate": 183, "validate": 180, "report": 1},
        ),
        ({"mismatch": {"samples": 64}}, {"rollouts": 3, "scores": 3, "mismatch": 3, "fidelity": 3, "report": 1}),
    ],
    ids=["nothing", "a seed", "a benchmark", "samples"],
)
def test_what_is_added_is_all_that_runs(
    ended: Checkout, tmp_path: Path, layer: dict[str, object], jobs: dict[str, int]
) -> None:
    file = tmp_path / "layer.yaml"
    file.write_text(yaml.safe_dump(layer), encoding="utf-8")
    assert planned(ended, *FILES, os.fspath(file)) == jobs
