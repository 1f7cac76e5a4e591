"""Training with vLLM as the rollout engine, in the trainer's process, on this machine's CPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfmatch import artifacts
from halfmatch.config import Config
from halfmatch.grading import Verdict
from halfmatch.paths import Paths
from halfmatch.steps import train

pytestmark = pytest.mark.vllm

RUN = "fp16_grpo_seed0"


RUN_CLI = "from halfmatch.cli import main; raise SystemExit(main())"


def configuration(output: Path) -> Config:
    return Config.model_validate(
        {
            "output": str(output),
            "problems": {"few": {"source": "file", "path": "few.jsonl"}},
            "models": {"tiny": {"source": "folder", "path": "tiny"}},
            "grading": {"rule": "last-number"},
            "engine": {"name": "vllm", "slots": 8, "gpu_memory": 0.2},
            "solvability": {"model": "tiny", "problems": "few"},
            "mismatch": {"models": ["tiny"], "problems": ["few"]},
            "evaluation": None,
            "training": {
                "precisions": ["fp16"],
                "objectives": ["grpo"],
                "seeds": [0],
                "iterations": 3,
                "prompts_per_iteration": 2,
                "samples_per_prompt": 4,
                "gradient_steps": 2,
                "max_prompt_tokens": 5,
                "sampling": {"max_tokens": 16},
                # large steps: an engine that kept old weights would be far from the trainer
                "learning_rate": 1e-2,
                "warmup_steps": 0,
                "checkpoint_every": 3,
            },
        }
    )


def perfectible_rows() -> list[dict[str, Any]]:
    return [
        {
            **dict.fromkeys(("tries", "solved", "wrong", "truncated", "timeout", "unparseable"), 0),
            **dict.fromkeys(("solve_rate", "solve_rate_low", "solve_rate_high"), 0.5),
            "problem_id": f"p{digit}",
            "problem": f"{digit}×{digit}",
            "answer": str(digit),
            "source": "here",
            "split": "train",
            "level": None,
            "kept": True,
        }
        for digit in range(2, 8)
    ]


class ParityGrader:
    """Right where the response has an even number of letters: a random model solves nothing else."""

    def __init__(self, **settings: Any):
        pass

    def __enter__(self) -> ParityGrader:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def grade_many(self, items: list[tuple[str, str, bool]]) -> list[Verdict]:
        return [Verdict("wrong" if len(text) % 2 else "correct", text) for text, _, _ in items]


def test_the_engine_follows_the_trainer(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "Grader", ParityGrader)
    config = configuration(tmp_path / "results")
    paths = Paths(Path(config.output))
    shutil.copytree(tiny_model_folder, paths.of("model", model="tiny"))
    artifacts.write(paths.of("perfectible"), "perfectible", perfectible_rows(), {})
    train.run(config, run=RUN)

    log = artifacts.read(paths.of("training_log", run=RUN), "training_log")
    assert artifacts.provenance(paths.of("training_log", run=RUN))["engine"]["name"] == "vllm"
    assert sum(log["weight_change"].to_pylist()) > 0
    # fp16 on both sides, on the policy: what is left is rounding, after each of the updates too
    first_of_iteration = [
        k3 for k3, iteration, before in zip(
            log["k3"].to_pylist(), log["iteration"].to_pylist(), [None, *log["iteration"].to_pylist()], strict=False
        ) if iteration != before
    ]  # fmt: skip
    assert len(first_of_iteration) == 3
    assert all(0 < k3 < 1e-3 for k3 in first_of_iteration)


def test_every_rank_samples_with_an_engine_of_its_own(tiny_model_folder: Path, tmp_path: Path) -> None:
    config = configuration(tmp_path / "results").model_dump(mode="json")
    config["training"] |= {"ranks": 2, "iterations": 2, "checkpoint_every": 1}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    paths = Paths(tmp_path / "results")
    shutil.copytree(tiny_model_folder, paths.of("model", model="tiny"))
    artifacts.write(paths.of("perfectible"), "perfectible", perfectible_rows(), {})
    command = [sys.executable, "-c", RUN_CLI, "train", "--config", str(file), "--run", RUN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    log = artifacts.read(paths.of("training_log", run=RUN), "training_log").to_pylist()
    first = [row for row in log if row["k3"] is not None]
    assert len(first) == 2
    for row in first:  # the worse of the two ranks' engines
        assert 0 < row["k3"] < 1e-2
        assert 0 < row["probe_k3"] < 1e-2
