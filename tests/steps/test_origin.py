"""The step origin: what it reads of the rollouts, and what it writes."""

import shutil
from pathlib import Path

import pytest

from halfmatch import artifacts
from halfmatch.config import Config
from halfmatch.errors import UserError
from halfmatch.paths import Paths
from halfmatch.steps import origin

NAMES = {"model": "tiny", "problems": "few", "engine": "transformers", "rollout": "fp16"}


@pytest.fixture
def config(tiny_model_folder, tmp_path):
    return configuration(tiny_model_folder, tmp_path)


def configuration(model, tmp_path):
    """A configuration with rollouts of four problems, the third of which has an empty first response."""
    config = Config.model_validate(
        {
            "output": str(tmp_path),
            "problems": {"few": {"source": "file", "path": "few.jsonl"}},
            "models": {"tiny": {"source": "folder", "path": "tiny"}},
            "solvability": {"model": "tiny", "problems": "few"},
            "mismatch": {
                "models": ["tiny"],
                "problems": ["few"],
                "origin": {"enabled": True, "responses": 3, "parts": ["lm_head"]},
            },
            "training": None,
            "evaluation": None,
        }
    )
    paths = Paths(Path(config.output))
    shutil.copytree(model, paths.of("model", model="tiny"))
    rows = [
        {
            "problem_id": f"p{problem}",
            "sample": sample,
            "prompt_ids": [2, 3 + problem],
            "token_ids": [] if (problem, sample) == (2, 0) else [5, 6 + problem, 7 + sample],
            "logprobs": [] if (problem, sample) == (2, 0) else [-1.0, -2.0, -3.0],
            "finish_reason": "length",
        }
        for problem in range(5)
        for sample in range(2)
    ]
    for rollout in ("fp16", "fp32"):
        artifacts.write(paths.of("rollouts", **{**NAMES, "rollout": rollout}), "completions", rows, {})
    return config


def test_the_first_response_to_each_of_some_problems_is_traced(config):
    path = Paths(Path(config.output)).of("origin", **NAMES, train="fp16")
    origin.run(config, **NAMES, train="fp16")
    found = artifacts.read_json(path)
    assert (found["responses"], found["tokens"]) == (3, 9)
    assert [part["part"] for part in found["parts"]] == ["lm_head"]
    assert found["recorded_difference"] > 0.1  # what stands in the table was never sampled
    assert found["provenance"]["names"] == {**NAMES, "train": "fp16"}
    before = path.read_bytes()
    origin.run(config, **NAMES, train="fp16")
    assert path.read_bytes() == before


def test_of_fp32_there_is_no_part_to_put_in_fp32(config):
    names = {**NAMES, "rollout": "fp32"}
    origin.run(config, **names, train="fp32")
    assert artifacts.read_json(Paths(Path(config.output)).of("origin", **names, train="fp32"))["parts"] == []


def test_an_engine_whose_states_cannot_be_seen_is_refused(config):
    with pytest.raises(UserError, match="hidden states of the engine vllm cannot be seen"):
        origin.run(config, **{**NAMES, "engine": "vllm"}, train="fp16")


def test_of_a_mixture_of_experts_the_routing_of_both_sides_is_compared(tiny_moe_folder, tmp_path, config):
    mixture = configuration(tiny_moe_folder, tmp_path / "moe")
    origin.run(mixture, **NAMES, train="fp16")
    found = artifacts.read_json(Paths(Path(mixture.output)).of("origin", **NAMES, train="fp16"))["router_agreement"]
    assert (found["responses"], found["tokens"], len(found["layers"])) == (3, 9, 2)
    assert 0.5 < found["share"]["low"] <= found["share"]["value"] <= 1
    origin.run(config, **NAMES, train="fp16")
    assert "router_agreement" not in artifacts.read_json(Paths(Path(config.output)).of("origin", **NAMES, train="fp16"))
